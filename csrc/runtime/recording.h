// A list's ops inside a capture that somebody else has opened and will end: torch's, or a test's.
#pragma once

#include "runtime/bound_ops.h"
#include "runtime/graph.h"

namespace graphshard {

// Of one capture: it has events of its own, since an event of one capture may not be used in another. Whoever keeps the
// graph keeps the Recording too: the graph points at what it owns.
class Recording {
 public:
  explicit Recording(std::shared_ptr<const BoundOps> ops);
  ~Recording();

  // Issues ops on streams of the capture that is open on stream 0. The capture lock is held by whoever opened it.
  // After a failure the capture is lost; ending it is due all the same.
  void issue(const std::shared_ptr<Calls>& calls, size_t begin, size_t end);
  size_t size() const { return ops_->size(); }
  // Which nodes of the capture's graph are which op's; nodes in between are of those who opened it.
  const std::vector<NodeSpan>& spans() const { return nodes_.spans; }

 private:
  void check_open();
  CaptureState joined_now() const;

  std::shared_ptr<const BoundOps> ops_;
  std::shared_ptr<GraphOwners> owners_;
  std::vector<bool> recorded_;
  cuuint64_t capture_id_ = 0;
  NodeSpans nodes_;
  std::mutex mutex_;
};

}  // namespace graphshard
