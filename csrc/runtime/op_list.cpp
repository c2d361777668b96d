#include "runtime/op_list.h"

#include <algorithm>

#include "runtime/allowed_in_captures.h"
#include "runtime/capture_lock.h"
#include "runtime/recording.h"

namespace graphshard {

namespace {

// Marks the streams of a capture for its duration, so that no other thread's work ends up in the graph.
class CapturingStreams {
 public:
  explicit CapturingStreams(const std::vector<std::shared_ptr<StreamHandle>>& streams) : streams_(streams) {
    for (const auto& stream : streams_) marks_.push_back(stream->capture_mark.exchange(CaptureMark::kHeld));
  }
  ~CapturingStreams() {
    for (size_t i = streams_.size(); i-- > 0;) streams_[i]->capture_mark.store(marks_[i]);
  }
  CapturingStreams(const CapturingStreams&) = delete;
  CapturingStreams& operator=(const CapturingStreams&) = delete;

 private:
  const std::vector<std::shared_ptr<StreamHandle>>& streams_;
  std::vector<CaptureMark> marks_;
};

}  // namespace

OpList::OpList(Driver& driver, const BoundOps::Streams& streams, size_t num_events, std::vector<Op> ops,
               BoundOps::Collectives collectives)
    : driver_(driver),
      body_(std::make_shared<Body>(
          std::make_shared<const BoundOps>(driver, streams, num_events, std::move(ops), std::move(collectives)))) {}

OpList::~OpList() { driver_.retire(std::move(body_)); }

void OpList::issue(const std::shared_ptr<Calls>& calls, size_t begin, size_t end) {
  driver_.enter();
  const BoundOps& ops = *body_->ops;
  ops.check_range(begin, end);
  ops.check_calls(*calls, begin, end);
  for (const auto& stream : ops.streams()) check_not_capturing(*stream, "OpList.issue");
  std::shared_ptr<void> previous;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    if (body_->calls != calls) {
      previous = std::move(body_->calls);
      body_->calls = calls;
    }
    ops.run(*calls, body_->events.data(), begin, end, trace_.get());
  }
  driver_.retire(std::move(previous));
}

void OpList::set_trace(bool is_on) {
  std::lock_guard<std::mutex> guard(mutex_);
  trace_ = is_on ? std::make_unique<OpTrace>() : nullptr;
}

std::vector<size_t> OpList::take_trace() {
  std::lock_guard<std::mutex> guard(mutex_);
  return trace_ == nullptr ? std::vector<size_t>() : std::exchange(trace_->indices, {});
}

CUevent OpList::event(size_t index) const {
  driver_.enter();
  if (index >= body_->ops->num_events()) throw std::out_of_range("event " + std::to_string(index));
  return body_->events[index];
}

bool OpList::event_done(size_t index) const {
  CUevent asked = event(index);
  const AllowedInCaptures allowed(driver_.table());
  const CUresult result = driver_.table().cuEventQuery(asked);
  if (result != CUDA_ERROR_NOT_READY) driver_.table().check(result, "cuEventQuery");
  return result == CUDA_SUCCESS;
}

bool OpList::wait_event(size_t index, int64_t timeout_ns) const { return driver_.wait_event(event(index), timeout_ns); }

void OpList::run_external(const Calls& calls, const CUevent* events, const ExternalEvents& external_events,
                          NodeSpans& nodes) const {
  const BoundOps& ops = *body_->ops;
  const Table& table = driver_.table();
  size_t begin = 0;
  for (const auto& [index, event] : external_events) {
    ops.run(calls, events, begin, index + 1, &nodes);
    begin = index + 1;
    const CUresult result =
        table.cuEventRecordWithFlags(event->handle(), ops.stream(ops[index].stream), CU_EVENT_RECORD_EXTERNAL);
    if (result != CUDA_SUCCESS) table.fail(result, "cuEventRecordWithFlags", ops.where(index));
  }
  ops.run(calls, events, begin, ops.size(), &nodes);
}

// Note [a failed capture]: whatever fails, EndCapture is due on the origin: it frees every stream that has joined, and
// its error is only a consequence of the first one.
CUgraph OpList::record(const Calls& calls, const CUevent* events, const ExternalEvents& external_events,
                       NodeSpans& nodes) const {
  const Table& table = driver_.table();
  const CUstream origin = body_->ops->stream(0);
  GRAPHSHARD_CALL(table, cuStreamBeginCapture, origin, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
  CUgraph graph = nullptr;
  try {
    run_external(calls, events, external_events, nodes);
  } catch (...) {
    if (table.cuStreamEndCapture(origin, &graph) == CUDA_SUCCESS && graph != nullptr) table.cuGraphDestroy(graph);
    throw;
  }
  const CUresult result = table.cuStreamEndCapture(origin, &graph);
  if (result != CUDA_SUCCESS) {
    if (graph != nullptr) table.cuGraphDestroy(graph);
    table.fail(result, "cuStreamEndCapture", "the end of " + std::to_string(size()) + " ops");
  }
  return graph;
}

void OpList::check_external(const ExternalEvents& external_events) const {
  for (const auto& [index, event] : external_events) {
    if (index >= size())
      throw std::invalid_argument("an external event stands after op " + std::to_string(index) + ", the list has " +
                                  std::to_string(size()));
    if (&event->driver() != &driver_) throw std::invalid_argument("an external event belongs to the list's driver");
  }
}

std::shared_ptr<Graph> OpList::capture(const std::shared_ptr<Calls>& calls, ExternalEvents external_events,
                                       double lock_timeout_s) {
  driver_.enter();
  const BoundOps& ops = *body_->ops;
  ops.check_calls(*calls, 0, size());
  CaptureState state{std::vector<bool>(ops.streams().size(), false), std::vector<bool>(ops.num_events(), false)};
  state.joined[0] = true;
  ops.check_joined(state, 0, size());
  check_external(external_events);
  std::stable_sort(external_events.begin(), external_events.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  auto owners = std::make_unique<GraphOwners>(driver_, ops.num_events());
  owners->others = ops.hold_collectives();
  owners->others.insert(owners->others.end(), {calls, body_->ops});
  for (const auto& [index, event] : external_events) owners->others.push_back(event);
  NodeSpans nodes(driver_.table(), ops.stream(0));
  CUgraph graph = nullptr;
  {
    const CaptureLock lock(lock_timeout_s);
    const CapturingStreams capturing(ops.streams());
    graph = record(*calls, owners->events.data(), external_events, nodes);
  }
  return std::make_shared<Graph>(driver_, graph, std::move(owners), std::move(nodes.spans));
}

std::shared_ptr<Recording> OpList::recording() const {
  driver_.enter();
  return std::make_shared<Recording>(body_->ops);
}

}  // namespace graphshard
