#include "nccl_api.h"

#include <dlfcn.h>

namespace graphshard::litmus {

NcclApi nc;

namespace {

template <typename Function>
bool find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

}  // namespace

const char* load_nccl(const char* path) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return dlerror();
  const bool is_whole =
      find(library, "ncclGetVersion", &nc.get_version) && find(library, "ncclGetUniqueId", &nc.get_unique_id) &&
      find(library, "ncclGetErrorString", &nc.get_error_string) &&
      find(library, "ncclGetLastError", &nc.get_last_error) &&
      find(library, "ncclCommInitRankConfig", &nc.comm_init_rank_config) &&
      find(library, "ncclCommFinalize", &nc.comm_finalize) && find(library, "ncclCommDestroy", &nc.comm_destroy) &&
      find(library, "ncclCommAbort", &nc.comm_abort) &&
      find(library, "ncclCommGetAsyncError", &nc.comm_get_async_error) &&
      find(library, "ncclMemAlloc", &nc.mem_alloc) && find(library, "ncclMemFree", &nc.mem_free) &&
      find(library, "ncclCommWindowRegister", &nc.window_register) &&
      find(library, "ncclCommWindowDeregister", &nc.window_deregister) &&
      find(library, "ncclAllGather", &nc.all_gather) && find(library, "ncclReduceScatter", &nc.reduce_scatter) &&
      find(library, "gshost_nccl_stage", &nc.stage);
  return is_whole ? nullptr : "an entry point is missing";
}

}  // namespace graphshard::litmus
