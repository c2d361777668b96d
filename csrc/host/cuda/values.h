// Value writes and waits on words that other threads and processes share.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <cuda.h>

namespace graphshard::hostcuda {

/// One operation of a batch: a release store, or a wait that yields until its condition holds.
struct ValueOp {
  enum class Kind : uint8_t { kWrite32, kWrite64, kWait32, kWait64, kBarrier };
  Kind kind = Kind::kBarrier;
  unsigned int flags = 0;
  CUdeviceptr address = 0;
  uint64_t value = 0;

  bool is_wait() const { return kind == Kind::kWait32 || kind == Kind::kWait64; }
};

/// Run `op` if it can run now; false for a wait whose condition does not hold yet.
bool try_value_op(const ValueOp& op);
/// Sleep until the word of the wait `op` may have changed, at most `timeout_ns`.
void sleep_on_value(const ValueOp& op, int64_t timeout_ns);
/// Spin shortly, then sleep, until the wait `op` holds.
void wait_for_value(const ValueOp& op);

/// CUDA's description of an operation, checked; CUDA_ERROR_INVALID_VALUE names no more than that.
CUresult parse_value_op(const CUstreamBatchMemOpParams& params, ValueOp* op);
CUstreamBatchMemOpParams describe_value_op(const ValueOp& op);
CUresult check_value_op(const ValueOp& op);

using ValueOps = std::shared_ptr<const std::vector<ValueOp>>;

}  // namespace graphshard::hostcuda
