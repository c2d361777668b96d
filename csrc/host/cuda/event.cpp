#include "event.h"

#include "capture.h"
#include "guard.h"
#include "stream.h"

using graphshard::hostcuda::Completion;
using graphshard::hostcuda::now_ns;
using graphshard::hostcuda::Ref;

Ref<Completion> CUevent_st::bind() {
  Ref<Completion> fresh = Ref<Completion>::adopt(new Completion);
  const std::lock_guard lock(mutex);
  completion = fresh;
  capture_id = 0;
  frontier.clear();
  return fresh;
}

void CUevent_st::record_now() {
  const Ref<Completion> fresh = Ref<Completion>::adopt(new Completion);
  fresh->finish_at(now_ns());
  const std::lock_guard lock(mutex);
  completion = fresh;
  capture_id = 0;
  frontier.clear();
}

CUresult CUevent_st::latest(Ref<Completion>* result) {
  const std::lock_guard lock(mutex);
  if (capture_id != 0) return CUDA_ERROR_CAPTURED_EVENT;
  *result = completion;
  return CUDA_SUCCESS;
}

namespace graphshard::hostcuda {

namespace {

/// The completion to query or wait for on the host; a captured event is refused and its capture is lost.
CUresult host_completion(CUevent event, Ref<Completion>* completion) {
  GS_RETURN_IF_ERROR(enter());
  if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  uint64_t capture_id = 0;
  {
    const std::lock_guard lock(event->mutex);
    capture_id = event->capture_id;
    *completion = event->completion;
  }
  if (capture_id == 0) return refuse_if_unsafe();
  invalidate_capture(capture_id);
  return CUDA_ERROR_CAPTURED_EVENT;
}

CUresult captured_event_wait(CUstream stream, CUevent event, Ref<Completion>* completion, bool* captured) {
  bool in_capture = stream->capture.load(std::memory_order_acquire) != nullptr;
  {
    const std::lock_guard lock(event->mutex);
    in_capture = in_capture || event->capture_id != 0;
    *completion = event->completion;
  }
  *captured = false;
  return in_capture ? capture_event_wait(stream, event, captured) : CUDA_SUCCESS;
}

}  // namespace

CUresult event_create(CUevent* event, unsigned int flags) {
  GS_RETURN_IF_ERROR(enter_context());
  constexpr unsigned int kKnown = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
  if (event == nullptr || (flags & ~kKnown) != 0) return CUDA_ERROR_INVALID_VALUE;
  if ((flags & CU_EVENT_INTERPROCESS) != 0) return CUDA_ERROR_NOT_SUPPORTED;
  *event = new CUevent_st(flags);
  return CUDA_SUCCESS;
}

CUresult event_destroy(CUevent event) {
  GS_RETURN_IF_ERROR(enter());
  if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  const Ref<CUevent_st> last = Ref<CUevent_st>::adopt(event);
  return CUDA_SUCCESS;
}

CUresult event_record_with_flags(CUevent event, CUstream stream, unsigned int flags) {
  GS_RETURN_IF_ERROR(enter_context());
  if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  GS_RETURN_IF_ERROR(check_stream(stream));
  if (flags > CU_EVENT_RECORD_EXTERNAL) return CUDA_ERROR_INVALID_VALUE;
  if (stream->capture.load(std::memory_order_acquire) != nullptr) {
    bool captured = false;
    const CUresult result = flags == CU_EVENT_RECORD_EXTERNAL
                                ? capture_work(stream, EventRecordWork{Ref<CUevent_st>::share(event)}, &captured)
                                : capture_event_record(stream, event, &captured);
    if (captured) return result;
  }
  if (flags == CU_EVENT_RECORD_EXTERNAL) return CUDA_ERROR_INVALID_VALUE;
  return stream->push(SignalWork{event->bind(), event->is_timed()});
}

CUresult event_record(CUevent event, CUstream stream) { return event_record_with_flags(event, stream, 0); }

CUresult stream_wait_event(CUstream stream, CUevent event, unsigned int flags) {
  GS_RETURN_IF_ERROR(enter_context());
  if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  GS_RETURN_IF_ERROR(check_stream(stream));
  if (flags > CU_EVENT_WAIT_EXTERNAL) return CUDA_ERROR_INVALID_VALUE;
  bool captured = false;
  if (flags == CU_EVENT_WAIT_EXTERNAL) {
    const CUresult result = capture_work(stream, EventWaitWork{Ref<CUevent_st>::share(event)}, &captured);
    return captured ? result : CUDA_ERROR_INVALID_VALUE;
  }
  Ref<Completion> completion;
  const CUresult result = captured_event_wait(stream, event, &completion, &captured);
  if (captured || result != CUDA_SUCCESS) return result;
  if (!completion || completion->done()) return CUDA_SUCCESS;
  return stream->push(AwaitWork{completion});
}

CUresult event_query(CUevent event) {
  Ref<Completion> completion;
  GS_RETURN_IF_ERROR(host_completion(event, &completion));
  return !completion || completion->done() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult event_wait(CUevent event, int64_t timeout_ns) {
  Ref<Completion> completion;
  GS_RETURN_IF_ERROR(host_completion(event, &completion));
  return !completion || completion->wait(timeout_ns) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult event_synchronize(CUevent event) { return event_wait(event, kForever); }

CUresult event_elapsed_time(float* milliseconds, CUevent start, CUevent end) {
  GS_RETURN_IF_ERROR(enter());
  if (milliseconds == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (start == nullptr || end == nullptr || !start->is_timed() || !end->is_timed()) return CUDA_ERROR_INVALID_HANDLE;
  Ref<Completion> from;
  Ref<Completion> to;
  GS_RETURN_IF_ERROR(start->latest(&from));
  GS_RETURN_IF_ERROR(end->latest(&to));
  if (!from || !to) return CUDA_ERROR_INVALID_HANDLE;
  if (!from->done() || !to->done()) return CUDA_ERROR_NOT_READY;
  *milliseconds = static_cast<float>(static_cast<double>(to->time_ns() - from->time_ns()) * 1e-6);
  return CUDA_SUCCESS;
}

}  // namespace graphshard::hostcuda
