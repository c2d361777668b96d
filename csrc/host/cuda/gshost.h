// What the host driver offers beyond CUDA: a version, timed waits, the choice of a graph's executor, a stand-in kernel.
#pragma once

#include <stdint.h>

#include <cuda.h>

#ifdef __cplusplus
extern "C" {
#endif

/// 100 * major + minor of the host driver. A library without this symbol is not the host driver.
int gshost_version(void);

/// As cuStreamSynchronize and cuEventSynchronize, but CUDA_ERROR_NOT_READY after `timeout_ns` (-1: never).
CUresult gshost_stream_wait(CUstream stream, int64_t timeout_ns);
CUresult gshost_event_wait(CUevent event, int64_t timeout_ns);

/// `executor` 0: cooperative (one thread for the whole graph, the default), 1: threaded (a thread per stream).
/// `seed` orders the cooperative one: -1 creation order, -2 copies earliest, -3 copies latest, >= 0 any runnable
/// node next; but for -1 copies run in pieces. CUDA_ERROR_NOT_READY while a launch of `exec` is in flight.
CUresult gshost_graph_exec_set_executor(CUgraphExec exec, int executor, int64_t seed);

/// As cuLaunchHostFunc, but captured it is a kernel node: for libraries that fall back to kernels.
CUresult gshost_launch_kernel(CUstream stream, CUhostFn function, void* argument);

#ifdef __cplusplus
}
#endif
