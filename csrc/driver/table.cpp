#include "driver/table.h"

#include <dlfcn.h>

namespace graphshard {

namespace {

template <typename Function>
void load_extra(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
}

}  // namespace

Table Table::load(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw DriverError("dlopen", CUDA_ERROR_SHARED_OBJECT_INIT_FAILED,
                      "driver library " + path + " could not be loaded: " + dlerror());
  }
  auto get_proc_address = reinterpret_cast<PFN_cuGetProcAddress_v12000>(dlsym(library, "cuGetProcAddress_v2"));
  if (get_proc_address == nullptr) {
    dlclose(library);
    throw DriverError(
        "cuGetProcAddress_v2", CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND,
        "driver library " + path + " has no cuGetProcAddress_v2: it is older than CUDA 12.0 or no driver");
  }
  Table table;
  std::string missing;
  auto resolve = [&](const char* name, int version) -> void* {
    void* function = nullptr;
    CUdriverProcAddressQueryResult status{};
    CUresult result = get_proc_address(name, &function, version, CU_GET_PROC_ADDRESS_DEFAULT, &status);
    if (result == CUDA_SUCCESS && function != nullptr) return function;
    missing += std::string(missing.empty() ? "" : ", ") + name + " (version " + std::to_string(version) + ")";
    return nullptr;
  };
#define GRAPHSHARD_RESOLVE(name, version) \
  table.name = reinterpret_cast<PFN_##name##_v##version>(resolve(#name, version));
  GRAPHSHARD_ENTRY_POINTS(GRAPHSHARD_RESOLVE)
#undef GRAPHSHARD_RESOLVE
  if (!missing.empty()) {
    dlclose(library);
    throw DriverError("cuGetProcAddress_v2", CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND,
                      "driver library " + path + " lacks entry points: " + missing + "; use a newer driver");
  }
  load_extra(library, "gshost_version", table.gshost_version);
  load_extra(library, "gshost_stream_wait", table.gshost_stream_wait);
  load_extra(library, "gshost_event_wait", table.gshost_event_wait);
  load_extra(library, "gshost_graph_exec_set_executor", table.gshost_graph_exec_set_executor);
  return table;
}

std::string Table::error_name(CUresult result) const {
  const char* name = nullptr;
  if (cuGetErrorName == nullptr || cuGetErrorName(result, &name) != CUDA_SUCCESS || name == nullptr) {
    return "unknown error";
  }
  return name;
}

void Table::fail(CUresult result, const char* entry_point, const std::string& detail) const {
  const char* text = nullptr;
  if (cuGetErrorString(result, &text) != CUDA_SUCCESS) text = nullptr;
  std::string message =
      std::string(entry_point) + " failed: " + error_name(result) + " (" + std::to_string(result) + ")";
  if (text != nullptr) message += ", " + std::string(text);
  if (!detail.empty()) message += ", at " + detail;
  throw DriverError(entry_point, result, message);
}

}  // namespace graphshard
