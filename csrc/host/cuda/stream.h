// Streams: a queue and a worker thread that starts with the first work and stops at a last item.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include <cuda.h>

#include "work.h"

namespace graphshard::hostcuda {
struct Capture;
}

struct CUstream_st {
  CUstream_st(unsigned int stream_flags, int stream_priority) : flags(stream_flags), priority(stream_priority) {}

  /// Enqueue; starts the worker if this is the first work. CUDA_ERROR_OUT_OF_MEMORY if no thread could be started.
  CUresult push(graphshard::hostcuda::Work work);
  bool is_idle() const;
  /// Stop after what is queued; the stream deletes itself.
  void stop();

  const unsigned int flags;
  const int priority;

  // Guarded by the capture mutex; `capture` is also read alone, to tell eager from captured calls.
  std::atomic<graphshard::hostcuda::Capture*> capture{nullptr};
  std::vector<CUgraphNode> frontier;  // what the next captured node depends on
  std::vector<CUgraphNode> shown;     // a copy of it, lent out by cuStreamGetCaptureInfo
  std::vector<CUgraphEdgeData> shown_edges;
  uint32_t lane = 0;  // index among the capture's streams

 private:
  bool start();
  void append(graphshard::hostcuda::Work work);
  void run();
  bool run_batch(std::vector<graphshard::hostcuda::Work>* batch);
  void take(std::vector<graphshard::hostcuda::Work>* batch, uint64_t taken);
  void wake();

  std::mutex mutex_;
  std::vector<graphshard::hostcuda::Work> queue_;
  bool started_ = false;
  std::atomic<uint64_t> submitted_{0};
  std::atomic<uint64_t> completed_{0};
  std::atomic<uint32_t> asleep_{0};
};

namespace graphshard::hostcuda {

/// Append `work` to `stream`, or a node for it to the graph that `stream` is being captured into.
CUresult submit(CUstream stream, Work work);

/// The stream behind a handle: the null and per-thread streams are not supported (CUDA_ERROR_NOT_SUPPORTED), and
/// the null stream while a blocking stream is captured is CUDA_ERROR_STREAM_CAPTURE_IMPLICIT.
CUresult check_stream(CUstream stream);

/// Completions for everything that streams still have to do now.
CUresult mark_work_in_flight(std::vector<Ref<Completion>>* reached);

/// Start a thread that outlives its creator and takes no signals; false if there is none to be had.
bool start_detached(void (*function)(void*), void* argument, const char* name);

CUresult stream_create(CUstream* stream, unsigned int flags);
CUresult stream_create_with_priority(CUstream* stream, unsigned int flags, int priority);
CUresult stream_destroy(CUstream stream);
CUresult stream_query(CUstream stream);
CUresult stream_synchronize(CUstream stream);
CUresult stream_wait(CUstream stream, int64_t timeout_ns);
CUresult stream_get_flags(CUstream stream, unsigned int* flags);
CUresult stream_get_priority(CUstream stream, int* priority);
CUresult stream_get_context_v1(CUstream stream, CUcontext* context);
CUresult stream_get_context_v2(CUstream stream, CUcontext* context, CUgreenCtx* green);
CUresult context_synchronize();

CUresult launch_host_func(CUstream stream, CUhostFn function, void* argument);
CUresult launch_kernel(CUstream stream, CUhostFn function, void* argument);
CUresult stream_write_value_32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned int flags);
CUresult stream_write_value_64(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned int flags);
CUresult stream_wait_value_32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned int flags);
CUresult stream_wait_value_64(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned int flags);
CUresult stream_batch_mem_op(CUstream stream, unsigned int count, CUstreamBatchMemOpParams* params, unsigned int flags);

}  // namespace graphshard::hostcuda
