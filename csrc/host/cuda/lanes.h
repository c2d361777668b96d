// Which thread runs which node under the threaded executor.
#pragma once

#include <vector>

#include "graph_exec.h"

namespace graphshard::hostcuda {

/// Number the lanes from 0 and return how many there are. Captured nodes keep their stream's lane; others extend a
/// dependency's chain, or start a lane, of which there are at most kMaxLanes.
uint32_t assign_lanes(std::vector<ExecNode>* nodes);

constexpr uint32_t kMaxLanes = 16;

}  // namespace graphshard::hostcuda
