#include "device.h"

namespace graphshard::hostcuda {

namespace {

struct Error {
  CUresult code;
  const char* name;
  const char* text;
};

#define GS_ERROR(code, text) \
  Error { code, #code, text }

constexpr Error kErrors[] = {
    GS_ERROR(CUDA_SUCCESS, "no error"),
    GS_ERROR(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
    GS_ERROR(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
    GS_ERROR(CUDA_ERROR_NOT_INITIALIZED, "initialization error: cuInit was not called, or this is a forked child"),
    GS_ERROR(CUDA_ERROR_DEINITIALIZED, "deinitialized"),
    GS_ERROR(CUDA_ERROR_PROFILER_DISABLED, "profiler disabled"),
    GS_ERROR(CUDA_ERROR_PROFILER_NOT_INITIALIZED, "profiler not initialized"),
    GS_ERROR(CUDA_ERROR_PROFILER_ALREADY_STARTED, "profiler already started"),
    GS_ERROR(CUDA_ERROR_PROFILER_ALREADY_STOPPED, "profiler already stopped"),
    GS_ERROR(CUDA_ERROR_STUB_LIBRARY, "stub library"),
    GS_ERROR(CUDA_ERROR_DEVICE_UNAVAILABLE, "device unavailable"),
    GS_ERROR(CUDA_ERROR_NO_DEVICE, "no device"),
    GS_ERROR(CUDA_ERROR_INVALID_DEVICE, "invalid device"),
    GS_ERROR(CUDA_ERROR_DEVICE_NOT_LICENSED, "device not licensed"),
    GS_ERROR(CUDA_ERROR_INVALID_IMAGE, "invalid image"),
    GS_ERROR(CUDA_ERROR_INVALID_CONTEXT, "invalid device context: none is current on this thread"),
    GS_ERROR(CUDA_ERROR_CONTEXT_ALREADY_CURRENT, "context already current"),
    GS_ERROR(CUDA_ERROR_MAP_FAILED, "map failed"),
    GS_ERROR(CUDA_ERROR_UNMAP_FAILED, "unmap failed"),
    GS_ERROR(CUDA_ERROR_ARRAY_IS_MAPPED, "array is mapped"),
    GS_ERROR(CUDA_ERROR_ALREADY_MAPPED, "already mapped"),
    GS_ERROR(CUDA_ERROR_NO_BINARY_FOR_GPU, "no binary for gpu"),
    GS_ERROR(CUDA_ERROR_ALREADY_ACQUIRED, "already acquired"),
    GS_ERROR(CUDA_ERROR_NOT_MAPPED, "not mapped"),
    GS_ERROR(CUDA_ERROR_NOT_MAPPED_AS_ARRAY, "not mapped as array"),
    GS_ERROR(CUDA_ERROR_NOT_MAPPED_AS_POINTER, "not mapped as pointer"),
    GS_ERROR(CUDA_ERROR_ECC_UNCORRECTABLE, "ecc uncorrectable"),
    GS_ERROR(CUDA_ERROR_UNSUPPORTED_LIMIT, "unsupported limit"),
    GS_ERROR(CUDA_ERROR_CONTEXT_ALREADY_IN_USE, "context already in use"),
    GS_ERROR(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, "peer access unsupported"),
    GS_ERROR(CUDA_ERROR_INVALID_PTX, "invalid ptx"),
    GS_ERROR(CUDA_ERROR_INVALID_GRAPHICS_CONTEXT, "invalid graphics context"),
    GS_ERROR(CUDA_ERROR_NVLINK_UNCORRECTABLE, "nvlink uncorrectable"),
    GS_ERROR(CUDA_ERROR_JIT_COMPILER_NOT_FOUND, "jit compiler not found"),
    GS_ERROR(CUDA_ERROR_UNSUPPORTED_PTX_VERSION, "unsupported ptx version"),
    GS_ERROR(CUDA_ERROR_JIT_COMPILATION_DISABLED, "jit compilation disabled"),
    GS_ERROR(CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY, "unsupported exec affinity"),
    GS_ERROR(CUDA_ERROR_UNSUPPORTED_DEVSIDE_SYNC, "unsupported devside sync"),
    GS_ERROR(CUDA_ERROR_CONTAINED, "contained"),
    GS_ERROR(CUDA_ERROR_INVALID_SOURCE, "invalid source"),
    GS_ERROR(CUDA_ERROR_FILE_NOT_FOUND, "file not found"),
    GS_ERROR(CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND, "shared object symbol not found"),
    GS_ERROR(CUDA_ERROR_SHARED_OBJECT_INIT_FAILED, "shared object init failed"),
    GS_ERROR(CUDA_ERROR_OPERATING_SYSTEM, "operating system"),
    GS_ERROR(CUDA_ERROR_INVALID_HANDLE, "invalid handle"),
    GS_ERROR(CUDA_ERROR_ILLEGAL_STATE, "the operation cannot be performed in the present state"),
    GS_ERROR(CUDA_ERROR_LOSSY_QUERY, "lossy query"),
    GS_ERROR(CUDA_ERROR_NOT_FOUND, "not found"),
    GS_ERROR(CUDA_ERROR_NOT_READY, "device not ready"),
    GS_ERROR(CUDA_ERROR_ILLEGAL_ADDRESS, "illegal address"),
    GS_ERROR(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "launch out of resources"),
    GS_ERROR(CUDA_ERROR_LAUNCH_TIMEOUT, "launch timeout"),
    GS_ERROR(CUDA_ERROR_LAUNCH_INCOMPATIBLE_TEXTURING, "launch incompatible texturing"),
    GS_ERROR(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, "peer access already enabled"),
    GS_ERROR(CUDA_ERROR_PEER_ACCESS_NOT_ENABLED, "peer access not enabled"),
    GS_ERROR(CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE, "primary context active"),
    GS_ERROR(CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed"),
    GS_ERROR(CUDA_ERROR_ASSERT, "assert"),
    GS_ERROR(CUDA_ERROR_TOO_MANY_PEERS, "too many peers"),
    GS_ERROR(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "host memory already registered"),
    GS_ERROR(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "host memory not registered"),
    GS_ERROR(CUDA_ERROR_HARDWARE_STACK_ERROR, "hardware stack error"),
    GS_ERROR(CUDA_ERROR_ILLEGAL_INSTRUCTION, "illegal instruction"),
    GS_ERROR(CUDA_ERROR_MISALIGNED_ADDRESS, "misaligned address"),
    GS_ERROR(CUDA_ERROR_INVALID_ADDRESS_SPACE, "invalid address space"),
    GS_ERROR(CUDA_ERROR_INVALID_PC, "invalid pc"),
    GS_ERROR(CUDA_ERROR_LAUNCH_FAILED, "launch failed"),
    GS_ERROR(CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE, "cooperative launch too large"),
    GS_ERROR(CUDA_ERROR_TENSOR_MEMORY_LEAK, "tensor memory leak"),
    GS_ERROR(CUDA_ERROR_NOT_PERMITTED, "operation not permitted: host functions may not call the driver"),
    GS_ERROR(CUDA_ERROR_NOT_SUPPORTED, "operation not supported"),
    GS_ERROR(CUDA_ERROR_SYSTEM_NOT_READY, "system not ready"),
    GS_ERROR(CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, "system driver mismatch"),
    GS_ERROR(CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE, "compat not supported on device"),
    GS_ERROR(CUDA_ERROR_MPS_CONNECTION_FAILED, "mps connection failed"),
    GS_ERROR(CUDA_ERROR_MPS_RPC_FAILURE, "mps rpc failure"),
    GS_ERROR(CUDA_ERROR_MPS_SERVER_NOT_READY, "mps server not ready"),
    GS_ERROR(CUDA_ERROR_MPS_MAX_CLIENTS_REACHED, "mps max clients reached"),
    GS_ERROR(CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED, "mps max connections reached"),
    GS_ERROR(CUDA_ERROR_MPS_CLIENT_TERMINATED, "mps client terminated"),
    GS_ERROR(CUDA_ERROR_CDP_NOT_SUPPORTED, "cdp not supported"),
    GS_ERROR(CUDA_ERROR_CDP_VERSION_MISMATCH, "cdp version mismatch"),
    GS_ERROR(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"),
    GS_ERROR(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "operation failed due to a previous error during capture"),
    GS_ERROR(CUDA_ERROR_STREAM_CAPTURE_MERGE, "operation would result in a merge of separate capture sequences"),
    GS_ERROR(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "capture was not ended in the same stream as it began"),
    GS_ERROR(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "capturing stream has unjoined work"),
    GS_ERROR(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "dependency created on uncaptured work in another stream"),
    GS_ERROR(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
             "operation would make the legacy stream depend on a capturing blocking stream"),
    GS_ERROR(CUDA_ERROR_CAPTURED_EVENT, "operation not permitted on an event last recorded in a capturing stream"),
    GS_ERROR(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,
             "attempt to terminate a thread-local capture sequence from another thread"),
    GS_ERROR(CUDA_ERROR_TIMEOUT, "timeout"),
    GS_ERROR(CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE, "graph exec update failure"),
    GS_ERROR(CUDA_ERROR_EXTERNAL_DEVICE, "external device"),
    GS_ERROR(CUDA_ERROR_INVALID_CLUSTER_SIZE, "invalid cluster size"),
    GS_ERROR(CUDA_ERROR_FUNCTION_NOT_LOADED, "function not loaded"),
    GS_ERROR(CUDA_ERROR_INVALID_RESOURCE_TYPE, "invalid resource type"),
    GS_ERROR(CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION, "invalid resource configuration"),
    GS_ERROR(CUDA_ERROR_KEY_ROTATION, "key rotation"),
    GS_ERROR(CUDA_ERROR_UNKNOWN, "unknown"),
};

#undef GS_ERROR

const Error* find_error(CUresult code) {
  for (const Error& error : kErrors) {
    if (error.code == code) return &error;
  }
  return nullptr;
}

}  // namespace

CUresult get_error_name(CUresult error, const char** name) {
  if (name == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const Error* known = find_error(error);
  *name = known == nullptr ? nullptr : known->name;
  return known == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult get_error_string(CUresult error, const char** text) {
  if (text == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const Error* known = find_error(error);
  *text = known == nullptr ? nullptr : known->text;
  return known == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

}  // namespace graphshard::hostcuda
