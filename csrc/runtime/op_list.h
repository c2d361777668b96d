// Bound ops, issued eagerly or under capture: one list, one loop, two modes.
#pragma once

#include "runtime/graph.h"
#include "runtime/stream.h"

namespace graphshard {

enum class OpKind : uint8_t { kRecord, kWait, kCopy, kCopy2d, kCall, kFill, kWriteValue, kWaitValue };

// The entry point that carries out a kind, for errors.
const char* entry_point(OpKind kind);

// One op, bound: all addresses absolute. Which fields count depends on the kind.
struct Op {
  OpKind kind = OpKind::kRecord;
  uint32_t stream = 0;
  uint32_t index = 0;  // of an event or a call
  uint32_t value = 0;  // of a fill or a value word
  CUdeviceptr destination = 0;
  CUdeviceptr source = 0;
  size_t num_bytes = 0;  // of a copy or a fill; a row's in a 2-D copy
  size_t rows = 0;
  size_t destination_pitch = 0;
  size_t source_pitch = 0;
};

class OpList {
 public:
  // Checks indices and addresses, and keeps streams and memory alive. Stream 0 is the origin.
  OpList(Driver& driver, const std::vector<std::shared_ptr<Stream>>& streams, size_t num_events, std::vector<Op> ops);
  ~OpList();

  size_t size() const { return body_->ops.size(); }
  void issue(const std::shared_ptr<Calls>& calls, size_t begin, size_t end);
  bool event_done(size_t event) const;
  bool wait_event(size_t event, int64_t timeout_ns) const;

  // After op `first` of the list, `second` is recorded on that op's stream by an external event node.
  using ExternalEvents = std::vector<std::pair<size_t, std::shared_ptr<Event>>>;
  std::shared_ptr<Graph> capture(const std::shared_ptr<Calls>& calls, ExternalEvents external_events,
                                 double lock_timeout_s);

 private:
  // What enqueued work uses; outlives the list until that work is over (Note [retired owners]).
  struct Body {
    std::vector<Op> ops;
    std::vector<std::shared_ptr<StreamHandle>> streams;
    std::vector<std::shared_ptr<Mapping>> memories;
    std::unique_ptr<EventSet> events;
    std::shared_ptr<Calls> calls;
  };

  void bind(const Op& op, size_t index);
  void check_calls(const Calls& calls) const;
  void check_joined() const;
  void run(const Calls& calls, const CUevent* events, size_t begin, size_t end) const;
  void run_external(const Calls& calls, const CUevent* events, const ExternalEvents& external_events) const;
  CUgraph record(const Calls& calls, const CUevent* events, const ExternalEvents& external_events) const;
  std::string where(size_t index) const;

  Driver& driver_;
  const size_t num_events_;
  std::shared_ptr<Body> body_;
  std::vector<CUstream> streams_;
  size_t num_calls_ = 0;
  std::mutex mutex_;
};

}  // namespace graphshard
