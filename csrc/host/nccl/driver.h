// The host driver beneath: the library beside this one, by the entry points that the collectives use.
#pragma once

#include <cudaTypedefs.h>

#include "failure.h"

namespace graphshard::hostnccl {

// The version fixes the ABI, as in csrc/driver/table.h.
#define HOSTNCCL_ENTRY_POINTS(X)              \
  X(cuInit, 2000)                             \
  X(cuGetErrorName, 6000)                     \
  X(cuDevicePrimaryCtxRetain, 7000)           \
  X(cuCtxGetCurrent, 4000)                    \
  X(cuCtxSetCurrent, 4000)                    \
  X(cuMemGetAddressRange, 3020)               \
  X(cuMemCreate, 10020)                       \
  X(cuMemRelease, 10020)                      \
  X(cuMemAddressReserve, 10020)               \
  X(cuMemAddressFree, 10020)                  \
  X(cuMemMap, 10020)                          \
  X(cuMemUnmap, 10020)                        \
  X(cuMemSetAccess, 10020)                    \
  X(cuMemRetainAllocationHandle, 11000)       \
  X(cuMemExportToShareableHandle, 10020)      \
  X(cuMemImportFromShareableHandle, 10020)    \
  X(cuStreamGetCaptureInfo, 11030)            \
  X(cuStreamBatchMemOp, 11070)                \
  X(cuStreamWaitEvent, 3020)                  \
  X(cuEventCreate, 2000)                      \
  X(cuEventDestroy, 4000)                     \
  X(cuEventRecord, 2000)                      \
  X(cuEventQuery, 2000)                       \
  X(cuThreadExchangeStreamCaptureMode, 10010) \
  X(cuMemcpyAsync, 4000)                      \
  X(cuLaunchHostFunc, 10000)

struct DriverTable {
#define HOSTNCCL_DECLARE(name, version) PFN_##name##_v##version name = nullptr;
  HOSTNCCL_ENTRY_POINTS(HOSTNCCL_DECLARE)
#undef HOSTNCCL_DECLARE
  CUresult (*gshost_launch_kernel)(CUstream stream, CUhostFn function, void* argument) = nullptr;
  CUcontext context = nullptr;
};

/// Loaded at the first call, for good; kSystemError where it is missing.
const DriverTable& driver();
/// Has a context current on this thread, as a caller of CUDA's NCCL has.
void enter_driver();
/// kUnhandledCudaError, naming the driver's call and its error.
void check(CUresult result, const char* entry_point);

#define HOSTNCCL_CALL(name, ...) \
  ::graphshard::hostnccl::check(::graphshard::hostnccl::driver().name(__VA_ARGS__), #name)

}  // namespace graphshard::hostnccl
