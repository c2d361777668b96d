// What every driver call checks first, and the process-wide state behind it.
#pragma once

#include <atomic>
#include <mutex>
#include <vector>

#include <cuda.h>

#include "completion.h"

/// The one device's primary context.
struct CUctx_st {
  std::atomic<int> retained{0};
  unsigned int flags = 0;
};

namespace graphshard::hostcuda {

constexpr int kDriverVersion = 13000;
constexpr CUdevice kDevice = 0;

/// Never destroyed: worker threads may still run while the process exits.
struct Process {
  std::mutex mutex;
  CUctx_st primary;
  std::vector<CUstream> streams;                // live handles
  std::vector<Ref<Completion>> ending_streams;  // destroyed, with work left
};
Process& process();

/// CUDA_SUCCESS, or why no call may be made here: a forked child (3), before cuInit (3), in a host function (800).
CUresult enter();
/// As `enter`, and a live context is current on this thread (201, 709 otherwise).
CUresult enter_context();
CUcontext current_context();

}  // namespace graphshard::hostcuda

#define GS_RETURN_IF_ERROR(expression)               \
  do {                                               \
    const CUresult gs_result = (expression);         \
    if (gs_result != CUDA_SUCCESS) return gs_result; \
  } while (false)
