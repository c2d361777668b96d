#include "runtime/op.h"

#include <algorithm>

namespace graphshard {

namespace {

CUresult copy(const Table& table, const Op& op, CUstream stream) {
  for (size_t offset = 0; offset < op.num_bytes; offset += op.piece_bytes) {
    const size_t num_bytes = std::min(op.piece_bytes, op.num_bytes - offset);
    const CUresult result = table.cuMemcpyAsync(op.destination + offset, op.source + offset, num_bytes, stream);
    if (result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

CUresult copy_2d(const Table& table, const Op& op, CUstream stream) {
  CUDA_MEMCPY2D copy{};
  copy.srcMemoryType = CU_MEMORYTYPE_UNIFIED;
  copy.srcDevice = op.source;
  copy.srcPitch = op.source_pitch;
  copy.dstMemoryType = CU_MEMORYTYPE_UNIFIED;
  copy.dstDevice = op.destination;
  copy.dstPitch = op.destination_pitch;
  copy.WidthInBytes = op.num_bytes;
  copy.Height = op.rows;
  return table.cuMemcpy2DAsync(&copy, stream);
}

// The driver takes the batch as its own to change.
CUresult values(const Table& table, const Op& op, CUstream stream) {
  std::vector<CUstreamBatchMemOpParams> batch = *op.values;
  return table.cuStreamBatchMemOp(stream, static_cast<unsigned int>(batch.size()), batch.data(), 0);
}

}  // namespace

const char* entry_point(OpKind kind) {
  switch (kind) {
    case OpKind::kRecord:
      return "cuEventRecord";
    case OpKind::kWait:
      return "cuStreamWaitEvent";
    case OpKind::kCopy:
      return "cuMemcpyAsync";
    case OpKind::kCopy2d:
      return "cuMemcpy2DAsync";
    case OpKind::kCall:
      return "cuLaunchHostFunc";
    case OpKind::kFill:
      return "cuMemsetD8Async";
    case OpKind::kWriteValue:
      return "cuStreamWriteValue32";
    case OpKind::kWaitValue:
      return "cuStreamWaitValue32";
    case OpKind::kValues:
      return "cuStreamBatchMemOp";
    case OpKind::kAllGather:
      return "all_gather";
    case OpKind::kReduceScatter:
      return "reduce_scatter";
  }
  return "unknown op";
}

size_t copy_piece_bytes(size_t num_bytes) {
  constexpr size_t kMiB = size_t{1} << 20;
  const bool is_bad = num_bytes == 512 * kMiB || num_bytes == 1024 * kMiB || num_bytes == 2048 * kMiB;
  return is_bad ? 256 * kMiB : num_bytes;
}

size_t elements_bytes(size_t num_elements, ElementType type, int num_ranks) {
  size_t bytes = 0;
  if (__builtin_mul_overflow(num_elements, element_bytes(type), &bytes) ||
      __builtin_mul_overflow(bytes, static_cast<size_t>(num_ranks), &bytes)) {
    return SIZE_MAX;
  }
  return bytes;
}

size_t pitched_bytes(size_t rows, size_t pitch, size_t row_bytes) {
  if (rows == 0 || row_bytes == 0) return 0;
  size_t bytes = 0;
  if (__builtin_mul_overflow(rows - 1, pitch, &bytes) || __builtin_add_overflow(bytes, row_bytes, &bytes)) {
    return SIZE_MAX;
  }
  return bytes;
}

CUresult enqueue(const Table& table, const Op& op, CUstream stream, const OpTargets& targets) {
  switch (op.kind) {
    case OpKind::kRecord:
      return table.cuEventRecord(targets.events[op.index], stream);
    case OpKind::kWait:
      return table.cuStreamWaitEvent(stream, targets.events[op.index], CU_EVENT_WAIT_DEFAULT);
    case OpKind::kCopy:
      return copy(table, op, stream);
    case OpKind::kCopy2d:
      return copy_2d(table, op, stream);
    case OpKind::kCall:
      return table.cuLaunchHostFunc(stream, &Calls::run, const_cast<Calls::Entry*>(&targets.calls[op.index]));
    case OpKind::kFill:
      return table.cuMemsetD8Async(op.destination, static_cast<unsigned char>(op.value), op.num_bytes, stream);
    case OpKind::kWriteValue:
      return table.cuStreamWriteValue32(stream, op.destination, op.value, CU_STREAM_WRITE_VALUE_DEFAULT);
    case OpKind::kWaitValue:
      return table.cuStreamWaitValue32(stream, op.source, op.value, CU_STREAM_WAIT_VALUE_GEQ);
    case OpKind::kValues:
      return values(table, op, stream);
    case OpKind::kAllGather:
      targets.collectives[op.index]->all_gather(op.destination, op.source, op.num_bytes, stream);
      return CUDA_SUCCESS;
    case OpKind::kReduceScatter:
      targets.collectives[op.index]->reduce_scatter(op.destination, op.source, op.num_elements,
                                                    static_cast<ElementType>(op.value), stream);
      return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}

}  // namespace graphshard
