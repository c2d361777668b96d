// Who watches ops while they are handed to the driver: a trace of eager issues, and the nodes of a capture.
#pragma once

#include <vector>

#include "runtime/op.h"

namespace graphshard {

class OpObserver {
 public:
  virtual ~OpObserver() = default;
  // A run of ops begins; others may have enqueued work before it.
  virtual void begin() {}
  // The driver (or the collective) took op `index`.
  virtual void accepted(size_t index, const Op& op) = 0;
};

// Indices of ops in the order in which they were taken.
class OpTrace final : public OpObserver {
 public:
  void accepted(size_t index, const Op& /*op*/) override { indices.push_back(index); }

  std::vector<size_t> indices;
};

// Nodes `[begin, end)` of a captured graph, in the order of their creation, appeared while op `op` was issued.
struct NodeSpan {
  size_t op;
  uint32_t stream;
  size_t begin;
  size_t end;
};

// Counts a capture's nodes before and after each op, so that a node can be told to be an op's own, whatever a library
// makes of a collective. The graph of an open capture may be asked; it must not be changed.
class NodeSpans final : public OpObserver {
 public:
  NodeSpans(const Table& table, CUstream origin) : table_(table), origin_(origin) {}

  void begin() override {
    CUstreamCaptureStatus status{};
    GRAPHSHARD_CALL(table_, cuStreamGetCaptureInfo, origin_, &status, nullptr, &graph_, nullptr, nullptr);
    num_nodes_ = count();
  }

  void accepted(size_t index, const Op& op) override {
    const size_t before = num_nodes_;
    num_nodes_ = count();
    if (num_nodes_ > before) spans.push_back({index, op.stream, before, num_nodes_});
  }

  std::vector<NodeSpan> spans;

 private:
  size_t count() const {
    size_t num_nodes = 0;
    GRAPHSHARD_CALL(table_, cuGraphGetNodes, graph_, nullptr, &num_nodes);
    return num_nodes;
  }

  const Table& table_;
  const CUstream origin_;
  CUgraph graph_ = nullptr;
  size_t num_nodes_ = 0;
};

}  // namespace graphshard
