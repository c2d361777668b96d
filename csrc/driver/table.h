// The driver's entry points, loaded by path, each with the version that fixes its ABI.
#pragma once

#include <cudaTypedefs.h>

#include <string>

#include "driver/error.h"

namespace graphshard {

// Note [explicit versions]: cuGetProcAddress picks the ABI by the version it is asked for, so the version stands beside
// the name and both typedef and call are made from it; `cuda.h`'s own #defines (another ABI in 13.x) play no part.
#define GRAPHSHARD_ENTRY_POINTS(X)            \
  X(cuInit, 2000)                             \
  X(cuDriverGetVersion, 2020)                 \
  X(cuDeviceGetCount, 2000)                   \
  X(cuDeviceGet, 2000)                        \
  X(cuDeviceGetName, 2000)                    \
  X(cuDeviceTotalMem, 3020)                   \
  X(cuDeviceGetUuid, 11040)                   \
  X(cuDeviceGetAttribute, 2000)               \
  X(cuDevicePrimaryCtxRetain, 7000)           \
  X(cuDevicePrimaryCtxRelease, 11000)         \
  X(cuCtxSetCurrent, 4000)                    \
  X(cuMemGetInfo, 3020)                       \
  X(cuMemHostAlloc, 2020)                     \
  X(cuMemHostGetDevicePointer, 3020)          \
  X(cuMemFreeHost, 2000)                      \
  X(cuMemGetAllocationGranularity, 10020)     \
  X(cuMemCreate, 10020)                       \
  X(cuMemRelease, 10020)                      \
  X(cuMemAddressReserve, 10020)               \
  X(cuMemAddressFree, 10020)                  \
  X(cuMemMap, 10020)                          \
  X(cuMemUnmap, 10020)                        \
  X(cuMemSetAccess, 10020)                    \
  X(cuMemExportToShareableHandle, 10020)      \
  X(cuMemImportFromShareableHandle, 10020)    \
  X(cuStreamCreate, 2000)                     \
  X(cuStreamDestroy, 4000)                    \
  X(cuStreamQuery, 2000)                      \
  X(cuStreamWaitEvent, 3020)                  \
  X(cuEventCreate, 2000)                      \
  X(cuEventDestroy, 4000)                     \
  X(cuEventRecord, 2000)                      \
  X(cuEventRecordWithFlags, 11010)            \
  X(cuEventQuery, 2000)                       \
  X(cuEventElapsedTime, 2000)                 \
  X(cuMemcpyAsync, 4000)                      \
  X(cuMemcpy2DAsync, 3020)                    \
  X(cuMemsetD8Async, 3020)                    \
  X(cuStreamWriteValue32, 11070)              \
  X(cuStreamWaitValue32, 11070)               \
  X(cuStreamBatchMemOp, 11070)                \
  X(cuLaunchHostFunc, 10000)                  \
  X(cuStreamBeginCapture, 10010)              \
  X(cuStreamEndCapture, 10000)                \
  X(cuStreamIsCapturing, 10000)               \
  X(cuStreamGetCaptureInfo, 11030)            \
  X(cuThreadExchangeStreamCaptureMode, 10010) \
  X(cuGraphGetNodes, 10000)                   \
  X(cuGraphNodeGetType, 10000)                \
  X(cuGraphDestroy, 10000)                    \
  X(cuGraphInstantiateWithFlags, 11040)       \
  X(cuGraphExecDestroy, 10000)                \
  X(cuGraphLaunch, 10000)                     \
  X(cuGraphUpload, 11010)                     \
  X(cuGetErrorName, 6000)                     \
  X(cuGetErrorString, 6000)

// The function pointers of one library. Immutable after `load`; the library stays loaded for good, since its worker
// threads may still run when a process ends.
struct Table {
#define GRAPHSHARD_DECLARE(name, version) PFN_##name##_v##version name = nullptr;
  GRAPHSHARD_ENTRY_POINTS(GRAPHSHARD_DECLARE)
#undef GRAPHSHARD_DECLARE

  // What only graphshard's own host driver exports; null elsewhere.
  int (*gshost_version)() = nullptr;
  CUresult (*gshost_stream_wait)(CUstream stream, int64_t timeout_ns) = nullptr;
  CUresult (*gshost_event_wait)(CUevent event, int64_t timeout_ns) = nullptr;
  CUresult (*gshost_graph_exec_set_executor)(CUgraphExec exec, int executor, int64_t seed) = nullptr;

  // Loads the library at `path`; DriverError names every missing entry point at once.
  static Table load(const std::string& path);

  // Throws DriverError if `result` is not success; `detail` says where, and may be empty.
  void check(CUresult result, const char* entry_point, const std::string& detail = {}) const {
    if (result != CUDA_SUCCESS) fail(result, entry_point, detail);
  }
  [[noreturn]] void fail(CUresult result, const char* entry_point, const std::string& detail) const;
  std::string error_name(CUresult result) const;
};

// Calls an entry point and throws DriverError naming it if it fails.
#define GRAPHSHARD_CALL(table, name, ...) (table).check((table).name(__VA_ARGS__), #name)

}  // namespace graphshard
