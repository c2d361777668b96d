// A captured graph and its executable form.
#pragma once

#include <string>
#include <utility>

#include "runtime/op_observer.h"
#include "runtime/stream.h"

namespace graphshard {

// Arguments are frozen at capture, so whatever they point at belongs to the graph.
struct GraphOwners {
  GraphOwners(Driver& driver, size_t num_events) : events(driver, num_events) {}

  EventSet events;  // of this capture alone: an event of one capture may not be used in another
  std::vector<std::shared_ptr<const void>> others;
};

class GraphExec : public std::enable_shared_from_this<GraphExec> {
 public:
  ~GraphExec();

  void launch(Stream& stream);
  void upload(Stream& stream);

 private:
  friend class Graph;
  // Destroyed before what it points at: members die in reverse order.
  struct Body {
    explicit Body(Driver& driver_in) : driver(driver_in) {}
    ~Body();

    Driver& driver;
    std::shared_ptr<GraphOwners> owners;
    CUgraphExec exec = nullptr;
  };

  explicit GraphExec(std::shared_ptr<Body> body) : body_(std::move(body)) {}

  std::shared_ptr<Body> body_;
};

class Graph {
 public:
  Graph(Driver& driver, CUgraph graph, std::shared_ptr<GraphOwners> owners, std::vector<NodeSpan> spans = {});
  // Somebody else's graph, never destroyed here; `owner` keeps it and all that it points at, for its executables too.
  static std::shared_ptr<Graph> from_handle(Driver& driver, CUgraph handle, std::shared_ptr<const void> owner);
  ~Graph();

  CUgraph handle() const { return body_->graph; }
  // Which nodes are which op's; empty if the graph was captured by somebody else.
  const std::vector<NodeSpan>& spans() const { return spans_; }
  std::vector<std::pair<std::string, size_t>> num_nodes() const;
  // `executor` is "", "cooperative" or "threaded"; both it and `seed` only mean something on the host driver.
  std::shared_ptr<GraphExec> instantiate(const std::string& executor, int64_t seed) const;

 private:
  struct Body {
    ~Body();

    Driver& driver;
    CUgraph graph;
    std::shared_ptr<GraphOwners> owners;
    bool is_foreign = false;
  };

  std::shared_ptr<Body> body_;
  const std::vector<NodeSpan> spans_;
};

}  // namespace graphshard
