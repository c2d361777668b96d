#include "embed/step.h"

#include <set>

namespace graphshard {

Step::Step(StepParts parts) : parts_(std::move(parts)) {
  if (parts_.exec == nullptr || parts_.stream == nullptr) {
    throw std::invalid_argument("a step needs its graph and the stream that it was captured from");
  }
  if (parts_.batch_size < 1 || parts_.tokens_per_sequence < 1) {
    throw std::invalid_argument("step shape " + std::to_string(parts_.batch_size) + "x" +
                                std::to_string(parts_.tokens_per_sequence) + ": both numbers start at 1");
  }
  if ((parts_.prefetch == nullptr) != (parts_.prefetch_stream == nullptr)) {
    throw std::invalid_argument("a step with a prefetch list needs its stream, and the other way round");
  }
  check_buffers(parts_.inputs);
  check_buffers(parts_.outputs);
  check_drivers();
  if (parts_.order == nullptr) parts_.order = std::make_shared<StepOrder>(driver());
  no_calls_ = std::make_shared<Calls>(std::vector<std::pair<Calls::Function, void*>>{}, std::make_shared<CallErrors>(),
                                      nullptr);
  check_prefetch();
  finished_ = std::make_shared<Event>(driver(), false);
}

void Step::check_buffers(const std::vector<NamedBuffer>& buffers) const {
  std::set<std::string> names;
  for (const NamedBuffer& buffer : buffers) {
    if (buffer.name.empty() || buffer.address == 0) {
      throw std::invalid_argument("a step's buffer '" + buffer.name + "' needs a name and an address");
    }
    if (!names.insert(buffer.name).second) {
      throw std::invalid_argument("two of a step's inputs, or of its outputs, are called '" + buffer.name + "'");
    }
  }
}

// Events and words of one driver mean nothing to another.
void Step::check_drivers() const {
  const auto check = [&](const Driver& other, const char* what) {
    if (&other == &driver()) return;
    throw std::invalid_argument(std::string(what) + " is of driver " + other.path() + ", the step's is " +
                                driver().path());
  };
  if (parts_.order != nullptr) check(parts_.order->last_use.driver(), "the order");
  if (parts_.done.has_value()) check(parts_.done->driver(), "the word");
  if (parts_.prefetch != nullptr) check(parts_.prefetch->ops().driver(), "the prefetch list");
}

// What would be found at the first replay, or never: the end of a prefetch is an event on its one stream.
void Step::check_prefetch() const {
  if (parts_.prefetch == nullptr) return;
  const BoundOps& ops = parts_.prefetch->ops();
  if (ops.streams().size() != 1) {
    throw std::invalid_argument("a prefetch list has one stream, not " + std::to_string(ops.streams().size()));
  }
  if (ops.streams()[0] != parts_.prefetch_stream->handle()) {
    throw std::invalid_argument("a prefetch list's stream is the step's prefetch stream");
  }
  ops.check_calls(*no_calls_, 0, ops.size());
}

// Looked up once, not for each replay.
std::shared_ptr<Stream> Step::stream_of(CUstream handle) {
  if (handle == parts_.stream->handle()->stream) return parts_.stream;
  if (other_ == nullptr || other_->handle()->stream != handle) other_ = Stream::share(driver(), handle);
  return other_;
}

// With the order's mutex.
void Step::begin_prefetch() {
  StepOrder& order = *parts_.order;
  if (parts_.entry == 0 || order.held == parts_.entry) return;
  if (parts_.prefetch == nullptr) {
    throw StateError("the step expects state " + std::to_string(parts_.entry) + " in its slots, which hold " +
                     std::to_string(order.held) + " (0: nothing), and it has no prefetch list to bring it");
  }
  order.held = 0;  // until all of it is enqueued
  ++order.num_prefetches;
  if (order.was_used) parts_.prefetch_stream->wait(order.last_use);
  parts_.prefetch->issue(no_calls_, 0, parts_.prefetch->size());
  parts_.prefetch_stream->record(order.arrived);
  order.has_arrived = order.is_in_flight = true;
  order.held = parts_.entry;
}

// With the order's mutex, so that whoever makes the epoch odd and then takes the mutex knows of all that went before.
void Step::refuse_while_written(const char* what) const {
  if (epoch() % 2 == 0) return;
  throw StateError("the weights are being written (epoch " + std::to_string(epoch()) + "); " + what +
                   " when the epoch is even");
}

void Step::prefetch() {
  driver().enter();
  const std::lock_guard<std::mutex> guard(parts_.order->mutex);
  refuse_while_written("prefetch");
  if (parts_.prefetch != nullptr) begin_prefetch();
}

bool Step::wait_prefetch(int64_t timeout_ns) const {
  {
    const std::lock_guard<std::mutex> guard(parts_.order->mutex);
    if (!parts_.order->has_arrived) return true;
  }
  return parts_.order->arrived.wait(timeout_ns);
}

// With the order's mutex: `stream` comes after all that the slots were used for, and the slots hold what is expected.
void Step::enter(Stream& stream) {
  StepOrder& order = *parts_.order;
  refuse_while_written("replay");
  begin_prefetch();
  if (order.was_used) stream.wait(order.last_use);
  if (order.is_in_flight) stream.wait(order.arrived);
  order.is_in_flight = false;
}

bool Step::is_latest_over() const {
  const StepOrder& order = *parts_.order;
  if (!order.was_used) return true;
  return order.armed.has_value() ? order.armed->load() != 0 : order.last_use.is_done();
}

// The word is cleared by the host, and all steps of an order may write to one, so it can speak of one replay at a time:
// while an earlier one may still set it, this replay is waited for by an event, which comes after a tail prefetch.
bool Step::arm_done() {
  StepOrder& order = *parts_.order;
  const bool is_armed = parts_.done.has_value() && is_latest_over();
  order.armed.reset();
  if (!is_armed) return false;
  order.num_over = order.num_replays;  // whoever waits for one of them need not look at the word
  parts_.done->store(0);
  order.armed.emplace(*parts_.done);
  return true;
}

void Step::replay(CUstream handle) {
  driver().enter();
  StepOrder& order = *parts_.order;
  const std::lock_guard<std::mutex> guard(order.mutex);
  const std::shared_ptr<Stream> stream = stream_of(handle);
  enter(*stream);
  order.held = 0;  // until it is launched
  const bool is_armed = arm_done();
  try {
    parts_.exec->launch(*stream);
  } catch (...) {
    order.armed.reset();  // nobody will write to it
    throw;
  }
  stream->record(order.last_use);
  order.was_used = true;
  is_done_armed_ = is_armed;
  if (!is_armed) stream->record(*finished_);
  order.held = parts_.exit;
  number_ = ++order.num_replays;
}

bool Step::wait(int64_t timeout_ns) {
  bool is_done_armed = false;
  bool is_known_over = false;
  {
    const std::lock_guard<std::mutex> guard(parts_.order->mutex);
    if (number_ == 0) throw StateError("the step was not replayed yet, so there is nothing to wait for");
    is_known_over = number_ <= parts_.order->num_over;
    is_done_armed = is_done_armed_;
  }
  const bool is_over =
      is_known_over || (is_done_armed ? parts_.done->wait(1, timeout_ns) : finished_->wait(timeout_ns));
  if (!is_over || parts_.calls == nullptr) return is_over;
  try {
    parts_.calls->check();
  } catch (const std::exception& error) {
    throw CallError(std::string("a host function of the step failed: ") + error.what());
  }
  return true;
}

void Step::upload(CUstream handle) {
  driver().enter();
  const std::lock_guard<std::mutex> guard(parts_.order->mutex);
  parts_.exec->upload(*stream_of(handle));
}

}  // namespace graphshard
