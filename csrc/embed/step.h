// A captured step as a server drives it: replayed on streams of the server's, ordered with the steps that share slots.
#pragma once

#include <optional>

#include "runtime/control_page.h"
#include "runtime/memory.h"
#include "runtime/op_list.h"
#include "runtime/word.h"

namespace graphshard {

// What cannot be done now, and would be right at another time.
class StateError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class NotFoundError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class TimeoutError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// What a host function of a step left behind.
class CallError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// What steps over the same slots share: their last use, and what the slots hold, by numbers that the maker of the steps
// chooses (0: nothing that can be relied on).
class StepOrder : public std::enable_shared_from_this<StepOrder> {
 public:
  explicit StepOrder(Driver& driver) : last_use(driver, false), arrived(driver, false) {}

  void forget() {
    const std::lock_guard<std::mutex> guard(mutex);
    held = 0;
  }
  // Somebody else used the slots on `stream`: what is replayed from now on comes after that, and relies on nothing.
  void leave(Stream& stream) {
    const std::lock_guard<std::mutex> guard(mutex);
    stream.record(last_use);
    was_used = true;
    armed.reset();
    held = 0;
  }
  // Until the last replay, and the last prefetch, have ended; false if `timeout_ns` passed first.
  bool wait(int64_t timeout_ns) {
    bool has_replay = false;
    bool has_prefetch = false;
    {
      const std::lock_guard<std::mutex> guard(mutex);
      has_replay = was_used;
      has_prefetch = has_arrived;
    }
    return (!has_replay || last_use.wait(timeout_ns)) && (!has_prefetch || arrived.wait(timeout_ns));
  }
  uint64_t replays() {
    const std::lock_guard<std::mutex> guard(mutex);
    return num_replays;
  }
  // Replays and prefetches: each changes what the slots hold.
  uint64_t uses() {
    const std::lock_guard<std::mutex> guard(mutex);
    return num_replays + num_prefetches;
  }

  std::mutex mutex;           // guards all below
  Event last_use;             // recorded after each replay
  Event arrived;              // recorded after each prefetch
  bool was_used = false;      // `last_use` was recorded
  std::optional<Word> armed;  // the word that speaks of the latest replay; none: `last_use` does
  bool has_arrived = false;   // so was `arrived`
  bool is_in_flight = false;  // no replay has waited for `arrived` since
  uint64_t held = 0;
  uint64_t num_replays = 0;
  uint64_t num_prefetches = 0;
  uint64_t num_over = 0;  // replays that are known to be over
};

struct NamedBuffer {
  std::string name;
  CUdeviceptr address;
  size_t num_bytes;
};

struct StepParts {
  std::shared_ptr<GraphExec> exec;
  std::shared_ptr<Stream> stream;  // the capture's origin
  int64_t batch_size = 1;
  int64_t tokens_per_sequence = 1;
  std::vector<NamedBuffer> inputs;
  std::vector<NamedBuffer> outputs;
  std::shared_ptr<Calls> calls;      // for what they left; may be null
  std::shared_ptr<StepOrder> order;  // null: of its own
  std::shared_ptr<OpList> prefetch;  // null: none
  std::shared_ptr<Stream> prefetch_stream;
  uint64_t entry = 0;
  uint64_t exit = 0;
  std::optional<Word> done;           // the graph writes 1 to it when outputs may be read
  std::shared_ptr<ControlPage> page;  // for the epoch; may be null
  std::string transport;              // what gathers, as errors say it; empty: unknown
  bool needs_peers = false;           // a gather ends only when all ranks replay the step
  std::vector<std::shared_ptr<const void>> others;
};

class Step {
 public:
  explicit Step(StepParts parts);

  const StepParts& parts() const { return parts_; }
  void replay(CUstream stream);
  // False if `timeout_ns` passed first. CallError if a host function failed.
  bool wait(int64_t timeout_ns);
  void prefetch();
  bool wait_prefetch(int64_t timeout_ns) const;
  void upload(CUstream stream);
  uint64_t epoch() const { return parts_.page == nullptr ? 0 : parts_.page->epoch(); }

 private:
  Driver& driver() const { return parts_.stream->driver(); }
  std::shared_ptr<Stream> stream_of(CUstream handle);
  void refuse_while_written(const char* what) const;
  void begin_prefetch();
  void enter(Stream& stream);
  bool is_latest_over() const;
  bool arm_done();
  void check_buffers(const std::vector<NamedBuffer>& buffers) const;
  void check_drivers() const;
  void check_prefetch() const;

  StepParts parts_;
  std::shared_ptr<Calls> no_calls_;
  std::shared_ptr<Event> finished_;  // recorded after each replay that `done` does not speak of
  std::shared_ptr<Stream> other_;    // the last stream that was not the capture's
  uint64_t number_ = 0;              // of the latest replay, among the order's; 0: none
  bool is_done_armed_ = false;       // `done` speaks of this step's latest replay
};

}  // namespace graphshard
