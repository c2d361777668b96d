#include "runtime/stream_capture.h"

#include <algorithm>

namespace graphshard {

namespace {

// Its address names this thread.
thread_local char this_thread;

void close(StreamHandle& stream) {
  stream.capture_mark.store(stream.open_capture->mark_before);
  stream.capture_thread.store(nullptr);
  stream.open_capture.reset();  // last: releases the capture lock
}

}  // namespace

void begin_capture(Stream& stream, double lock_timeout_s) {
  StreamHandle& handle = *stream.handle();
  handle.driver.enter();
  check_not_capturing(handle, "cuStreamBeginCapture");
  auto open = std::make_shared<OpenCapture>(lock_timeout_s);
  GRAPHSHARD_CALL(handle.driver.table(), cuStreamBeginCapture, handle.stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
  handle.open_capture = std::move(open);
  handle.open_capture->mark_before = handle.capture_mark.exchange(CaptureMark::kHeld);
  handle.capture_thread.store(&this_thread);
}

bool is_captured_here(const StreamHandle& stream) { return stream.capture_thread.load() == &this_thread; }

std::shared_ptr<Graph> end_capture(Stream& stream) {
  StreamHandle& handle = *stream.handle();
  handle.driver.enter();
  if (!is_captured_here(handle)) {
    throw DriverError("cuStreamEndCapture", CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,
                      "this thread has opened no capture on this stream; end it where begin_capture was called");
  }
  auto owners = std::make_shared<GraphOwners>(handle.driver, 0);
  owners->others = std::move(handle.open_capture->kept);
  CUgraph graph = nullptr;
  const CUresult result = handle.driver.table().cuStreamEndCapture(handle.stream, &graph);
  close(handle);
  handle.driver.table().check(result, "cuStreamEndCapture");
  return std::make_shared<Graph>(handle.driver, graph, std::move(owners));
}

void abandon_capture(StreamHandle& stream) {
  if (stream.open_capture == nullptr) return;
  CUgraph graph = nullptr;
  const Table& table = stream.driver.table();
  if (table.cuStreamEndCapture(stream.stream, &graph) == CUDA_SUCCESS) table.cuGraphDestroy(graph);
  close(stream);
}

void keep_in_capture(StreamHandle& stream, std::shared_ptr<const void> owner) {
  if (!is_captured_here(stream)) return;
  auto& kept = stream.open_capture->kept;
  if (std::find(kept.begin(), kept.end(), owner) == kept.end()) kept.push_back(std::move(owner));
}

void call_in_capture(StreamHandle& stream, std::shared_ptr<Calls> calls) {
  stream.driver.enter();
  auto* entry = const_cast<Calls::Entry*>(calls->data());
  GRAPHSHARD_CALL(stream.driver.table(), cuLaunchHostFunc, stream.stream, &Calls::run, entry);
  keep_in_capture(stream, std::move(calls));
}

}  // namespace graphshard
