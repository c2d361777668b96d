// Bound ops, issued eagerly or under capture: one list, one loop, two modes.
#pragma once

#include "runtime/bound_ops.h"
#include "runtime/graph.h"

namespace graphshard {

class Recording;

class OpList : public std::enable_shared_from_this<OpList> {
 public:
  // As BoundOps.
  OpList(Driver& driver, const BoundOps::Streams& streams, size_t num_events, std::vector<Op> ops,
         BoundOps::Collectives collectives = {});
  ~OpList();

  size_t size() const { return body_->ops->size(); }
  const BoundOps& ops() const { return *body_->ops; }
  void issue(const std::shared_ptr<Calls>& calls, size_t begin, size_t end);
  // From now on (or no more) `issue` notes the ops that were taken; off by default, since it costs an allocation.
  void set_trace(bool is_on);
  // What was noted since tracing began or was last asked, by index of the op; forgotten then.
  std::vector<size_t> take_trace();
  bool event_done(size_t event) const;
  bool wait_event(size_t event, int64_t timeout_ns) const;

  // After op `first` of the list, `second` is recorded on that op's stream by an external event node.
  using ExternalEvents = std::vector<std::pair<size_t, std::shared_ptr<Event>>>;
  std::shared_ptr<Graph> capture(const std::shared_ptr<Calls>& calls, ExternalEvents external_events,
                                 double lock_timeout_s);
  // For captures that somebody else opens.
  std::shared_ptr<Recording> recording() const;

 private:
  // What enqueued work uses; outlives the list until that work is over (Note [retired owners]).
  struct Body {
    Body(std::shared_ptr<const BoundOps> ops_in) : ops(std::move(ops_in)), events(ops->driver(), ops->num_events()) {}

    std::shared_ptr<const BoundOps> ops;
    EventSet events;
    std::shared_ptr<Calls> calls;
  };

  CUevent event(size_t index) const;
  void check_external(const ExternalEvents& external_events) const;
  void run_external(const Calls& calls, const CUevent* events, const ExternalEvents& external_events,
                    NodeSpans& nodes) const;
  CUgraph record(const Calls& calls, const CUevent* events, const ExternalEvents& external_events,
                 NodeSpans& nodes) const;

  Driver& driver_;
  std::shared_ptr<Body> body_;
  std::unique_ptr<OpTrace> trace_;
  std::mutex mutex_;
};

}  // namespace graphshard
