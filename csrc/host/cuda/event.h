// Events: a handle whose latest record is a completion, or a place in a capture.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include <cuda.h>

#include "completion.h"

struct CUevent_st : graphshard::hostcuda::RefCounted {
  explicit CUevent_st(unsigned int event_flags) : flags(event_flags) {}

  bool is_timed() const { return (flags & CU_EVENT_DISABLE_TIMING) == 0; }
  /// Bind to a new completion (a wait issued earlier keeps the one it was bound to).
  graphshard::hostcuda::Ref<graphshard::hostcuda::Completion> bind();
  /// Bind and reach it at once: an external record node that has come to run.
  void record_now();
  /// The latest record's completion (null: never recorded), unless it was recorded in a capture.
  CUresult latest(graphshard::hostcuda::Ref<graphshard::hostcuda::Completion>* completion);

  const unsigned int flags;
  std::mutex mutex;
  graphshard::hostcuda::Ref<graphshard::hostcuda::Completion> completion;  // null: never recorded
  uint64_t capture_id = 0;                                                 // 0: last recorded eagerly
  std::vector<CUgraphNode> frontier;                                       // of the capture `capture_id`
};

namespace graphshard::hostcuda {

CUresult event_create(CUevent* event, unsigned int flags);
CUresult event_destroy(CUevent event);
CUresult event_record(CUevent event, CUstream stream);
CUresult event_record_with_flags(CUevent event, CUstream stream, unsigned int flags);
CUresult event_query(CUevent event);
CUresult event_synchronize(CUevent event);
CUresult event_elapsed_time(float* milliseconds, CUevent start, CUevent end);
CUresult stream_wait_event(CUstream stream, CUevent event, unsigned int flags);
CUresult event_wait(CUevent event, int64_t timeout_ns);

}  // namespace graphshard::hostcuda
