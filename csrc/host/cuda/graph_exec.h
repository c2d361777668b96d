// Instantiated graphs: nodes in topological order as flat arrays, run by an executor; launches in call order.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include <cuda.h>

#include "work.h"

namespace graphshard::hostcuda {

/// Indices are positions in topological order, so every dependency's is smaller.
struct ExecNode {
  Work work;
  CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
  uint32_t lane = 0;
  uint32_t event_wait = 0;  // which of a launch's event waits, for an event wait node
  std::vector<uint32_t> dependencies;
  std::vector<uint32_t> dependents;
};

/// One launch: everything that is bound when it is called.
class Launch : public Task {
 public:
  Launch(CUgraphExec exec, Ref<Completion> previous, Ref<Completion> done);
  void run() override;

  Step advance_node(const ExecNode& node, uint64_t* progress, size_t piece_bytes) const;
  void run_node_to_end(const ExecNode& node) const;
  void sleep_on_node(const ExecNode& node, uint64_t progress, int64_t timeout_ns) const;

 private:
  Ref<CUgraphExec_st> exec_;
  Ref<Completion> previous_;  // of an earlier launch of the same exec, maybe in another stream
  Ref<Completion> done_;
  std::vector<AwaitWork> event_waits_;
};

/// How the nodes of one exec are run; one launch at a time.
class Executor {
 public:
  virtual ~Executor() = default;
  virtual void run(const Launch& launch) = 0;
};

constexpr int kCooperative = 0;
constexpr int kThreaded = 1;
constexpr int64_t kCreationOrder = -1;
constexpr int64_t kCopiesEarliest = -2;
constexpr int64_t kCopiesLatest = -3;

/// One thread runs all nodes; a blocked value or event wait yields to other runnable nodes.
/// `seed`: kCreationOrder, kCopiesEarliest, kCopiesLatest, or >= 0: any runnable node next.
/// In the seeded orders copies run in pieces, with other runnable nodes between them.
std::unique_ptr<Executor> make_cooperative_executor(const std::vector<ExecNode>& nodes, int64_t seed);
/// A persistent thread per lane but the first, which the launching stream's worker runs; null: no threads to be had.
std::unique_ptr<Executor> make_threaded_executor(const std::vector<ExecNode>& nodes, uint32_t num_lanes);

CUresult graph_instantiate_with_flags(CUgraphExec* exec, CUgraph graph, unsigned long long flags);
CUresult graph_instantiate_v1(CUgraphExec* exec, CUgraph graph, CUgraphNode* error_node, char* log, size_t log_bytes);
CUresult graph_instantiate_with_params(CUgraphExec* exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS* params);
CUresult graph_exec_destroy(CUgraphExec exec);
CUresult graph_exec_get_flags(CUgraphExec exec, cuuint64_t* flags);
CUresult graph_launch(CUgraphExec exec, CUstream stream);
CUresult graph_upload(CUgraphExec exec, CUstream stream);
CUresult graph_exec_set_executor(CUgraphExec exec, int executor, int64_t seed);

}  // namespace graphshard::hostcuda

struct CUgraphExec_st : graphshard::hostcuda::RefCounted {
  std::vector<graphshard::hostcuda::ExecNode> nodes;
  std::vector<graphshard::hostcuda::Ref<CUevent_st>> awaited_events;
  uint32_t num_lanes = 1;
  cuuint64_t flags = 0;
  std::mutex mutex;  // guards what follows; orders launches
  graphshard::hostcuda::Ref<graphshard::hostcuda::Completion> last_launch;
  std::unique_ptr<graphshard::hostcuda::Executor> executor;
};
