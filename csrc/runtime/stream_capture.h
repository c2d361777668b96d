// A capture opened and ended by hand on one stream, into which recordings and calls of this thread go.
#pragma once

#include "runtime/capture_lock.h"
#include "runtime/graph.h"

namespace graphshard {

// What is open between begin_capture and end_capture; holds the process's capture lock.
struct OpenCapture {
  explicit OpenCapture(double lock_timeout_s) : lock(lock_timeout_s) {}

  CaptureLock lock;
  CaptureMark mark_before = CaptureMark::kNone;
  std::vector<std::shared_ptr<const void>> kept;  // what the graph will point at
};

// Thread-local mode. Waits up to `lock_timeout_s` for another capture to end.
void begin_capture(Stream& stream, double lock_timeout_s);
// The graph owns all that was issued into the capture. The capture is over even if it fails, except that another thread
// than the one that began it is refused.
std::shared_ptr<Graph> end_capture(Stream& stream);
// Ends the capture of a stream that goes away, if one is open.
void abandon_capture(StreamHandle& stream);

// Whether this thread has opened a capture on `stream` with begin_capture.
bool is_captured_here(const StreamHandle& stream);
// `owner` lives as long as the graph of the capture that is open on `stream`, if begin_capture opened it.
void keep_in_capture(StreamHandle& stream, std::shared_ptr<const void> owner);
// Captures a call of function 0 of `calls` on a stream for which is_captured_here().
void call_in_capture(StreamHandle& stream, std::shared_ptr<Calls> calls);

}  // namespace graphshard
