// What an op list needs of a communicator: collectives that can be enqueued, eagerly or under capture.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "driver/table.h"

namespace graphshard {

// Element types of reductions, by NCCL's numbers.
enum class ElementType : int { kFloat16 = 6, kFloat32 = 7, kBfloat16 = 9 };

constexpr size_t element_bytes(ElementType type) { return type == ElementType::kFloat32 ? 4 : 2; }

// A call of the collective library that failed. An op list throws it again with the op's place.
class CollectiveError : public std::runtime_error {
 public:
  CollectiveError(std::string entry_point, int code, const std::string& message)
      : std::runtime_error(message), entry_point_(std::move(entry_point)), code_(code) {}

  const std::string& entry_point() const { return entry_point_; }
  int code() const { return code_; }

 private:
  std::string entry_point_;
  int code_;
};

// Made by std::make_shared: op lists and graphs share it with whoever made it.
class Collective : public std::enable_shared_from_this<Collective> {
 public:
  virtual ~Collective() = default;

  // Every rank's `num_bytes` at `source`, by rank, at `destination` of every rank. Throws CollectiveError.
  virtual void all_gather(CUdeviceptr destination, CUdeviceptr source, size_t num_bytes, CUstream stream) = 0;
  // The sum over ranks of `num_elements` x world_size at `source`; this rank's part at `destination`.
  virtual void reduce_scatter(CUdeviceptr destination, CUdeviceptr source, size_t num_elements, ElementType type,
                              CUstream stream) = 0;
  // For a graph that has captured its calls, to be kept as long as the graph is: a collective that is held refuses to
  // be destroyed, since libraries wait there for such graphs, forever.
  virtual std::shared_ptr<void> hold() { return nullptr; }
  virtual int world_size() const = 0;
  virtual std::string name() const = 0;
};

}  // namespace graphshard
