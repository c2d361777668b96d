// Stream capture: which streams are being captured, into what, and which calls that forbids.
#pragma once

#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include <cuda.h>

#include "work.h"

namespace graphshard::hostcuda {

struct Capture {
  uint64_t id = 0;
  CUgraph graph = nullptr;
  CUstream origin = nullptr;
  std::thread::id owner;
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  bool invalidated = false;
  std::vector<CUstream> streams;  // the origin first
};

/// Guards all captures, the streams' frontiers and the graphs being captured.
std::mutex& capture_mutex();

/// Add a node for `work` after `stream`'s frontier. `captured` is false if the stream is not capturing after all.
CUresult capture_work(CUstream stream, const Work& work, bool* captured);
CUresult capture_event_record(CUstream stream, CUevent event, bool* captured);
/// Join `event`'s frontier into `stream`'s, which joins the event's capture if it is in none.
CUresult capture_event_wait(CUstream stream, CUevent event, bool* captured);

/// 900, and the capture invalidated, if `stream` is being captured: for what cannot be captured.
CUresult refuse_in_capture(CUstream stream);
/// 900 if a capture forbids synchronising or allocating calls on this thread; invalidates that capture.
CUresult refuse_if_unsafe();
/// 900 if any stream is being captured, all captures invalidated: a device-wide synchronise would include them.
CUresult refuse_if_any_capture();
/// Invalidate the capture that `capture_id` names, if it is still active.
void invalidate_capture(uint64_t capture_id);
/// Take a stream that is being destroyed out of its capture, which is then invalid, or gone with its origin.
void leave_capture(CUstream stream);
bool any_capture_active();
bool any_blocking_stream_captured();

CUresult stream_begin_capture(CUstream stream, CUstreamCaptureMode mode);
CUresult stream_end_capture(CUstream stream, CUgraph* graph);
CUresult stream_is_capturing(CUstream stream, CUstreamCaptureStatus* status);
CUresult stream_get_capture_info_v1(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id);
CUresult stream_get_capture_info_v2(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
                                    const CUgraphNode** dependencies, size_t* num_dependencies);
CUresult stream_get_capture_info_v3(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
                                    const CUgraphNode** dependencies, const CUgraphEdgeData** edges,
                                    size_t* num_dependencies);
CUresult stream_update_capture_dependencies_v1(CUstream stream, CUgraphNode* dependencies, size_t num_dependencies,
                                               unsigned int flags);
CUresult stream_update_capture_dependencies_v2(CUstream stream, CUgraphNode* dependencies, const CUgraphEdgeData* edges,
                                               size_t num_dependencies, unsigned int flags);
CUresult thread_exchange_stream_capture_mode(CUstreamCaptureMode* mode);

}  // namespace graphshard::hostcuda
