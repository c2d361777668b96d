#include "driver_api.h"

#include <string>

#include <dlfcn.h>

namespace graphshard::litmus {

DriverApi cu;

namespace {

std::string error_text;

const char* fail(std::string text) {
  error_text = std::move(text);
  return error_text.c_str();
}

template <typename Function>
bool resolve(const char* name, int version, Function* function) {
  void* address = nullptr;
  const CUresult result = cu.get_proc_address(name, &address, version, CU_GET_PROC_ADDRESS_DEFAULT, nullptr);
  *function = reinterpret_cast<Function>(address);
  return result == CUDA_SUCCESS && address != nullptr;
}

template <typename Function>
void find_extra(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
}

}  // namespace

const char* load_driver(const char* path) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return fail(dlerror());
  find_extra(library, "cuGetProcAddress_v2", &cu.get_proc_address);
  if (cu.get_proc_address == nullptr) return fail(std::string(path) + " does not export cuGetProcAddress_v2");
#define GS_LITMUS_RESOLVE(member, name, version) \
  if (!resolve(#name, version, &cu.member)) return fail(std::string(#name) + " at version " #version " is missing");
  GS_LITMUS_ENTRIES(GS_LITMUS_RESOLVE)
#undef GS_LITMUS_RESOLVE
  resolve("cuMemcpyBatchAsync", 12080, &cu.memcpy_batch_async);
  resolve("cuStreamGetCaptureInfo", 12030, &cu.stream_get_capture_info_v3);
  resolve("cuGraphGetEdges", 12030, &cu.graph_get_edges_v2);
  find_extra(library, "gshost_version", &cu.host_version);
  find_extra(library, "gshost_stream_wait", &cu.host_stream_wait);
  find_extra(library, "gshost_event_wait", &cu.host_event_wait);
  find_extra(library, "gshost_graph_exec_set_executor", &cu.host_set_executor);
  find_extra(library, "gshost_launch_kernel", &cu.host_launch_kernel);
  return nullptr;
}

const char* open_device() {
  const CUresult initialised = cu.init(0);
  if (initialised != CUDA_SUCCESS) return fail("cuInit failed with " + std::to_string(initialised));
  int num_devices = 0;
  CUdevice device = 0;
  if (cu.device_get_count(&num_devices) != CUDA_SUCCESS || num_devices == 0) return fail("there is no device");
  if (cu.device_get(&device, 0) != CUDA_SUCCESS) return fail("device 0 cannot be opened");
  if (cu.primary_ctx_retain(&cu.context, device) != CUDA_SUCCESS) return fail("no primary context on device 0");
  return cu.ctx_set_current(cu.context) == CUDA_SUCCESS ? nullptr : fail("the context cannot be made current");
}

}  // namespace graphshard::litmus
