#include "runtime/op_list.h"

#include <algorithm>

#include "runtime/capture_lock.h"

namespace graphshard {

namespace {

// Marks the streams of a capture for its duration, so that no other thread's work ends up in the graph.
class CapturingStreams {
 public:
  explicit CapturingStreams(const std::vector<std::shared_ptr<StreamHandle>>& streams) : streams_(streams) {
    for (const auto& stream : streams_) stream->is_capturing.store(true);
  }
  ~CapturingStreams() {
    for (const auto& stream : streams_) stream->is_capturing.store(false);
  }
  CapturingStreams(const CapturingStreams&) = delete;
  CapturingStreams& operator=(const CapturingStreams&) = delete;

 private:
  const std::vector<std::shared_ptr<StreamHandle>>& streams_;
};

CUresult copy_2d(const Table& table, const Op& op, CUstream stream) {
  CUDA_MEMCPY2D copy{};
  copy.srcMemoryType = CU_MEMORYTYPE_UNIFIED;
  copy.srcDevice = op.source;
  copy.srcPitch = op.source_pitch;
  copy.dstMemoryType = CU_MEMORYTYPE_UNIFIED;
  copy.dstDevice = op.destination;
  copy.dstPitch = op.destination_pitch;
  copy.WidthInBytes = op.num_bytes;
  copy.Height = op.rows;
  return table.cuMemcpy2DAsync(&copy, stream);
}

inline CUresult enqueue(const Table& table, const Op& op, CUstream stream, const CUevent* events,
                        const Calls::Entry* calls) {
  switch (op.kind) {
    case OpKind::kRecord:
      return table.cuEventRecord(events[op.index], stream);
    case OpKind::kWait:
      return table.cuStreamWaitEvent(stream, events[op.index], CU_EVENT_WAIT_DEFAULT);
    case OpKind::kCopy:
      return table.cuMemcpyAsync(op.destination, op.source, op.num_bytes, stream);
    case OpKind::kCopy2d:
      return copy_2d(table, op, stream);
    case OpKind::kCall:
      return table.cuLaunchHostFunc(stream, &Calls::run, const_cast<Calls::Entry*>(&calls[op.index]));
    case OpKind::kFill:
      return table.cuMemsetD8Async(op.destination, static_cast<unsigned char>(op.value), op.num_bytes, stream);
    case OpKind::kWriteValue:
      return table.cuStreamWriteValue32(stream, op.destination, op.value, CU_STREAM_WRITE_VALUE_DEFAULT);
    case OpKind::kWaitValue:
      return table.cuStreamWaitValue32(stream, op.source, op.value, CU_STREAM_WAIT_VALUE_GEQ);
  }
  return CUDA_ERROR_INVALID_VALUE;
}

// Bytes from the first to the last of a pitched block; SIZE_MAX where that overflows.
size_t pitched_bytes(size_t rows, size_t pitch, size_t row_bytes) {
  if (rows == 0 || row_bytes == 0) return 0;
  size_t bytes = 0;
  if (__builtin_mul_overflow(rows - 1, pitch, &bytes) || __builtin_add_overflow(bytes, row_bytes, &bytes)) {
    return SIZE_MAX;
  }
  return bytes;
}

}  // namespace

const char* entry_point(OpKind kind) {
  switch (kind) {
    case OpKind::kRecord:
      return "cuEventRecord";
    case OpKind::kWait:
      return "cuStreamWaitEvent";
    case OpKind::kCopy:
      return "cuMemcpyAsync";
    case OpKind::kCopy2d:
      return "cuMemcpy2DAsync";
    case OpKind::kCall:
      return "cuLaunchHostFunc";
    case OpKind::kFill:
      return "cuMemsetD8Async";
    case OpKind::kWriteValue:
      return "cuStreamWriteValue32";
    case OpKind::kWaitValue:
      return "cuStreamWaitValue32";
  }
  return "unknown op";
}

OpList::OpList(Driver& driver, const std::vector<std::shared_ptr<Stream>>& streams, size_t num_events,
               std::vector<Op> ops)
    : driver_(driver), num_events_(num_events), body_(std::make_shared<Body>()) {
  driver_.enter();
  if (streams.empty()) throw std::invalid_argument("an op list needs a stream: stream 0 is its origin");
  for (const auto& stream : streams) {
    if (&stream->driver() != &driver_) throw std::invalid_argument("an op list's streams belong to its own driver");
    body_->streams.push_back(stream->handle());
    streams_.push_back(stream->handle()->stream);
  }
  body_->ops = std::move(ops);
  for (size_t i = 0; i < body_->ops.size(); ++i) bind(body_->ops[i], i);
  auto& memories = body_->memories;
  std::sort(memories.begin(), memories.end());
  memories.erase(std::unique(memories.begin(), memories.end()), memories.end());
  body_->events = std::make_unique<EventSet>(driver_, num_events_);
}

OpList::~OpList() { driver_.retire(std::move(body_)); }

std::string OpList::where(size_t index) const {
  return "op " + std::to_string(index) + " of " + std::to_string(size()) + " on stream " +
         std::to_string(body_->ops[index].stream);
}

void OpList::bind(const Op& op, size_t index) {
  const char* entry = entry_point(op.kind);
  const auto keep = [&](std::shared_ptr<Mapping> memory) { body_->memories.push_back(std::move(memory)); };
  if (op.stream >= streams_.size()) {
    throw std::invalid_argument(where(index) + ": the list has " + std::to_string(streams_.size()) + " streams");
  }
  try {
    switch (op.kind) {
      case OpKind::kRecord:
      case OpKind::kWait:
        if (op.index >= num_events_) {
          throw std::invalid_argument(where(index) + ": event " + std::to_string(op.index) + ", the list has " +
                                      std::to_string(num_events_) + " events");
        }
        break;
      case OpKind::kCall:
        num_calls_ = std::max<size_t>(num_calls_, op.index + size_t{1});
        break;
      case OpKind::kCopy:
        keep(driver_.find_memory(op.destination, op.num_bytes, true, entry));
        keep(driver_.find_memory(op.source, op.num_bytes, false, entry));
        break;
      case OpKind::kCopy2d:
        keep(driver_.find_memory(op.destination, pitched_bytes(op.rows, op.destination_pitch, op.num_bytes), true,
                                 entry));
        keep(driver_.find_memory(op.source, pitched_bytes(op.rows, op.source_pitch, op.num_bytes), false, entry));
        break;
      case OpKind::kFill:
        keep(driver_.find_memory(op.destination, op.num_bytes, true, entry));
        break;
      case OpKind::kWriteValue:
        keep(find_word(driver_, op.destination, true, entry));
        break;
      case OpKind::kWaitValue:
        keep(find_word(driver_, op.source, false, entry));
        break;
    }
  } catch (const DriverError& error) {
    throw DriverError(error.entry_point(), error.code(), std::string(error.what()) + ", at " + where(index));
  }
}

void OpList::check_calls(const Calls& calls) const {
  if (calls.size() >= num_calls_) return;
  throw std::invalid_argument("the op list calls index " + std::to_string(num_calls_ - 1) + ", Calls has " +
                              std::to_string(calls.size()) + " functions");
}

void OpList::run(const Calls& calls, const CUevent* events, size_t begin, size_t end) const {
  const Table& table = driver_.table();
  const Op* ops = body_->ops.data();
  const CUstream* streams = streams_.data();
  const Calls::Entry* entries = calls.data();
  for (size_t i = begin; i < end; ++i) {
    const CUresult result = enqueue(table, ops[i], streams[ops[i].stream], events, entries);
    if (__builtin_expect(result != CUDA_SUCCESS, 0)) table.fail(result, entry_point(ops[i].kind), where(i));
  }
}

void OpList::issue(const std::shared_ptr<Calls>& calls, size_t begin, size_t end) {
  driver_.enter();
  check_calls(*calls);
  if (begin > end || end > size()) {
    throw std::invalid_argument("ops " + std::to_string(begin) + ".." + std::to_string(end) + " of " +
                                std::to_string(size()));
  }
  for (const auto& stream : body_->streams) check_not_capturing(*stream, "OpList.issue");
  std::shared_ptr<void> previous;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    if (body_->calls != calls) {
      previous = std::move(body_->calls);
      body_->calls = calls;
    }
    run(*calls, body_->events->data(), begin, end);
  }
  driver_.retire(std::move(previous));
}

bool OpList::event_done(size_t event) const {
  driver_.enter();
  if (event >= num_events_) throw std::out_of_range("event " + std::to_string(event));
  const CUresult result = driver_.table().cuEventQuery((*body_->events)[event]);
  if (result != CUDA_ERROR_NOT_READY) driver_.table().check(result, "cuEventQuery");
  return result == CUDA_SUCCESS;
}

bool OpList::wait_event(size_t event, int64_t timeout_ns) const {
  driver_.enter();
  if (event >= num_events_) throw std::out_of_range("event " + std::to_string(event));
  return driver_.wait_event((*body_->events)[event], timeout_ns);
}

void OpList::run_external(const Calls& calls, const CUevent* events, const ExternalEvents& external_events) const {
  const Table& table = driver_.table();
  size_t begin = 0;
  for (const auto& [index, event] : external_events) {
    run(calls, events, begin, index + 1);
    begin = index + 1;
    const CUresult result =
        table.cuEventRecordWithFlags(event->handle(), streams_[body_->ops[index].stream], CU_EVENT_RECORD_EXTERNAL);
    if (result != CUDA_SUCCESS) table.fail(result, "cuEventRecordWithFlags", where(index));
  }
  run(calls, events, begin, size());
}

// Note [a failed capture]: whatever fails, EndCapture is due on the origin: it frees every stream that has joined, and
// its error is only a consequence of the first one.
CUgraph OpList::record(const Calls& calls, const CUevent* events, const ExternalEvents& external_events) const {
  const Table& table = driver_.table();
  GRAPHSHARD_CALL(table, cuStreamBeginCapture, streams_[0], CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
  CUgraph graph = nullptr;
  try {
    run_external(calls, events, external_events);
  } catch (...) {
    if (table.cuStreamEndCapture(streams_[0], &graph) == CUDA_SUCCESS && graph != nullptr) table.cuGraphDestroy(graph);
    throw;
  }
  const CUresult result = table.cuStreamEndCapture(streams_[0], &graph);
  if (result != CUDA_SUCCESS) {
    if (graph != nullptr) table.cuGraphDestroy(graph);
    table.fail(result, "cuStreamEndCapture", "the end of " + std::to_string(size()) + " ops");
  }
  return graph;
}

// A driver runs an op on a stream outside the capture at once, eagerly, and leaves it out of the graph without a word;
// a wait for an event that was not recorded before it joins nothing.
void OpList::check_joined() const {
  std::vector<bool> joined(streams_.size(), false);
  std::vector<bool> recorded(num_events_, false);
  joined[0] = true;
  for (size_t i = 0; i < size(); ++i) {
    const Op& op = body_->ops[i];
    if (op.kind == OpKind::kWait && recorded[op.index]) joined[op.stream] = true;
    if (!joined[op.stream]) {
      throw DriverError(entry_point(op.kind), CUDA_ERROR_STREAM_CAPTURE_UNJOINED,
                        "capture refused: the stream of " + where(i) +
                            " has not joined it; let it wait for an event of the capture first");
    }
    if (op.kind == OpKind::kRecord) recorded[op.index] = true;
  }
}

std::shared_ptr<Graph> OpList::capture(const std::shared_ptr<Calls>& calls, ExternalEvents external_events,
                                       double lock_timeout_s) {
  driver_.enter();
  check_calls(*calls);
  check_joined();
  for (const auto& [index, event] : external_events) {
    if (index >= size())
      throw std::invalid_argument("an external event stands after op " + std::to_string(index) + ", the list has " +
                                  std::to_string(size()));
    if (&event->driver() != &driver_) throw std::invalid_argument("an external event belongs to the list's driver");
  }
  std::stable_sort(external_events.begin(), external_events.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  auto owners = std::make_unique<GraphOwners>(driver_, num_events_);
  owners->calls = calls;
  owners->streams = body_->streams;
  owners->memories = body_->memories;
  for (const auto& [index, event] : external_events) owners->external_events.push_back(event);
  CUgraph graph = nullptr;
  {
    const CaptureLock lock(lock_timeout_s);
    const CapturingStreams capturing(body_->streams);
    graph = record(*calls, owners->events.data(), external_events);
  }
  return std::make_shared<Graph>(driver_, graph, std::move(owners));
}

}  // namespace graphshard
