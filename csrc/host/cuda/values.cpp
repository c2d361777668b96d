#include "values.h"

#include <climits>

#include "futex.h"

namespace graphshard::hostcuda {

namespace {

constexpr int64_t kSpinNs = 5000;
// A plain store by another process wakes no futex: sleep in slices, growing while nothing happens.
constexpr int64_t kFirstSliceNs = 50000;
constexpr int64_t kLastSliceNs = 1000000;

uint64_t load_word(const ValueOp& op) {
  if (op.kind == ValueOp::Kind::kWait32) {
    return __atomic_load_n(reinterpret_cast<const uint32_t*>(op.address), __ATOMIC_ACQUIRE);
  }
  return __atomic_load_n(reinterpret_cast<const uint64_t*>(op.address), __ATOMIC_ACQUIRE);
}

bool holds(const ValueOp& op, uint64_t word) {
  const bool is_64 = op.kind == ValueOp::Kind::kWait64;
  switch (op.flags & 3U) {
    case CU_STREAM_WAIT_VALUE_GEQ:
      return is_64 ? static_cast<int64_t>(word - op.value) >= 0
                   : static_cast<int32_t>(static_cast<uint32_t>(word) - static_cast<uint32_t>(op.value)) >= 0;
    case CU_STREAM_WAIT_VALUE_EQ:
      return word == op.value;
    case CU_STREAM_WAIT_VALUE_AND:
      return (word & op.value) != 0;
    default: {
      const uint64_t mask = is_64 ? ~uint64_t{0} : UINT32_MAX;
      return (~(word | op.value) & mask) != 0;
    }
  }
}

void write_word(const ValueOp& op) {
  if (op.kind == ValueOp::Kind::kWrite32) {
    __atomic_store_n(reinterpret_cast<uint32_t*>(op.address), static_cast<uint32_t>(op.value), __ATOMIC_RELEASE);
  } else {
    __atomic_store_n(reinterpret_cast<uint64_t*>(op.address), op.value, __ATOMIC_RELEASE);
  }
  futex_wake(reinterpret_cast<const void*>(op.address), INT_MAX, /*shared=*/true);
}

}  // namespace

bool try_value_op(const ValueOp& op) {
  switch (op.kind) {
    case ValueOp::Kind::kWrite32:
    case ValueOp::Kind::kWrite64:
      write_word(op);
      return true;
    case ValueOp::Kind::kWait32:
    case ValueOp::Kind::kWait64:
      return holds(op, load_word(op));
    case ValueOp::Kind::kBarrier:
      return true;
  }
  return true;
}

void sleep_on_value(const ValueOp& op, int64_t timeout_ns) {
  const uint64_t word = load_word(op);
  if (holds(op, word)) return;
  futex_wait(reinterpret_cast<const void*>(op.address), static_cast<uint32_t>(word), timeout_ns, /*shared=*/true);
}

void wait_for_value(const ValueOp& op) {
  if (spin_until([&op] { return try_value_op(op); }, kSpinNs)) return;
  int64_t slice_ns = kFirstSliceNs;
  while (!try_value_op(op)) {
    sleep_on_value(op, slice_ns);
    slice_ns = slice_ns * 2 > kLastSliceNs ? kLastSliceNs : slice_ns * 2;
  }
}

CUresult check_value_op(const ValueOp& op) {
  const bool is_64 = op.kind == ValueOp::Kind::kWrite64 || op.kind == ValueOp::Kind::kWait64;
  if (op.kind == ValueOp::Kind::kBarrier) return CUDA_SUCCESS;
  if (op.address == 0 || op.address % (is_64 ? 8 : 4) != 0) return CUDA_ERROR_INVALID_VALUE;
  if (op.is_wait() && (op.flags & ~(3U | CU_STREAM_WAIT_VALUE_FLUSH)) != 0) return CUDA_ERROR_INVALID_VALUE;
  if (!op.is_wait() && op.flags > CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER) return CUDA_ERROR_INVALID_VALUE;
  return CUDA_SUCCESS;
}

CUresult parse_value_op(const CUstreamBatchMemOpParams& params, ValueOp* op) {
  *op = ValueOp{};
  switch (params.operation) {
    case CU_STREAM_MEM_OP_WAIT_VALUE_32:
    case CU_STREAM_MEM_OP_WAIT_VALUE_64:
      op->kind = params.operation == CU_STREAM_MEM_OP_WAIT_VALUE_32 ? ValueOp::Kind::kWait32 : ValueOp::Kind::kWait64;
      op->flags = params.waitValue.flags;
      op->address = params.waitValue.address;
      op->value = op->kind == ValueOp::Kind::kWait32 ? params.waitValue.value : params.waitValue.value64;
      break;
    case CU_STREAM_MEM_OP_WRITE_VALUE_32:
    case CU_STREAM_MEM_OP_WRITE_VALUE_64:
      op->kind =
          params.operation == CU_STREAM_MEM_OP_WRITE_VALUE_32 ? ValueOp::Kind::kWrite32 : ValueOp::Kind::kWrite64;
      op->flags = params.writeValue.flags;
      op->address = params.writeValue.address;
      op->value = op->kind == ValueOp::Kind::kWrite32 ? params.writeValue.value : params.writeValue.value64;
      break;
    case CU_STREAM_MEM_OP_BARRIER:
    case CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES:
      break;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
  return check_value_op(*op);
}

CUstreamBatchMemOpParams describe_value_op(const ValueOp& op) {
  CUstreamBatchMemOpParams params{};
  switch (op.kind) {
    case ValueOp::Kind::kWait32:
    case ValueOp::Kind::kWait64:
      params.waitValue.operation =
          op.kind == ValueOp::Kind::kWait32 ? CU_STREAM_MEM_OP_WAIT_VALUE_32 : CU_STREAM_MEM_OP_WAIT_VALUE_64;
      params.waitValue.address = op.address;
      params.waitValue.value64 = op.value;
      params.waitValue.flags = op.flags;
      break;
    case ValueOp::Kind::kWrite32:
    case ValueOp::Kind::kWrite64:
      params.writeValue.operation =
          op.kind == ValueOp::Kind::kWrite32 ? CU_STREAM_MEM_OP_WRITE_VALUE_32 : CU_STREAM_MEM_OP_WRITE_VALUE_64;
      params.writeValue.address = op.address;
      params.writeValue.value64 = op.value;
      params.writeValue.flags = op.flags;
      break;
    case ValueOp::Kind::kBarrier:
      params.memoryBarrier.operation = CU_STREAM_MEM_OP_BARRIER;
      break;
  }
  return params;
}

}  // namespace graphshard::hostcuda
