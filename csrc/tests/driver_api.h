// A driver library under test, loaded by path: entry points by name and version through cuGetProcAddress_v2.
#pragma once

#include <cstdint>

#include <cuda.h>
#include <cudaTypedefs.h>

namespace graphshard::litmus {

// X(member, name, version): what the litmus tests call. The host driver and the vendor's both have all of them.
#define GS_LITMUS_ENTRIES(X)                                                      \
  X(init, cuInit, 2000)                                                           \
  X(driver_get_version, cuDriverGetVersion, 2020)                                 \
  X(get_error_name, cuGetErrorName, 6000)                                         \
  X(device_get, cuDeviceGet, 2000)                                                \
  X(device_get_count, cuDeviceGetCount, 2000)                                     \
  X(device_get_name, cuDeviceGetName, 2000)                                       \
  X(device_get_attribute, cuDeviceGetAttribute, 2000)                             \
  X(primary_ctx_retain, cuDevicePrimaryCtxRetain, 7000)                           \
  X(primary_ctx_get_state, cuDevicePrimaryCtxGetState, 7000)                      \
  X(ctx_set_current, cuCtxSetCurrent, 4000)                                       \
  X(ctx_get_current, cuCtxGetCurrent, 4000)                                       \
  X(ctx_synchronize, cuCtxSynchronize, 2000)                                      \
  X(stream_create, cuStreamCreate, 2000)                                          \
  X(stream_destroy, cuStreamDestroy, 4000)                                        \
  X(stream_query, cuStreamQuery, 2000)                                            \
  X(stream_synchronize, cuStreamSynchronize, 2000)                                \
  X(stream_wait_event, cuStreamWaitEvent, 3020)                                   \
  X(launch_host_func, cuLaunchHostFunc, 10000)                                    \
  X(stream_write_value_32, cuStreamWriteValue32, 11070)                           \
  X(stream_wait_value_32, cuStreamWaitValue32, 11070)                             \
  X(stream_write_value_64, cuStreamWriteValue64, 11070)                           \
  X(stream_wait_value_64, cuStreamWaitValue64, 11070)                             \
  X(stream_batch_mem_op, cuStreamBatchMemOp, 11070)                               \
  X(event_create, cuEventCreate, 2000)                                            \
  X(event_destroy, cuEventDestroy, 4000)                                          \
  X(event_record, cuEventRecord, 2000)                                            \
  X(event_record_with_flags, cuEventRecordWithFlags, 11010)                       \
  X(event_query, cuEventQuery, 2000)                                              \
  X(event_synchronize, cuEventSynchronize, 2000)                                  \
  X(event_elapsed_time, cuEventElapsedTime, 2000)                                 \
  X(mem_get_info, cuMemGetInfo, 3020)                                             \
  X(mem_alloc, cuMemAlloc, 3020)                                                  \
  X(mem_free, cuMemFree, 3020)                                                    \
  X(mem_host_alloc, cuMemHostAlloc, 2020)                                         \
  X(mem_free_host, cuMemFreeHost, 2000)                                           \
  X(mem_get_address_range, cuMemGetAddressRange, 3020)                            \
  X(mem_get_allocation_granularity, cuMemGetAllocationGranularity, 10020)         \
  X(mem_create, cuMemCreate, 10020)                                               \
  X(mem_release, cuMemRelease, 10020)                                             \
  X(mem_address_reserve, cuMemAddressReserve, 10020)                              \
  X(mem_address_free, cuMemAddressFree, 10020)                                    \
  X(mem_map, cuMemMap, 10020)                                                     \
  X(mem_unmap, cuMemUnmap, 10020)                                                 \
  X(mem_set_access, cuMemSetAccess, 10020)                                        \
  X(mem_get_access, cuMemGetAccess, 10020)                                        \
  X(mem_export, cuMemExportToShareableHandle, 10020)                              \
  X(mem_import, cuMemImportFromShareableHandle, 10020)                            \
  X(mem_retain_allocation_handle, cuMemRetainAllocationHandle, 11000)             \
  X(memcpy_sync, cuMemcpy, 4000)                                                  \
  X(memcpy_async, cuMemcpyAsync, 4000)                                            \
  X(memcpy_2d_async, cuMemcpy2DAsync, 3020)                                       \
  X(memset_8_async, cuMemsetD8Async, 3020)                                        \
  X(memset_32_async, cuMemsetD32Async, 3020)                                      \
  X(stream_begin_capture, cuStreamBeginCapture, 10010)                            \
  X(stream_end_capture, cuStreamEndCapture, 10000)                                \
  X(stream_is_capturing, cuStreamIsCapturing, 10000)                              \
  X(stream_get_capture_info_v1, cuStreamGetCaptureInfo, 10010)                    \
  X(stream_get_capture_info_v2, cuStreamGetCaptureInfo, 11030)                    \
  X(stream_update_capture_dependencies, cuStreamUpdateCaptureDependencies, 11030) \
  X(thread_exchange_capture_mode, cuThreadExchangeStreamCaptureMode, 10010)       \
  X(graph_create, cuGraphCreate, 10000)                                           \
  X(graph_destroy, cuGraphDestroy, 10000)                                         \
  X(graph_get_nodes, cuGraphGetNodes, 10000)                                      \
  X(graph_get_root_nodes, cuGraphGetRootNodes, 10000)                             \
  X(graph_get_edges, cuGraphGetEdges, 10000)                                      \
  X(graph_node_get_type, cuGraphNodeGetType, 10000)                               \
  X(graph_node_get_dependencies, cuGraphNodeGetDependencies, 10000)               \
  X(graph_add_dependencies, cuGraphAddDependencies, 10000)                        \
  X(graph_destroy_node, cuGraphDestroyNode, 10000)                                \
  X(graph_add_empty_node, cuGraphAddEmptyNode, 10000)                             \
  X(graph_add_memcpy_node, cuGraphAddMemcpyNode, 10000)                           \
  X(graph_add_memset_node, cuGraphAddMemsetNode, 10000)                           \
  X(graph_add_host_node, cuGraphAddHostNode, 10000)                               \
  X(graph_add_event_record_node, cuGraphAddEventRecordNode, 11010)                \
  X(graph_add_event_wait_node, cuGraphAddEventWaitNode, 11010)                    \
  X(graph_add_batch_mem_op_node, cuGraphAddBatchMemOpNode, 11070)                 \
  X(graph_memcpy_node_get_params, cuGraphMemcpyNodeGetParams, 10000)              \
  X(graph_memset_node_get_params, cuGraphMemsetNodeGetParams, 10000)              \
  X(graph_host_node_get_params, cuGraphHostNodeGetParams, 10000)                  \
  X(graph_batch_mem_op_node_get_params, cuGraphBatchMemOpNodeGetParams, 11070)    \
  X(graph_instantiate, cuGraphInstantiateWithFlags, 11040)                        \
  X(graph_instantiate_with_params, cuGraphInstantiateWithParams, 12000)           \
  X(graph_exec_destroy, cuGraphExecDestroy, 10000)                                \
  X(graph_launch, cuGraphLaunch, 10000)                                           \
  X(graph_upload, cuGraphUpload, 11010)

struct DriverApi {
#define GS_LITMUS_MEMBER(member, name, version) PFN_##name##_v##version member = nullptr;
  GS_LITMUS_ENTRIES(GS_LITMUS_MEMBER)
#undef GS_LITMUS_MEMBER

  // Newer than some drivers; null where they are missing.
  PFN_cuMemcpyBatchAsync_v12080 memcpy_batch_async = nullptr;
  PFN_cuStreamGetCaptureInfo_v12030 stream_get_capture_info_v3 = nullptr;
  PFN_cuGraphGetEdges_v12030 graph_get_edges_v2 = nullptr;

  // The host driver's extras; null on another driver.
  int (*host_version)() = nullptr;
  CUresult (*host_stream_wait)(CUstream, int64_t) = nullptr;
  CUresult (*host_event_wait)(CUevent, int64_t) = nullptr;
  CUresult (*host_set_executor)(CUgraphExec, int, int64_t) = nullptr;
  CUresult (*host_launch_kernel)(CUstream, CUhostFn, void*) = nullptr;

  PFN_cuGetProcAddress_v12000 get_proc_address = nullptr;
  CUcontext context = nullptr;

  bool is_host() const { return host_version != nullptr; }
};

/// Filled by `load_driver`, before any test runs.
extern DriverApi cu;

/// Load and resolve; what is wrong with the library, or null. Calls nothing in it yet.
const char* load_driver(const char* path);
/// cuInit, device 0, its primary context made current; why this machine cannot, or null.
const char* open_device();

}  // namespace graphshard::litmus
