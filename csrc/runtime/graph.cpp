#include "runtime/graph.h"

namespace graphshard {

namespace {

const char* kind_name(CUgraphNodeType type) {
  switch (type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
      return "kernel";
    case CU_GRAPH_NODE_TYPE_MEMCPY:
      return "memcpy";
    case CU_GRAPH_NODE_TYPE_MEMSET:
      return "memset";
    case CU_GRAPH_NODE_TYPE_HOST:
      return "host";
    case CU_GRAPH_NODE_TYPE_GRAPH:
      return "graph";
    case CU_GRAPH_NODE_TYPE_EMPTY:
      return "empty";
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
      return "event_wait";
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
      return "event_record";
    case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
      return "batch_mem_op";
    default:
      return "other";
  }
}

// The host driver's number for an executor.
int executor_number(const std::string& executor) {
  if (executor.empty() || executor == "cooperative") return 0;
  if (executor == "threaded") return 1;
  throw std::invalid_argument("executor '" + executor + "' is unknown: cooperative, threaded");
}

}  // namespace

Graph::Graph(Driver& driver, CUgraph graph, std::shared_ptr<GraphOwners> owners, std::vector<NodeSpan> spans)
    : body_(new Body{driver, graph, std::move(owners)}), spans_(std::move(spans)) {}

std::shared_ptr<Graph> Graph::from_handle(Driver& driver, CUgraph handle, std::shared_ptr<const void> owner) {
  if (handle == nullptr) throw std::invalid_argument("a graph's handle is 0");
  auto owners = std::make_shared<GraphOwners>(driver, 0);
  owners->others.push_back(std::move(owner));
  auto graph = std::make_shared<Graph>(driver, handle, std::move(owners));
  graph->body_->is_foreign = true;
  return graph;
}

Graph::~Graph() {
  Driver& driver = body_->driver;
  driver.retire(std::move(body_));
}

Graph::Body::~Body() {
  if (driver.is_usable() && !is_foreign) driver.table().cuGraphDestroy(graph);
}

std::vector<std::pair<std::string, size_t>> Graph::num_nodes() const {
  Driver& driver = body_->driver;
  driver.enter();
  size_t num_nodes = 0;
  GRAPHSHARD_CALL(driver.table(), cuGraphGetNodes, body_->graph, nullptr, &num_nodes);
  std::vector<CUgraphNode> nodes(num_nodes);
  if (num_nodes > 0) GRAPHSHARD_CALL(driver.table(), cuGraphGetNodes, body_->graph, nodes.data(), &num_nodes);
  std::map<std::string, size_t> by_kind;
  for (CUgraphNode node : nodes) {
    CUgraphNodeType type{};
    GRAPHSHARD_CALL(driver.table(), cuGraphNodeGetType, node, &type);
    ++by_kind[kind_name(type)];
  }
  return {by_kind.begin(), by_kind.end()};
}

std::shared_ptr<GraphExec> Graph::instantiate(const std::string& executor, int64_t seed) const {
  Driver& driver = body_->driver;
  driver.enter();
  const Table& table = driver.table();
  const int number = executor_number(executor);
  const bool has_choice = table.gshost_graph_exec_set_executor != nullptr;
  if (!has_choice && (!executor.empty() || seed != -1)) {
    throw std::invalid_argument("executor and seed are the host driver's, " + driver.path() + " has no choice of them");
  }
  auto body = std::make_shared<GraphExec::Body>(driver);
  body->owners = body_->owners;
  GRAPHSHARD_CALL(table, cuGraphInstantiateWithFlags, &body->exec, body_->graph, 0);
  if (has_choice) GRAPHSHARD_CALL(table, gshost_graph_exec_set_executor, body->exec, number, seed);
  return std::shared_ptr<GraphExec>(new GraphExec(std::move(body)));
}

GraphExec::Body::~Body() {
  if (exec != nullptr && driver.is_usable()) driver.table().cuGraphExecDestroy(exec);
}

GraphExec::~GraphExec() {
  Driver& driver = body_->driver;
  driver.retire(std::move(body_));
}

void GraphExec::launch(Stream& stream) {
  body_->driver.enter();
  check_not_capturing(*stream.handle(), "cuGraphLaunch");
  GRAPHSHARD_CALL(body_->driver.table(), cuGraphLaunch, body_->exec, stream.handle()->stream);
}

void GraphExec::upload(Stream& stream) {
  body_->driver.enter();
  check_not_capturing(*stream.handle(), "cuGraphUpload");
  GRAPHSHARD_CALL(body_->driver.table(), cuGraphUpload, body_->exec, stream.handle()->stream);
}

}  // namespace graphshard
