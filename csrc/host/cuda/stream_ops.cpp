// Stream operations other than transfers: host functions, value writes and waits.
#include "capture.h"
#include "guard.h"
#include "stream.h"

namespace graphshard::hostcuda {

namespace {

CUresult submit_value_op(CUstream stream, const ValueOp& op) {
  GS_RETURN_IF_ERROR(enter_context());
  GS_RETURN_IF_ERROR(check_stream(stream));
  GS_RETURN_IF_ERROR(check_value_op(op));
  return submit(stream, ValueWork{op});
}

}  // namespace

CUresult launch_host_func(CUstream stream, CUhostFn function, void* argument) {
  GS_RETURN_IF_ERROR(enter_context());
  GS_RETURN_IF_ERROR(check_stream(stream));
  if (function == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return submit(stream, HostWork{function, argument});
}

CUresult launch_kernel(CUstream stream, CUhostFn function, void* argument) {
  GS_RETURN_IF_ERROR(enter_context());
  GS_RETURN_IF_ERROR(check_stream(stream));
  if (function == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return submit(stream, KernelWork{function, argument});
}

CUresult stream_write_value_32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned int flags) {
  return submit_value_op(stream, {ValueOp::Kind::kWrite32, flags, address, value});
}

CUresult stream_write_value_64(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned int flags) {
  return submit_value_op(stream, {ValueOp::Kind::kWrite64, flags, address, value});
}

CUresult stream_wait_value_32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned int flags) {
  return submit_value_op(stream, {ValueOp::Kind::kWait32, flags, address, value});
}

CUresult stream_wait_value_64(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned int flags) {
  return submit_value_op(stream, {ValueOp::Kind::kWait64, flags, address, value});
}

CUresult stream_batch_mem_op(CUstream stream, unsigned int count, CUstreamBatchMemOpParams* params,
                             unsigned int flags) {
  GS_RETURN_IF_ERROR(enter_context());
  GS_RETURN_IF_ERROR(check_stream(stream));
  if (count == 0 || count > 256 || params == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  auto ops = std::make_shared<std::vector<ValueOp>>(count);
  for (unsigned int i = 0; i < count; ++i) GS_RETURN_IF_ERROR(parse_value_op(params[i], &(*ops)[i]));
  return submit(stream, BatchWork{std::move(ops)});
}

}  // namespace graphshard::hostcuda
