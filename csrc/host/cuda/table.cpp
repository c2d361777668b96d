// The only exported symbols: cuGetProcAddress over a table of (name, version), and the gshost_ extras.
//
// A name may be there in several versions with other ABIs; the highest version not above the one asked for is given,
// as the vendor's driver does. The PFN types come from cudaTypedefs.h, so a wrong signature does not compile.
#include <cstring>

#include <cuda.h>
#include <cudaTypedefs.h>

#include "capture.h"
#include "device.h"
#include "event.h"
#include "graph.h"
#include "graph_exec.h"
#include "graph_nodes.h"
#include "gshost.h"
#include "guard.h"
#include "memory.h"
#include "stream.h"
#include "transfer.h"

#define GS_EXPORT extern "C" __attribute__((visibility("default")))

namespace graphshard::hostcuda {

CUresult get_proc_address(const char* name, void** function, int version, cuuint64_t flags,
                          CUdriverProcAddressQueryResult* status);

namespace {

// ABIs that a 12.9 header does not declare, or only for older callers.
using PFN_cuGraphInstantiate_v11000 = CUresult (*)(CUgraphExec*, CUgraph, CUgraphNode*, char*, size_t);
using PFN_cuMemcpyBatchAsync_v13000 = CUresult (*)(CUdeviceptr*, CUdeviceptr*, size_t*, size_t, CUmemcpyAttributes*,
                                                   size_t*, size_t, CUstream);

struct Entry {
  const char* name;
  int version;
  void* function;
};

template <typename Function>
Entry make_entry(const char* name, int version, Function function) {
  return {name, version, reinterpret_cast<void*>(function)};
}

// The PFN's version is part of its name; a converting local makes the compiler compare the signatures.
#define GS_ENTRY(name, version, function) make_entry<PFN_##name##_v##version>(#name, version, function)

const Entry kEntries[] = {
    GS_ENTRY(cuInit, 2000, init),
    GS_ENTRY(cuDriverGetVersion, 2020, driver_get_version),
    GS_ENTRY(cuGetErrorName, 6000, get_error_name),
    GS_ENTRY(cuGetErrorString, 6000, get_error_string),
    GS_ENTRY(cuDeviceGet, 2000, device_get),
    GS_ENTRY(cuDeviceGetCount, 2000, device_get_count),
    GS_ENTRY(cuDeviceGetName, 2000, device_get_name),
    GS_ENTRY(cuDeviceGetUuid, 9020, device_get_uuid),
    GS_ENTRY(cuDeviceGetUuid, 11040, device_get_uuid),
    GS_ENTRY(cuDeviceTotalMem, 3020, device_total_mem),
    GS_ENTRY(cuDeviceGetAttribute, 2000, device_get_attribute),
    GS_ENTRY(cuDeviceCanAccessPeer, 4000, device_can_access_peer),
    GS_ENTRY(cuDevicePrimaryCtxRetain, 7000, primary_context_retain),
    GS_ENTRY(cuDevicePrimaryCtxRelease, 11000, primary_context_release),
    GS_ENTRY(cuDevicePrimaryCtxGetState, 7000, primary_context_get_state),
    GS_ENTRY(cuDevicePrimaryCtxSetFlags, 11000, primary_context_set_flags),
    GS_ENTRY(cuCtxGetCurrent, 4000, context_get_current),
    GS_ENTRY(cuCtxSetCurrent, 4000, context_set_current),
    GS_ENTRY(cuCtxPushCurrent, 4000, context_push_current),
    GS_ENTRY(cuCtxPopCurrent, 4000, context_pop_current),
    GS_ENTRY(cuCtxGetDevice, 2000, context_get_device),
    GS_ENTRY(cuCtxGetFlags, 7000, context_get_flags),
    GS_ENTRY(cuCtxGetApiVersion, 3020, context_get_api_version),
    GS_ENTRY(cuCtxGetId, 12000, context_get_id),
    GS_ENTRY(cuCtxGetStreamPriorityRange, 5050, context_get_stream_priority_range),
    GS_ENTRY(cuCtxSynchronize, 2000, context_synchronize),
    GS_ENTRY(cuStreamCreate, 2000, stream_create),
    GS_ENTRY(cuStreamCreateWithPriority, 5050, stream_create_with_priority),
    GS_ENTRY(cuStreamDestroy, 4000, stream_destroy),
    GS_ENTRY(cuStreamQuery, 2000, stream_query),
    GS_ENTRY(cuStreamSynchronize, 2000, stream_synchronize),
    GS_ENTRY(cuStreamGetFlags, 5050, stream_get_flags),
    GS_ENTRY(cuStreamGetPriority, 5050, stream_get_priority),
    GS_ENTRY(cuStreamGetCtx, 9020, stream_get_context_v1),
    GS_ENTRY(cuStreamGetCtx, 12050, stream_get_context_v2),
    GS_ENTRY(cuStreamWaitEvent, 3020, stream_wait_event),
    GS_ENTRY(cuLaunchHostFunc, 10000, launch_host_func),
    GS_ENTRY(cuStreamWriteValue32, 8000, stream_write_value_32),
    GS_ENTRY(cuStreamWriteValue32, 11070, stream_write_value_32),
    GS_ENTRY(cuStreamWriteValue64, 9000, stream_write_value_64),
    GS_ENTRY(cuStreamWriteValue64, 11070, stream_write_value_64),
    GS_ENTRY(cuStreamWaitValue32, 8000, stream_wait_value_32),
    GS_ENTRY(cuStreamWaitValue32, 11070, stream_wait_value_32),
    GS_ENTRY(cuStreamWaitValue64, 9000, stream_wait_value_64),
    GS_ENTRY(cuStreamWaitValue64, 11070, stream_wait_value_64),
    GS_ENTRY(cuStreamBatchMemOp, 8000, stream_batch_mem_op),
    GS_ENTRY(cuStreamBatchMemOp, 11070, stream_batch_mem_op),
    GS_ENTRY(cuEventCreate, 2000, event_create),
    GS_ENTRY(cuEventDestroy, 4000, event_destroy),
    GS_ENTRY(cuEventRecord, 2000, event_record),
    GS_ENTRY(cuEventRecordWithFlags, 11010, event_record_with_flags),
    GS_ENTRY(cuEventQuery, 2000, event_query),
    GS_ENTRY(cuEventSynchronize, 2000, event_synchronize),
    GS_ENTRY(cuEventElapsedTime, 2000, event_elapsed_time),
    GS_ENTRY(cuEventElapsedTime, 12080, event_elapsed_time),
    GS_ENTRY(cuMemGetInfo, 3020, mem_get_info),
    GS_ENTRY(cuMemAlloc, 3020, mem_alloc),
    GS_ENTRY(cuMemFree, 3020, mem_free),
    GS_ENTRY(cuMemAllocHost, 3020, mem_alloc_host),
    GS_ENTRY(cuMemFreeHost, 2000, mem_free_host),
    GS_ENTRY(cuMemHostAlloc, 2020, mem_host_alloc),
    GS_ENTRY(cuMemHostRegister, 6050, mem_host_register),
    GS_ENTRY(cuMemHostUnregister, 4000, mem_host_unregister),
    GS_ENTRY(cuMemHostGetDevicePointer, 3020, mem_host_get_device_pointer),
    GS_ENTRY(cuMemGetAddressRange, 3020, mem_get_address_range),
    GS_ENTRY(cuPointerGetAttribute, 4000, pointer_get_attribute),
    GS_ENTRY(cuMemGetAllocationGranularity, 10020, mem_get_allocation_granularity),
    GS_ENTRY(cuMemCreate, 10020, mem_create),
    GS_ENTRY(cuMemRelease, 10020, mem_release),
    GS_ENTRY(cuMemAddressReserve, 10020, mem_address_reserve),
    GS_ENTRY(cuMemAddressFree, 10020, mem_address_free),
    GS_ENTRY(cuMemMap, 10020, mem_map),
    GS_ENTRY(cuMemUnmap, 10020, mem_unmap),
    GS_ENTRY(cuMemSetAccess, 10020, mem_set_access),
    GS_ENTRY(cuMemGetAccess, 10020, mem_get_access),
    GS_ENTRY(cuMemExportToShareableHandle, 10020, mem_export_to_shareable_handle),
    GS_ENTRY(cuMemImportFromShareableHandle, 10020, mem_import_from_shareable_handle),
    GS_ENTRY(cuMemGetAllocationPropertiesFromHandle, 10020, mem_get_allocation_properties_from_handle),
    GS_ENTRY(cuMemRetainAllocationHandle, 11000, mem_retain_allocation_handle),
    GS_ENTRY(cuMemcpy, 4000, memcpy_sync),
    GS_ENTRY(cuMemcpyHtoD, 3020, memcpy_host_to_device),
    GS_ENTRY(cuMemcpyDtoH, 3020, memcpy_device_to_host),
    GS_ENTRY(cuMemcpyDtoD, 3020, memcpy_sync),
    GS_ENTRY(cuMemcpy2D, 3020, memcpy_2d),
    GS_ENTRY(cuMemcpy2DUnaligned, 3020, memcpy_2d),
    GS_ENTRY(cuMemcpy3D, 3020, memcpy_3d),
    GS_ENTRY(cuMemsetD8, 3020, memset_8),
    GS_ENTRY(cuMemsetD16, 3020, memset_16),
    GS_ENTRY(cuMemsetD32, 3020, memset_32),
    GS_ENTRY(cuMemcpyAsync, 4000, memcpy_async),
    GS_ENTRY(cuMemcpyHtoDAsync, 3020, memcpy_host_to_device_async),
    GS_ENTRY(cuMemcpyDtoHAsync, 3020, memcpy_device_to_host_async),
    GS_ENTRY(cuMemcpyDtoDAsync, 3020, memcpy_async),
    GS_ENTRY(cuMemcpy2DAsync, 3020, memcpy_2d_async),
    GS_ENTRY(cuMemcpy3DAsync, 3020, memcpy_3d_async),
    GS_ENTRY(cuMemcpyBatchAsync, 12080, memcpy_batch_async_v12080),
    GS_ENTRY(cuMemcpyBatchAsync, 13000, memcpy_batch_async_v13000),
    GS_ENTRY(cuMemsetD8Async, 3020, memset_8_async),
    GS_ENTRY(cuMemsetD16Async, 3020, memset_16_async),
    GS_ENTRY(cuMemsetD32Async, 3020, memset_32_async),
    GS_ENTRY(cuMemsetD2D8Async, 3020, memset_2d_8_async),
    GS_ENTRY(cuMemsetD2D16Async, 3020, memset_2d_16_async),
    GS_ENTRY(cuMemsetD2D32Async, 3020, memset_2d_32_async),
    GS_ENTRY(cuStreamBeginCapture, 10010, stream_begin_capture),
    GS_ENTRY(cuStreamEndCapture, 10000, stream_end_capture),
    GS_ENTRY(cuStreamIsCapturing, 10000, stream_is_capturing),
    GS_ENTRY(cuStreamGetCaptureInfo, 10010, stream_get_capture_info_v1),
    GS_ENTRY(cuStreamGetCaptureInfo, 11030, stream_get_capture_info_v2),
    GS_ENTRY(cuStreamGetCaptureInfo, 12030, stream_get_capture_info_v3),
    GS_ENTRY(cuStreamUpdateCaptureDependencies, 11030, stream_update_capture_dependencies_v1),
    GS_ENTRY(cuStreamUpdateCaptureDependencies, 12030, stream_update_capture_dependencies_v2),
    GS_ENTRY(cuThreadExchangeStreamCaptureMode, 10010, thread_exchange_stream_capture_mode),
    GS_ENTRY(cuGraphCreate, 10000, graph_create),
    GS_ENTRY(cuGraphDestroy, 10000, graph_destroy),
    GS_ENTRY(cuGraphDestroyNode, 10000, graph_destroy_node),
    GS_ENTRY(cuGraphGetNodes, 10000, graph_get_nodes),
    GS_ENTRY(cuGraphGetRootNodes, 10000, graph_get_root_nodes),
    GS_ENTRY(cuGraphGetEdges, 10000, graph_get_edges_v1),
    GS_ENTRY(cuGraphGetEdges, 12030, graph_get_edges_v2),
    GS_ENTRY(cuGraphNodeGetType, 10000, graph_node_get_type),
    GS_ENTRY(cuGraphNodeGetDependencies, 10000, graph_node_get_dependencies_v1),
    GS_ENTRY(cuGraphNodeGetDependencies, 12030, graph_node_get_dependencies_v2),
    GS_ENTRY(cuGraphNodeGetDependentNodes, 10000, graph_node_get_dependents_v1),
    GS_ENTRY(cuGraphNodeGetDependentNodes, 12030, graph_node_get_dependents_v2),
    GS_ENTRY(cuGraphAddDependencies, 10000, graph_add_dependencies_v1),
    GS_ENTRY(cuGraphAddDependencies, 12030, graph_add_dependencies_v2),
    GS_ENTRY(cuGraphRemoveDependencies, 10000, graph_remove_dependencies_v1),
    GS_ENTRY(cuGraphRemoveDependencies, 12030, graph_remove_dependencies_v2),
    GS_ENTRY(cuGraphAddNode, 12020, graph_add_node_v1),
    GS_ENTRY(cuGraphAddNode, 12030, graph_add_node_v2),
    GS_ENTRY(cuGraphAddEmptyNode, 10000, graph_add_empty_node),
    GS_ENTRY(cuGraphAddMemcpyNode, 10000, graph_add_memcpy_node),
    GS_ENTRY(cuGraphAddMemsetNode, 10000, graph_add_memset_node),
    GS_ENTRY(cuGraphAddHostNode, 10000, graph_add_host_node),
    GS_ENTRY(cuGraphAddEventRecordNode, 11010, graph_add_event_record_node),
    GS_ENTRY(cuGraphAddEventWaitNode, 11010, graph_add_event_wait_node),
    GS_ENTRY(cuGraphAddBatchMemOpNode, 11070, graph_add_batch_mem_op_node),
    GS_ENTRY(cuGraphMemcpyNodeGetParams, 10000, graph_memcpy_node_get_params),
    GS_ENTRY(cuGraphMemsetNodeGetParams, 10000, graph_memset_node_get_params),
    GS_ENTRY(cuGraphHostNodeGetParams, 10000, graph_host_node_get_params),
    GS_ENTRY(cuGraphEventRecordNodeGetEvent, 11010, graph_event_record_node_get_event),
    GS_ENTRY(cuGraphEventWaitNodeGetEvent, 11010, graph_event_wait_node_get_event),
    GS_ENTRY(cuGraphBatchMemOpNodeGetParams, 11070, graph_batch_mem_op_node_get_params),
    make_entry<PFN_cuGraphInstantiate_v11000>("cuGraphInstantiate", 11000, graph_instantiate_v1),
    make_entry<PFN_cuGraphInstantiateWithFlags_v11040>("cuGraphInstantiate", 12000, graph_instantiate_with_flags),
    GS_ENTRY(cuGraphInstantiateWithFlags, 11040, graph_instantiate_with_flags),
    GS_ENTRY(cuGraphInstantiateWithParams, 12000, graph_instantiate_with_params),
    GS_ENTRY(cuGraphExecDestroy, 10000, graph_exec_destroy),
    GS_ENTRY(cuGraphExecGetFlags, 12000, graph_exec_get_flags),
    GS_ENTRY(cuGraphLaunch, 10000, graph_launch),
    GS_ENTRY(cuGraphUpload, 11010, graph_upload),
    make_entry<PFN_cuGetProcAddress_v12000>("cuGetProcAddress", 12000, get_proc_address),
};

#undef GS_ENTRY

}  // namespace

CUresult get_proc_address(const char* name, void** function, int version, cuuint64_t flags,
                          CUdriverProcAddressQueryResult* status) {
  constexpr cuuint64_t kKnown = CU_GET_PROC_ADDRESS_LEGACY_STREAM | CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
  if (name == nullptr || function == nullptr || (flags & ~kKnown) != 0) return CUDA_ERROR_INVALID_VALUE;
  const Entry* best = nullptr;
  bool is_known = false;
  for (const Entry& entry : kEntries) {
    if (std::strcmp(entry.name, name) != 0) continue;
    is_known = true;
    if (entry.version <= version && (best == nullptr || entry.version > best->version)) best = &entry;
  }
  *function = best == nullptr ? nullptr : best->function;
  if (status == nullptr) return CUDA_SUCCESS;
  *status = CU_GET_PROC_ADDRESS_SUCCESS;
  if (best == nullptr) {
    *status = is_known ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  }
  return CUDA_SUCCESS;
}

}  // namespace graphshard::hostcuda

namespace hostcuda = graphshard::hostcuda;

// cuda.h renames cuGetProcAddress to cuGetProcAddress_v2; both names are exported, each with its own ABI.
#undef cuGetProcAddress

GS_EXPORT CUresult cuGetProcAddress_v2(const char* name, void** function, int version, cuuint64_t flags,
                                       CUdriverProcAddressQueryResult* status) {
  return hostcuda::get_proc_address(name, function, version, flags, status);
}

GS_EXPORT CUresult cuGetProcAddress(const char* name, void** function, int version, cuuint64_t flags) {
  return hostcuda::get_proc_address(name, function, version, flags, nullptr);
}

GS_EXPORT int gshost_version(void) { return 100; }

GS_EXPORT CUresult gshost_stream_wait(CUstream stream, int64_t timeout_ns) {
  return hostcuda::stream_wait(stream, timeout_ns);
}

GS_EXPORT CUresult gshost_event_wait(CUevent event, int64_t timeout_ns) {
  return hostcuda::event_wait(event, timeout_ns);
}

GS_EXPORT CUresult gshost_graph_exec_set_executor(CUgraphExec exec, int executor, int64_t seed) {
  return hostcuda::graph_exec_set_executor(exec, executor, seed);
}

GS_EXPORT CUresult gshost_launch_kernel(CUstream stream, CUhostFn function, void* argument) {
  return hostcuda::launch_kernel(stream, function, argument);
}
