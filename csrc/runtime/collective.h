// What an op list needs of a communicator: collectives that can be enqueued, eagerly or under capture.
#pragma once

#include <cstdint>
#include <string>

#include "driver/table.h"

namespace graphshard {

// Element types of reductions, by NCCL's numbers.
enum class ElementType : int { kFloat16 = 6, kFloat32 = 7, kBfloat16 = 9 };

class Collective {
 public:
  virtual ~Collective() = default;

  // Every rank's `num_bytes` at `source`, by rank, at `destination` of every rank. Throws on failure, naming the call.
  virtual void all_gather(CUdeviceptr destination, CUdeviceptr source, size_t num_bytes, CUstream stream) = 0;
  // The sum over ranks of `num_elements` x world_size at `source`; this rank's part at `destination`.
  virtual void reduce_scatter(CUdeviceptr destination, CUdeviceptr source, size_t num_elements, ElementType type,
                              CUstream stream) = 0;
  virtual int world_size() const = 0;
  virtual std::string name() const = 0;
};

}  // namespace graphshard
