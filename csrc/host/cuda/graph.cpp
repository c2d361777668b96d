#include "graph.h"

#include <algorithm>
#include <functional>
#include <queue>

#include "guard.h"

using graphshard::hostcuda::Work;

CUgraphNode CUgraph_st::add(Work work, const std::vector<CUgraphNode>& dependencies, uint32_t lane) {
  auto node = std::make_unique<CUgraphNode_st>();
  node->graph = this;
  node->index = nodes.size();
  node->lane = lane;
  node->work = std::move(work);
  node->dependencies = dependencies;
  for (CUgraphNode dependency : dependencies) dependency->dependents.push_back(node.get());
  nodes.push_back(std::move(node));
  return nodes.back().get();
}

std::vector<bool> CUgraph_st::ancestors(const std::vector<CUgraphNode>& from) const {
  std::vector<bool> reached(nodes.size(), false);
  std::vector<CUgraphNode> open = from;
  while (!open.empty()) {
    CUgraphNode node = open.back();
    open.pop_back();
    if (reached[node->index]) continue;
    reached[node->index] = true;
    open.insert(open.end(), node->dependencies.begin(), node->dependencies.end());
  }
  return reached;
}

std::vector<size_t> CUgraph_st::topological_order() const {
  std::priority_queue<size_t, std::vector<size_t>, std::greater<>> ready;
  std::vector<size_t> missing(nodes.size());
  for (const auto& node : nodes) {
    missing[node->index] = node->dependencies.size();
    if (node->dependencies.empty()) ready.push(node->index);
  }
  std::vector<size_t> order;
  order.reserve(nodes.size());
  while (!ready.empty()) {
    const size_t index = ready.top();
    ready.pop();
    order.push_back(index);
    for (CUgraphNode dependent : nodes[index]->dependents) {
      if (--missing[dependent->index] == 0) ready.push(dependent->index);
    }
  }
  return order;
}

namespace graphshard::hostcuda {

namespace {

struct Edge {
  CUgraphNode from;
  CUgraphNode to;
};

/// CUDA's convention for lists: without an array the count, else at most `*count` entries and how many there were.
/// Room beyond the last entry is filled with null.
CUresult give_nodes(const std::vector<CUgraphNode>& all, CUgraphNode* out, CUgraphEdgeData* edges, size_t* count) {
  if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (out != nullptr) {
    for (size_t i = 0; i < *count; ++i) out[i] = i < all.size() ? all[i] : nullptr;
    for (size_t i = 0; edges != nullptr && i < std::min(*count, all.size()); ++i) edges[i] = CUgraphEdgeData{};
    *count = std::min(*count, all.size());
    return CUDA_SUCCESS;
  }
  *count = all.size();
  return CUDA_SUCCESS;
}

std::vector<CUgraphNode> all_nodes(CUgraph graph, bool roots_only) {
  std::vector<CUgraphNode> all;
  for (const auto& node : graph->nodes) {
    if (!roots_only || node->dependencies.empty()) all.push_back(node.get());
  }
  return all;
}

bool has_edge(CUgraphNode from, CUgraphNode to) {
  const auto& dependencies = to->dependencies;
  return std::find(dependencies.begin(), dependencies.end(), from) != dependencies.end();
}

void erase_one(std::vector<CUgraphNode>* nodes, CUgraphNode node) {
  nodes->erase(std::find(nodes->begin(), nodes->end(), node));
}

CUresult check_edges(CUgraph graph, const CUgraphNode* from, const CUgraphNode* to, size_t count, bool exist) {
  GS_RETURN_IF_ERROR(enter());
  if (graph == nullptr || (count != 0 && (from == nullptr || to == nullptr))) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < count; ++i) {
    if (from[i] == nullptr || to[i] == nullptr || from[i] == to[i]) return CUDA_ERROR_INVALID_VALUE;
    if (from[i]->graph != graph || to[i]->graph != graph) return CUDA_ERROR_INVALID_VALUE;
    if (has_edge(from[i], to[i]) != exist) return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

}  // namespace

CUresult graph_create(CUgraph* graph, unsigned int flags) {
  GS_RETURN_IF_ERROR(enter());
  if (graph == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  *graph = new CUgraph_st;
  return CUDA_SUCCESS;
}

CUresult graph_destroy(CUgraph graph) {
  GS_RETURN_IF_ERROR(enter());
  if (graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
  delete graph;
  return CUDA_SUCCESS;
}

CUresult graph_get_nodes(CUgraph graph, CUgraphNode* nodes, size_t* num_nodes) {
  GS_RETURN_IF_ERROR(enter());
  if (graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (nodes == nullptr && num_nodes != nullptr) {  // asked for each op of a capture: without a list of them
    *num_nodes = graph->nodes.size();
    return CUDA_SUCCESS;
  }
  return give_nodes(all_nodes(graph, false), nodes, nullptr, num_nodes);
}

CUresult graph_get_root_nodes(CUgraph graph, CUgraphNode* nodes, size_t* num_nodes) {
  GS_RETURN_IF_ERROR(enter());
  if (graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return give_nodes(all_nodes(graph, true), nodes, nullptr, num_nodes);
}

CUresult graph_get_edges_v2(CUgraph graph, CUgraphNode* from, CUgraphNode* to, CUgraphEdgeData* edges,
                            size_t* num_edges) {
  GS_RETURN_IF_ERROR(enter());
  if (graph == nullptr || num_edges == nullptr || (from == nullptr) != (to == nullptr)) return CUDA_ERROR_INVALID_VALUE;
  std::vector<Edge> all;
  for (const auto& node : graph->nodes) {
    for (CUgraphNode dependency : node->dependencies) all.push_back({dependency, node.get()});
  }
  if (from == nullptr) {
    *num_edges = all.size();
    return CUDA_SUCCESS;
  }
  for (size_t i = 0; i < *num_edges; ++i) {
    from[i] = i < all.size() ? all[i].from : nullptr;
    to[i] = i < all.size() ? all[i].to : nullptr;
    if (edges != nullptr && i < all.size()) edges[i] = CUgraphEdgeData{};
  }
  *num_edges = std::min(*num_edges, all.size());
  return CUDA_SUCCESS;
}

CUresult graph_get_edges_v1(CUgraph graph, CUgraphNode* from, CUgraphNode* to, size_t* num_edges) {
  return graph_get_edges_v2(graph, from, to, nullptr, num_edges);
}

CUresult graph_node_get_dependencies_v2(CUgraphNode node, CUgraphNode* dependencies, CUgraphEdgeData* edges,
                                        size_t* count) {
  GS_RETURN_IF_ERROR(enter());
  if (node == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return give_nodes(node->dependencies, dependencies, edges, count);
}

CUresult graph_node_get_dependencies_v1(CUgraphNode node, CUgraphNode* dependencies, size_t* count) {
  return graph_node_get_dependencies_v2(node, dependencies, nullptr, count);
}

CUresult graph_node_get_dependents_v2(CUgraphNode node, CUgraphNode* dependents, CUgraphEdgeData* edges,
                                      size_t* count) {
  GS_RETURN_IF_ERROR(enter());
  if (node == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return give_nodes(node->dependents, dependents, edges, count);
}

CUresult graph_node_get_dependents_v1(CUgraphNode node, CUgraphNode* dependents, size_t* count) {
  return graph_node_get_dependents_v2(node, dependents, nullptr, count);
}

CUresult graph_add_dependencies_v2(CUgraph graph, const CUgraphNode* from, const CUgraphNode* to,
                                   const CUgraphEdgeData* /*edges*/, size_t count) {
  GS_RETURN_IF_ERROR(check_edges(graph, from, to, count, /*exist=*/false));
  for (size_t i = 0; i < count; ++i) {
    to[i]->dependencies.push_back(from[i]);
    from[i]->dependents.push_back(to[i]);
  }
  return CUDA_SUCCESS;
}

CUresult graph_add_dependencies_v1(CUgraph graph, const CUgraphNode* from, const CUgraphNode* to, size_t count) {
  return graph_add_dependencies_v2(graph, from, to, nullptr, count);
}

CUresult graph_remove_dependencies_v2(CUgraph graph, const CUgraphNode* from, const CUgraphNode* to,
                                      const CUgraphEdgeData* /*edges*/, size_t count) {
  GS_RETURN_IF_ERROR(check_edges(graph, from, to, count, /*exist=*/true));
  for (size_t i = 0; i < count; ++i) {
    erase_one(&to[i]->dependencies, from[i]);
    erase_one(&from[i]->dependents, to[i]);
  }
  return CUDA_SUCCESS;
}

CUresult graph_remove_dependencies_v1(CUgraph graph, const CUgraphNode* from, const CUgraphNode* to, size_t count) {
  return graph_remove_dependencies_v2(graph, from, to, nullptr, count);
}

CUresult graph_destroy_node(CUgraphNode node) {
  GS_RETURN_IF_ERROR(enter());
  if (node == nullptr) return CUDA_ERROR_INVALID_VALUE;
  CUgraph graph = node->graph;
  for (CUgraphNode dependency : node->dependencies) erase_one(&dependency->dependents, node);
  for (CUgraphNode dependent : node->dependents) erase_one(&dependent->dependencies, node);
  graph->nodes.erase(graph->nodes.begin() + static_cast<std::ptrdiff_t>(node->index));
  for (size_t i = 0; i < graph->nodes.size(); ++i) graph->nodes[i]->index = i;
  return CUDA_SUCCESS;
}

}  // namespace graphshard::hostcuda
