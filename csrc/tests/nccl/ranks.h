// Threads as ranks, and what each holds: a communicator, windows, bytes that say where they came from.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "litmus.h"
#include "nccl_api.h"

namespace graphshard::litmus {

/// `body(rank)` in a thread for each rank, with the context current; the first failure is thrown when all have ended.
void run_ranks(int num_ranks, const std::function<void(int)>& body);

void expect_nccl(int found, int expected, const char* call, const char* file, int line);
ncclUniqueId new_unique_id();
/// ncclCommInitRankConfig as callers of copy-engine gathers make it.
nccl::Config zero_cta();

/// A communicator of one rank; destroyed with it unless told otherwise.
class Comm {
 public:
  Comm(const ncclUniqueId& id, int num_ranks, int rank, nccl::Config config = zero_cta());
  ~Comm();
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;
  operator ncclComm_t() const { return comm_; }
  /// Aborted, or never to be destroyed: its rank is stuck.
  void release() { comm_ = nullptr; }
  int async_error() const;
  /// Poll until there is one; the test's own limit bounds it.
  int await_async_error() const;
  std::string last_error() const { return nc.get_last_error(comm_); }

 private:
  ncclComm_t comm_ = nullptr;
};

/// ncclMemAlloc, registered if there is a communicator to do it with.
class NcclMemory {
 public:
  explicit NcclMemory(size_t num_bytes, ncclComm_t comm = nullptr);
  ~NcclMemory();
  NcclMemory(const NcclMemory&) = delete;
  NcclMemory& operator=(const NcclMemory&) = delete;
  unsigned char* bytes(size_t offset = 0) const { return static_cast<unsigned char*>(memory_) + offset; }
  CUdeviceptr address(size_t offset = 0) const { return reinterpret_cast<CUdeviceptr>(memory_) + offset; }
  ncclWindow_t window() const { return window_; }

 private:
  void* memory_ = nullptr;
  ncclComm_t comm_;
  ncclWindow_t window_ = nullptr;
};

/// Bytes of `rank`'s chunk of `unit` in `round`.
void fill_chunk(unsigned char* bytes, size_t num_bytes, int rank, int unit, int round);
/// Whether `bytes` hold every rank's chunk, by rank.
bool holds_unit(const unsigned char* bytes, size_t chunk_bytes, int num_ranks, int unit, int round);

int gather(const void* send, void* receive, size_t num_bytes, ncclComm_t comm, CUstream stream);

/// Set for a test, cleared after it.
class Staged {
 public:
  explicit Staged(const char* spec);
  ~Staged() { nc.stage(""); }
  Staged(const Staged&) = delete;
  Staged& operator=(const Staged&) = delete;
};

}  // namespace graphshard::litmus

#define NCCL_EXPECT(expected, call) ::graphshard::litmus::expect_nccl((call), (expected), #call, __FILE__, __LINE__)
#define NCCL_OK(call) NCCL_EXPECT(::graphshard::nccl::kSuccess, call)
