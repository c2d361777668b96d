#include "driver.h"

#include <climits>
#include <cstdlib>

#include <dlfcn.h>

namespace graphshard::hostnccl {

namespace {

constexpr const char* kDriverFile = "libgraphshard_hostcuda.so";

/// By its absolute path, so that the process has one copy of it.
std::string path_beside_this_library() {
  Dl_info info{};
  char resolved[PATH_MAX];
  if (dladdr(reinterpret_cast<const void*>(&path_beside_this_library), &info) == 0 ||
      realpath(info.dli_fname, resolved) == nullptr) {
    throw Failure(nccl::kSystemError, "the host NCCL cannot tell where it was loaded from");
  }
  const std::string path = resolved;
  return path.substr(0, path.rfind('/') + 1) + kDriverFile;
}

DriverTable load() {
  const std::string path = path_beside_this_library();
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw Failure(nccl::kSystemError, std::string("no host driver: ") + dlerror());
  const auto find = reinterpret_cast<PFN_cuGetProcAddress_v12000>(dlsym(library, "cuGetProcAddress_v2"));
  DriverTable table;
  std::string missing;
  const auto resolve = [&](const char* name, int version) {
    void* function = nullptr;
    if (find != nullptr) find(name, &function, version, CU_GET_PROC_ADDRESS_DEFAULT, nullptr);
    if (function == nullptr) missing += std::string(" ") + name;
    return function;
  };
#define HOSTNCCL_RESOLVE(name, version) table.name = reinterpret_cast<PFN_##name##_v##version>(resolve(#name, version));
  HOSTNCCL_ENTRY_POINTS(HOSTNCCL_RESOLVE)
#undef HOSTNCCL_RESOLVE
  void* launch_kernel = dlsym(library, "gshost_launch_kernel");
  if (launch_kernel == nullptr) missing += " gshost_launch_kernel";
  table.gshost_launch_kernel = reinterpret_cast<CUresult (*)(CUstream, CUhostFn, void*)>(launch_kernel);
  if (!missing.empty()) throw Failure(nccl::kSystemError, path + " lacks" + missing);
  if (table.cuInit(0) != CUDA_SUCCESS || table.cuDevicePrimaryCtxRetain(&table.context, 0) != CUDA_SUCCESS) {
    throw Failure(nccl::kUnhandledCudaError, path + " could not be initialised: a forked child?");
  }
  return table;
}

}  // namespace

const DriverTable& driver() {
  static const auto* const table = new DriverTable(load());
  return *table;
}

void enter_driver() {
  CUcontext current = nullptr;
  HOSTNCCL_CALL(cuCtxGetCurrent, &current);
  if (current == nullptr) HOSTNCCL_CALL(cuCtxSetCurrent, driver().context);
}

void check(CUresult result, const char* entry_point) {
  if (result == CUDA_SUCCESS) return;
  const char* name = nullptr;
  if (driver().cuGetErrorName(result, &name) != CUDA_SUCCESS || name == nullptr) name = "unknown error";
  throw Failure(nccl::kUnhandledCudaError,
                std::string(entry_point) + " failed: " + name + " (" + std::to_string(result) + ")");
}

}  // namespace graphshard::hostnccl
