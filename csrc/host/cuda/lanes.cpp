#include "lanes.h"

#include <map>

#include "graph.h"

namespace graphshard::hostcuda {

namespace {

/// The lane of a dependency that is still the last node of its lane, or kNoLane.
uint32_t lane_to_extend(const ExecNode& node, const std::vector<ExecNode>& nodes, const std::vector<uint32_t>& tails) {
  for (uint32_t dependency : node.dependencies) {
    const uint32_t lane = nodes[dependency].lane;
    if (tails[lane] == dependency) return lane;
  }
  return CUgraph_st::kNoLane;
}

}  // namespace

uint32_t assign_lanes(std::vector<ExecNode>* nodes) {
  std::map<uint32_t, uint32_t> renumbered;
  std::vector<uint32_t> tails;  // by lane: its last node
  uint32_t overflow = 0;
  const auto open_lane = [&tails, &overflow] {
    if (tails.size() == kMaxLanes) return overflow++ % kMaxLanes;
    tails.push_back(0);
    return static_cast<uint32_t>(tails.size() - 1);
  };
  for (uint32_t i = 0; i < nodes->size(); ++i) {
    ExecNode& node = (*nodes)[i];
    if (node.lane != CUgraph_st::kNoLane) {
      const auto [entry, is_new] = renumbered.try_emplace(node.lane, 0);
      if (is_new) entry->second = open_lane();
      node.lane = entry->second;
    } else {
      node.lane = lane_to_extend(node, *nodes, tails);
      if (node.lane == CUgraph_st::kNoLane) node.lane = open_lane();
    }
    tails[node.lane] = i;
  }
  return tails.empty() ? 1 : static_cast<uint32_t>(tails.size());
}

}  // namespace graphshard::hostcuda
