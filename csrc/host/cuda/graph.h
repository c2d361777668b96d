// Graphs: nodes in the order they were made, with their edges; made by capture or by the cuGraphAdd calls.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <cuda.h>

#include "work.h"

struct CUgraphNode_st {
  CUgraph graph = nullptr;
  size_t index = 0;  // in graph->nodes
  uint32_t lane = 0;
  graphshard::hostcuda::Work work;
  std::vector<CUgraphNode> dependencies;
  std::vector<CUgraphNode> dependents;
  std::vector<CUstreamBatchMemOpParams> shown_ops;  // lent out by cuGraphBatchMemOpNodeGetParams
};

struct CUgraph_st {
  /// `lane` is the captured stream's number, or kNoLane; the threaded executor runs a lane in one thread.
  CUgraphNode add(graphshard::hostcuda::Work work, const std::vector<CUgraphNode>& dependencies, uint32_t lane);
  /// By index: whether the node is one of `from` or an ancestor of one.
  std::vector<bool> ancestors(const std::vector<CUgraphNode>& from) const;
  /// Indices such that dependencies come first, otherwise in order of creation; shorter than `nodes` if cyclic.
  std::vector<size_t> topological_order() const;

  static constexpr uint32_t kNoLane = UINT32_MAX;
  std::vector<std::unique_ptr<CUgraphNode_st>> nodes;
};

namespace graphshard::hostcuda {

CUresult graph_create(CUgraph* graph, unsigned int flags);
CUresult graph_destroy(CUgraph graph);
CUresult graph_get_nodes(CUgraph graph, CUgraphNode* nodes, size_t* num_nodes);
CUresult graph_get_root_nodes(CUgraph graph, CUgraphNode* nodes, size_t* num_nodes);
CUresult graph_get_edges_v1(CUgraph graph, CUgraphNode* from, CUgraphNode* to, size_t* num_edges);
CUresult graph_get_edges_v2(CUgraph graph, CUgraphNode* from, CUgraphNode* to, CUgraphEdgeData* edges,
                            size_t* num_edges);
CUresult graph_node_get_type(CUgraphNode node, CUgraphNodeType* type);
CUresult graph_node_get_dependencies_v1(CUgraphNode node, CUgraphNode* dependencies, size_t* count);
CUresult graph_node_get_dependencies_v2(CUgraphNode node, CUgraphNode* dependencies, CUgraphEdgeData* edges,
                                        size_t* count);
CUresult graph_node_get_dependents_v1(CUgraphNode node, CUgraphNode* dependents, size_t* count);
CUresult graph_node_get_dependents_v2(CUgraphNode node, CUgraphNode* dependents, CUgraphEdgeData* edges, size_t* count);
CUresult graph_add_dependencies_v1(CUgraph graph, const CUgraphNode* from, const CUgraphNode* to, size_t count);
CUresult graph_add_dependencies_v2(CUgraph graph, const CUgraphNode* from, const CUgraphNode* to,
                                   const CUgraphEdgeData* edges, size_t count);
CUresult graph_remove_dependencies_v1(CUgraph graph, const CUgraphNode* from, const CUgraphNode* to, size_t count);
CUresult graph_remove_dependencies_v2(CUgraph graph, const CUgraphNode* from, const CUgraphNode* to,
                                      const CUgraphEdgeData* edges, size_t count);
CUresult graph_destroy_node(CUgraphNode node);

}  // namespace graphshard::hostcuda
