#include "capture.h"

#include <algorithm>

#include "event.h"
#include "graph.h"
#include "guard.h"
#include "stream.h"

namespace graphshard::hostcuda {

namespace {

struct Captures {
  std::mutex mutex;
  std::vector<Capture*> active;
  uint64_t next_id = 1;
};

Captures& captures() {
  static auto* all = new Captures;
  return *all;
}

// Read without the mutex: calls outside any capture must not pay for captures.
std::atomic<int> num_active{0};
std::atomic<int> num_blocking{0};  // captured streams that the null stream would synchronise with

thread_local CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

Capture* find_capture(uint64_t id) {
  for (Capture* capture : captures().active) {
    if (capture->id == id) return capture;
  }
  return nullptr;
}

void attach(Capture* capture, CUstream stream) {
  stream->lane = static_cast<uint32_t>(capture->streams.size());
  stream->frontier.clear();
  capture->streams.push_back(stream);
  if (stream->flags == CU_STREAM_DEFAULT) num_blocking.fetch_add(1);
  stream->capture.store(capture, std::memory_order_release);
}

void detach(CUstream stream) {
  stream->capture.store(nullptr, std::memory_order_release);
  stream->frontier.clear();
  if (stream->flags == CU_STREAM_DEFAULT) num_blocking.fetch_sub(1);
}

/// Every stream leaves capture mode, whether the capture succeeded or not.
void finish(Capture* capture) {
  for (CUstream stream : capture->streams) detach(stream);
  auto& active = captures().active;
  active.erase(std::find(active.begin(), active.end(), capture));
  num_active.store(static_cast<int>(active.size()), std::memory_order_release);
}

void merge(std::vector<CUgraphNode>* frontier, const std::vector<CUgraphNode>& more) {
  for (CUgraphNode node : more) {
    if (std::find(frontier->begin(), frontier->end(), node) == frontier->end()) frontier->push_back(node);
  }
}

/// Whether every stream's frontier is an ancestor of the origin's: nothing was left forked.
bool all_joined(const Capture& capture) {
  const std::vector<bool> joined = capture.graph->ancestors(capture.origin->frontier);
  for (CUstream stream : capture.streams) {
    for (CUgraphNode node : stream->frontier) {
      if (!joined[node->index]) return false;
    }
  }
  return true;
}

CUresult invalidate(Capture* capture, CUresult result) {
  if (capture != nullptr) capture->invalidated = true;
  return result;
}

bool forbids_unsafe_calls(const Capture& capture) {
  if (capture.invalidated) return false;
  if (capture.owner == std::this_thread::get_id()) return capture.mode != CU_STREAM_CAPTURE_MODE_RELAXED;
  return thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL && capture.mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
}

}  // namespace

std::mutex& capture_mutex() { return captures().mutex; }

bool any_capture_active() { return num_active.load(std::memory_order_acquire) != 0; }

bool any_blocking_stream_captured() { return num_blocking.load(std::memory_order_acquire) != 0; }

CUresult capture_work(CUstream stream, const Work& work, bool* captured) {
  const std::lock_guard lock(capture_mutex());
  Capture* capture = stream->capture.load(std::memory_order_relaxed);
  *captured = capture != nullptr;
  if (capture == nullptr) return CUDA_SUCCESS;
  if (capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  CUgraphNode node = capture->graph->add(work, stream->frontier, stream->lane);
  stream->frontier.assign(1, node);
  return CUDA_SUCCESS;
}

CUresult capture_event_record(CUstream stream, CUevent event, bool* captured) {
  const std::lock_guard lock(capture_mutex());
  Capture* capture = stream->capture.load(std::memory_order_relaxed);
  *captured = capture != nullptr;
  if (capture == nullptr) return CUDA_SUCCESS;
  if (capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  const std::lock_guard event_lock(event->mutex);
  event->completion = {};
  event->capture_id = capture->id;
  event->frontier = stream->frontier;
  return CUDA_SUCCESS;
}

CUresult capture_event_wait(CUstream stream, CUevent event, bool* captured) {
  const std::lock_guard lock(capture_mutex());
  const std::lock_guard event_lock(event->mutex);
  Capture* own = stream->capture.load(std::memory_order_relaxed);
  *captured = own != nullptr || event->capture_id != 0;
  if (!*captured) return CUDA_SUCCESS;
  if (own != nullptr && own->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (event->capture_id == 0) return invalidate(own, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
  Capture* its = find_capture(event->capture_id);
  if (its == nullptr) return invalidate(own, CUDA_ERROR_INVALID_VALUE);  // that capture has ended
  if (its->invalidated) return invalidate(own, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  if (own != nullptr && own != its) {
    its->invalidated = true;
    return invalidate(own, CUDA_ERROR_STREAM_CAPTURE_MERGE);
  }
  if (own == nullptr) attach(its, stream);
  merge(&stream->frontier, event->frontier);
  return CUDA_SUCCESS;
}

CUresult refuse_in_capture(CUstream stream) {
  if (stream->capture.load(std::memory_order_acquire) == nullptr) return CUDA_SUCCESS;
  const std::lock_guard lock(capture_mutex());
  Capture* capture = stream->capture.load(std::memory_order_relaxed);
  if (capture == nullptr) return CUDA_SUCCESS;
  if (capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  return invalidate(capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
}

CUresult refuse_if_unsafe() {
  if (!any_capture_active() || thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_SUCCESS;
  const std::lock_guard lock(capture_mutex());
  CUresult result = CUDA_SUCCESS;
  for (Capture* capture : captures().active) {
    if (forbids_unsafe_calls(*capture)) result = invalidate(capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  }
  return result;
}

CUresult refuse_if_any_capture() {
  if (!any_capture_active()) return CUDA_SUCCESS;
  const std::lock_guard lock(capture_mutex());
  CUresult result = CUDA_SUCCESS;
  for (Capture* capture : captures().active) {
    const bool was_lost = capture->invalidated;
    invalidate(capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    result = was_lost ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  return result;
}

void invalidate_capture(uint64_t capture_id) {
  const std::lock_guard lock(capture_mutex());
  if (Capture* capture = find_capture(capture_id)) capture->invalidated = true;
}

void leave_capture(CUstream stream) {
  const std::lock_guard lock(capture_mutex());
  Capture* capture = stream->capture.load(std::memory_order_relaxed);
  if (capture == nullptr) return;
  if (capture->origin == stream) {
    finish(capture);
    delete capture->graph;
    delete capture;
    return;
  }
  capture->invalidated = true;
  capture->streams.erase(std::find(capture->streams.begin(), capture->streams.end(), stream));
  detach(stream);
}

CUresult stream_begin_capture(CUstream stream, CUstreamCaptureMode mode) {
  GS_RETURN_IF_ERROR(enter_context());
  if (check_stream(stream) != CUDA_SUCCESS) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
  const std::lock_guard lock(capture_mutex());
  if (stream->capture.load(std::memory_order_relaxed) != nullptr) return CUDA_ERROR_ILLEGAL_STATE;
  auto* capture = new Capture;
  capture->id = captures().next_id++;
  capture->graph = new CUgraph_st;
  capture->origin = stream;
  capture->owner = std::this_thread::get_id();
  capture->mode = mode;
  captures().active.push_back(capture);
  num_active.store(static_cast<int>(captures().active.size()), std::memory_order_release);
  attach(capture, stream);
  return CUDA_SUCCESS;
}

CUresult stream_end_capture(CUstream stream, CUgraph* graph) {
  GS_RETURN_IF_ERROR(enter_context());
  GS_RETURN_IF_ERROR(check_stream(stream));
  if (graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const std::lock_guard lock(capture_mutex());
  Capture* capture = stream->capture.load(std::memory_order_relaxed);
  *graph = nullptr;
  if (capture == nullptr) return CUDA_ERROR_ILLEGAL_STATE;
  if (capture->origin != stream) return invalidate(capture, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
  if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->owner != std::this_thread::get_id()) {
    return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
  }
  CUresult result = CUDA_SUCCESS;
  if (capture->invalidated) {
    result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  } else if (!all_joined(*capture)) {
    result = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
  }
  finish(capture);
  if (result == CUDA_SUCCESS) {
    *graph = capture->graph;
  } else {
    delete capture->graph;
  }
  delete capture;
  return result;
}

CUresult thread_exchange_stream_capture_mode(CUstreamCaptureMode* mode) {
  GS_RETURN_IF_ERROR(enter());
  if (mode == nullptr || *mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
  std::swap(*mode, thread_mode);
  return CUDA_SUCCESS;
}

}  // namespace graphshard::hostcuda
