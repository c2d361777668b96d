#include "runtime/recording.h"

#include <algorithm>

#include "runtime/capture_lock.h"
#include "runtime/stream_capture.h"

namespace graphshard {

namespace {

// The capture that `stream` is in; 0 if it is in none that is still good.
cuuint64_t capture_of(const Table& table, CUstream stream) {
  CUstreamCaptureStatus status{};
  cuuint64_t id = 0;
  GRAPHSHARD_CALL(table, cuStreamGetCaptureInfo, stream, &status, &id, nullptr, nullptr, nullptr);
  return status == CU_STREAM_CAPTURE_STATUS_ACTIVE ? id : 0;
}

[[noreturn]] void refuse(CUresult code, const std::string& reason) {
  throw DriverError("Recording.issue", code, "Recording.issue refused: " + reason);
}

}  // namespace

Recording::Recording(std::shared_ptr<const BoundOps> ops)
    : ops_(std::move(ops)),
      owners_(std::make_shared<GraphOwners>(ops_->driver(), ops_->num_events())),
      recorded_(ops_->num_events(), false),
      nodes_(ops_->driver().table(), ops_->stream(0)) {
  owners_->others = ops_->hold_collectives();
  owners_->others.push_back(ops_);
}

Recording::~Recording() { ops_->driver().retire(std::move(owners_)); }

void Recording::check_open() {
  if (!CaptureLock::is_held()) {
    refuse(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
           "nobody holds the capture lock, so a second capture could begin; open the capture under CaptureLock");
  }
  const cuuint64_t id = capture_of(ops_->driver().table(), ops_->stream(0));
  if (id == 0) {
    refuse(CUDA_ERROR_ILLEGAL_STATE,
           "no capture is open on the list's stream 0, or it was lost to an earlier error; open one on that stream, or "
           "use OpList.issue to run the ops now");
  }
  if (capture_id_ != 0 && capture_id_ != id) {
    refuse(CUDA_ERROR_STREAM_CAPTURE_MERGE,
           "its events belong to an earlier capture; make a Recording for each capture");
  }
  capture_id_ = id;
}

CaptureState Recording::joined_now() const {
  CaptureState state{{}, recorded_};
  for (const auto& stream : ops_->streams()) {
    state.joined.push_back(capture_of(ops_->driver().table(), stream->stream) == capture_id_);
  }
  return state;
}

void Recording::issue(const std::shared_ptr<Calls>& calls, size_t begin, size_t end) {
  ops_->driver().enter();
  ops_->check_range(begin, end);
  ops_->check_calls(*calls, begin, end);
  std::lock_guard<std::mutex> guard(mutex_);
  check_open();
  CaptureState state = joined_now();
  ops_->check_joined(state, begin, end);
  if (owners_->others.back() != calls) owners_->others.push_back(calls);
  keep_in_capture(*ops_->streams()[0], owners_);
  for (size_t i = 0; i < ops_->streams().size(); ++i) {
    if (state.joined[i]) ops_->streams()[i]->capture_mark.store(CaptureMark::kAsk);
  }
  ops_->run(*calls, owners_->events.data(), begin, end, &nodes_);
  recorded_ = std::move(state.recorded);
}

}  // namespace graphshard
