// A NCCL library under test, loaded by path.
#pragma once

#include "nccl/abi.h"

namespace graphshard::litmus {

struct NcclApi {
  nccl::GetVersion get_version = nullptr;
  nccl::GetUniqueId get_unique_id = nullptr;
  nccl::GetErrorString get_error_string = nullptr;
  nccl::GetLastError get_last_error = nullptr;
  nccl::CommInitRankConfig comm_init_rank_config = nullptr;
  nccl::CommFinalize comm_finalize = nullptr;
  nccl::CommDestroy comm_destroy = nullptr;
  nccl::CommAbort comm_abort = nullptr;
  nccl::CommGetAsyncError comm_get_async_error = nullptr;
  nccl::MemAlloc mem_alloc = nullptr;
  nccl::MemFree mem_free = nullptr;
  nccl::CommWindowRegister window_register = nullptr;
  nccl::CommWindowDeregister window_deregister = nullptr;
  nccl::AllGather all_gather = nullptr;
  nccl::ReduceScatter reduce_scatter = nullptr;
  int (*stage)(const char* spec) = nullptr;
};

/// Filled by `load_nccl`, before any test runs.
extern NcclApi nc;

/// What is wrong with the library, or null.
const char* load_nccl(const char* path);

}  // namespace graphshard::litmus
