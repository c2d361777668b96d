// Graphs made by hand: nodes, their parameters, their edges.
#include <cstring>

#include "litmus.h"

using namespace graphshard::litmus;

namespace {

void add_one(void* number) { ++*static_cast<int*>(number); }

class Graph {
 public:
  Graph() { OK(cu.graph_create(&handle_, 0)); }
  ~Graph() { cu.graph_destroy(handle_); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  operator CUgraph() const { return handle_; }
  void run(CUstream stream) const {
    CUgraphExec exec = nullptr;
    OK(cu.graph_instantiate(&exec, handle_, 0));
    OK(cu.graph_launch(exec, stream));
    OK(cu.graph_exec_destroy(exec));
    OK(cu.stream_synchronize(stream));
  }

 private:
  CUgraph handle_ = nullptr;
};

CUDA_MEMCPY3D flat_copy(const Pinned& to, const Pinned& from) {
  CUDA_MEMCPY3D copy{};
  copy.srcMemoryType = CU_MEMORYTYPE_HOST;
  copy.srcHost = from.bytes();
  copy.dstMemoryType = CU_MEMORYTYPE_HOST;
  copy.dstHost = to.bytes();
  copy.srcPitch = from.size();
  copy.dstPitch = to.size();
  copy.WidthInBytes = from.size();
  copy.Height = 1;
  copy.Depth = 1;
  return copy;
}

CUgraphNode add_fill(CUgraph graph, const CUgraphNode* after, const Pinned& bytes, unsigned int value) {
  CUDA_MEMSET_NODE_PARAMS fill{};
  fill.dst = bytes.address();
  fill.value = value;
  fill.elementSize = 1;
  fill.width = bytes.size();
  fill.height = 1;
  CUgraphNode node = nullptr;
  OK(cu.graph_add_memset_node(&node, graph, after, after == nullptr ? 0 : 1, &fill, cu.context));
  return node;
}

CUgraphNode add_empty(CUgraph graph, const CUgraphNode* after) {
  CUgraphNode node = nullptr;
  OK(cu.graph_add_empty_node(&node, graph, after, after == nullptr ? 0 : 1));
  return node;
}

}  // namespace

LITMUS(nodes_added_by_hand_run_in_the_order_of_their_edges) {
  const Stream stream;
  const Graph graph;
  const Pinned from(64);
  const Pinned to(64);
  int count = 0;
  const CUgraphNode fill = add_fill(graph, nullptr, from, 7);
  const CUDA_MEMCPY3D copy = flat_copy(to, from);
  CUgraphNode copied = nullptr;
  OK(cu.graph_add_memcpy_node(&copied, graph, &fill, 1, &copy, cu.context));
  add_fill(graph, &copied, from, 8);
  const CUDA_HOST_NODE_PARAMS host{add_one, &count};
  CUgraphNode called = nullptr;
  OK(cu.graph_add_host_node(&called, graph, &copied, 1, &host));
  graph.run(stream);
  TRUE(to.is_all(7) && from.is_all(8));
  EQUAL(1, count);
  EQUAL(3, num_edges(graph));
}

LITMUS(nodes_say_what_they_were_given) {
  const Graph graph;
  const Pinned from(64);
  const Pinned to(64);
  int count = 0;
  const CUDA_MEMCPY3D copy = flat_copy(to, from);
  CUgraphNode node = nullptr;
  OK(cu.graph_add_memcpy_node(&node, graph, nullptr, 0, &copy, cu.context));
  CUDA_MEMCPY3D found_copy{};
  OK(cu.graph_memcpy_node_get_params(node, &found_copy));
  EQUAL(64, found_copy.WidthInBytes);
  EQUAL(1, found_copy.Height);
  TRUE(found_copy.srcHost == from.bytes() || found_copy.srcDevice == from.address());

  CUDA_MEMSET_NODE_PARAMS found_fill{};
  OK(cu.graph_memset_node_get_params(add_fill(graph, nullptr, to, 5), &found_fill));
  EQUAL(to.address(), found_fill.dst);
  EQUAL(5, found_fill.value);
  EQUAL(64, found_fill.width);

  const CUDA_HOST_NODE_PARAMS host{add_one, &count};
  OK(cu.graph_add_host_node(&node, graph, nullptr, 0, &host));
  CUDA_HOST_NODE_PARAMS found_host{};
  OK(cu.graph_host_node_get_params(node, &found_host));
  TRUE(found_host.fn == add_one && found_host.userData == &count);
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu.graph_memset_node_get_params(node, &found_fill));
}

LITMUS(value_operations_are_nodes) {
  const Stream stream;
  const Graph graph;
  const Latch word;
  CUstreamBatchMemOpParams ops[2] = {};
  ops[0].writeValue = {CU_STREAM_MEM_OP_WRITE_VALUE_32, word.address(), {7}, CU_STREAM_WRITE_VALUE_DEFAULT, 0};
  ops[1].waitValue = {CU_STREAM_MEM_OP_WAIT_VALUE_32, word.address(), {7}, CU_STREAM_WAIT_VALUE_EQ, 0};
  const CUDA_BATCH_MEM_OP_NODE_PARAMS batch{cu.context, 2, ops, 0};
  CUgraphNode node = nullptr;
  OK(cu.graph_add_batch_mem_op_node(&node, graph, nullptr, 0, &batch));
  CUDA_BATCH_MEM_OP_NODE_PARAMS found{};
  OK(cu.graph_batch_mem_op_node_get_params(node, &found));
  EQUAL(2, found.count);
  EQUAL(CU_STREAM_MEM_OP_WRITE_VALUE_32, found.paramArray[0].operation);
  EQUAL(word.address(), found.paramArray[1].waitValue.address);
  graph.run(stream);
  EQUAL(7, word.value());
}

LITMUS(event_nodes_can_be_added_by_hand) {
  const Stream stream;
  const Stream eager;
  const Graph graph;
  const Event awaited;
  const Event recorded;
  const Latch latch;
  CUgraphNode waiting = nullptr;
  CUgraphNode node = nullptr;
  OK(cu.graph_add_event_wait_node(&waiting, graph, nullptr, 0, awaited));
  OK(cu.graph_add_event_record_node(&node, graph, &waiting, 1, recorded));
  latch.stall(eager);
  OK(cu.event_record(awaited, eager));
  latch.set(1);
  graph.run(stream);
  OK(cu.event_query(recorded));
  OK(cu.stream_synchronize(eager));
}

LITMUS(edges_can_be_added_later_and_cycles_are_refused) {
  const Stream stream;
  const Graph graph;
  const Pinned bytes(64);
  const CUgraphNode later = add_fill(graph, nullptr, bytes, 2);
  const CUgraphNode earlier = add_fill(graph, nullptr, bytes, 1);
  OK(cu.graph_add_dependencies(graph, &earlier, &later, 1));
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu.graph_add_dependencies(graph, &earlier, &later, 1));
  for (int i = 0; i < 20; ++i) {
    graph.run(stream);
    TRUE(bytes.is_all(2));
  }
  OK(cu.graph_add_dependencies(graph, &later, &earlier, 1));
  CUgraphExec exec = nullptr;
  TRUE(cu.graph_instantiate(&exec, graph, 0) != CUDA_SUCCESS);
}

LITMUS(a_destroyed_node_takes_its_edges_along) {
  const Stream stream;
  const Graph graph;
  const CUgraphNode first = add_empty(graph, nullptr);
  const CUgraphNode second = add_empty(graph, &first);
  add_empty(graph, &second);
  EQUAL(2, num_edges(graph));
  OK(cu.graph_destroy_node(second));
  EQUAL(0, num_edges(graph));
  EQUAL(2, nodes_of(graph).size());
  graph.run(stream);
}

LITMUS(lists_follow_cudas_convention_of_counts) {
  const Graph graph;
  const CUgraphNode first = add_empty(graph, nullptr);
  const CUgraphNode second = add_empty(graph, &first);
  CUgraphNode nodes[4] = {first, first, first, first};
  size_t count = 4;
  OK(cu.graph_get_nodes(graph, nodes, &count));
  EQUAL(2, count);
  TRUE(nodes[2] == nullptr && nodes[3] == nullptr);
  CUgraphNode from = nullptr;
  CUgraphNode to = nullptr;
  count = 1;
  OK(cu.graph_get_edges(graph, &from, &to, &count));
  TRUE(from == first && to == second);
  if (cu.graph_get_edges_v2 == nullptr) return;
  CUgraphEdgeData edge{};
  OK(cu.graph_get_edges_v2(graph, &from, &to, &edge, &count));
  EQUAL(0, edge.type);
}

LITMUS(a_graph_is_instantiated_with_params) {
  const Stream stream;
  const Graph graph;
  const Pinned bytes(64);
  add_fill(graph, nullptr, bytes, 6);
  CUDA_GRAPH_INSTANTIATE_PARAMS params{};
  CUgraphExec exec = nullptr;
  OK(cu.graph_instantiate_with_params(&exec, graph, &params));
  EQUAL(CUDA_GRAPH_INSTANTIATE_SUCCESS, params.result_out);
  add_fill(graph, nullptr, bytes, 9);  // the exec is a copy: what is added later is not in it
  OK(cu.graph_launch(exec, stream));
  OK(cu.stream_synchronize(stream));
  TRUE(bytes.is_all(6));
  OK(cu.graph_exec_destroy(exec));
}

HOST_LITMUS(a_stand_in_kernel_runs_in_order_and_is_a_kernel_node) {
  const Stream stream;
  const Pinned bytes(64);
  int count = 0;
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu.host_launch_kernel(stream, nullptr, nullptr));
  OK(cu.host_launch_kernel(stream, add_one, &count));
  OK(cu.stream_synchronize(stream));
  EQUAL(1, count);
  const Captured captured(stream, [&] {
    OK(cu.memset_8_async(bytes.address(), 1, 64, stream));
    OK(cu.host_launch_kernel(stream, add_one, &count));
    OK(cu.memset_8_async(bytes.address(), 2, 64, stream));
  });
  EQUAL(1, num_nodes(captured.graph(), CU_GRAPH_NODE_TYPE_KERNEL));
  EQUAL(2, num_edges(captured.graph()));
  for (const Order& order : all_orders(2)) {
    captured.set_executor(order.executor, order.seed);
    captured.launch(stream);
    OK(cu.stream_synchronize(stream));
  }
  EQUAL(1 + all_orders(2).size(), count);
  TRUE(bytes.is_all(2));
}
