#include "graph_exec.h"

#include <algorithm>
#include <utility>

#include "capture.h"
#include "graph.h"
#include "graph_nodes.h"
#include "guard.h"
#include "lanes.h"
#include "stream.h"

namespace graphshard::hostcuda {

namespace {

/// Copy the graph's nodes in topological order; false if it has a cycle.
bool flatten(CUgraph graph, CUgraphExec exec) {
  const std::vector<size_t> order = graph->topological_order();
  if (order.size() != graph->nodes.size()) return false;
  std::vector<uint32_t> position(order.size());
  for (size_t i = 0; i < order.size(); ++i) position[order[i]] = static_cast<uint32_t>(i);
  exec->nodes.resize(order.size());
  for (size_t i = 0; i < order.size(); ++i) {
    const CUgraphNode_st& from = *graph->nodes[order[i]];
    ExecNode& to = exec->nodes[i];
    to.work = from.work;
    to.type = type_of(from.work);
    to.lane = from.lane;
    for (CUgraphNode node : from.dependencies) to.dependencies.push_back(position[node->index]);
    for (CUgraphNode node : from.dependents) to.dependents.push_back(position[node->index]);
    if (const auto* wait = std::get_if<EventWaitWork>(&to.work)) {
      to.event_wait = static_cast<uint32_t>(exec->awaited_events.size());
      exec->awaited_events.push_back(wait->event);
    }
  }
  return true;
}

CUresult instantiate(CUgraphExec* exec, CUgraph graph, cuuint64_t flags) {
  GS_RETURN_IF_ERROR(enter_context());
  if (exec == nullptr || graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
  constexpr cuuint64_t kKnown = CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH | CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD |
                                CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;
  if ((flags & ~kKnown) != 0) return CUDA_ERROR_INVALID_VALUE;
  auto fresh = Ref<CUgraphExec_st>::adopt(new CUgraphExec_st);
  if (!flatten(graph, fresh.get())) return CUDA_ERROR_INVALID_VALUE;
  fresh->flags = flags;
  fresh->num_lanes = assign_lanes(&fresh->nodes);
  fresh->executor = make_cooperative_executor(fresh->nodes, kCreationOrder);
  fresh->retain();
  *exec = fresh.get();
  return CUDA_SUCCESS;
}

}  // namespace

Launch::Launch(CUgraphExec exec, Ref<Completion> previous, Ref<Completion> done)
    : exec_(Ref<CUgraphExec_st>::share(exec)), previous_(std::move(previous)), done_(std::move(done)) {
  for (const auto& event : exec->awaited_events) {
    Ref<Completion> completion;
    // Never recorded, or recorded in a capture only: nothing to wait for.
    if (event->latest(&completion) != CUDA_SUCCESS || !completion) {
      completion = Ref<Completion>::adopt(new Completion);
      completion->finish();
    }
    event_waits_.push_back({std::move(completion)});
  }
}

void Launch::run() {
  if (previous_) previous_->wait(kForever);
  exec_->executor->run(*this);
  done_->finish();
}

Step Launch::advance_node(const ExecNode& node, uint64_t* progress, size_t piece_bytes) const {
  if (node.type == CU_GRAPH_NODE_TYPE_WAIT_EVENT) {
    return event_waits_[node.event_wait].completion->done() ? Step::kDone : Step::kBlocked;
  }
  return advance(node.work, progress, piece_bytes);
}

void Launch::run_node_to_end(const ExecNode& node) const {
  if (node.type == CU_GRAPH_NODE_TYPE_WAIT_EVENT) {
    event_waits_[node.event_wait].completion->wait(kForever);
  } else {
    run_to_end(node.work);
  }
}

void Launch::sleep_on_node(const ExecNode& node, uint64_t progress, int64_t timeout_ns) const {
  if (node.type == CU_GRAPH_NODE_TYPE_WAIT_EVENT) {
    event_waits_[node.event_wait].completion->wait(timeout_ns);
  } else {
    sleep_on(node.work, progress, timeout_ns);
  }
}

CUresult graph_instantiate_with_flags(CUgraphExec* exec, CUgraph graph, unsigned long long flags) {
  return instantiate(exec, graph, flags);
}

CUresult graph_instantiate_v1(CUgraphExec* exec, CUgraph graph, CUgraphNode* error_node, char* log, size_t log_bytes) {
  if (error_node != nullptr) *error_node = nullptr;
  if (log != nullptr && log_bytes != 0) log[0] = '\0';
  return instantiate(exec, graph, 0);
}

CUresult graph_instantiate_with_params(CUgraphExec* exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS* params) {
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  params->hErrNode_out = nullptr;
  const CUresult result = instantiate(exec, graph, params->flags);
  params->result_out = result == CUDA_SUCCESS ? CUDA_GRAPH_INSTANTIATE_SUCCESS : CUDA_GRAPH_INSTANTIATE_ERROR;
  return result;
}

CUresult graph_exec_destroy(CUgraphExec exec) {
  GS_RETURN_IF_ERROR(enter());
  if (exec == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const auto last = Ref<CUgraphExec_st>::adopt(exec);  // launches in flight keep it
  return CUDA_SUCCESS;
}

CUresult graph_exec_get_flags(CUgraphExec exec, cuuint64_t* flags) {
  GS_RETURN_IF_ERROR(enter());
  if (exec == nullptr || flags == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *flags = exec->flags;
  return CUDA_SUCCESS;
}

CUresult graph_launch(CUgraphExec exec, CUstream stream) {
  GS_RETURN_IF_ERROR(enter_context());
  if (exec == nullptr) return CUDA_ERROR_INVALID_VALUE;
  GS_RETURN_IF_ERROR(check_stream(stream));
  GS_RETURN_IF_ERROR(refuse_in_capture(stream));
  const std::lock_guard lock(exec->mutex);
  auto done = Ref<Completion>::adopt(new Completion);
  const Ref<Completion> previous = exec->last_launch;
  auto launch = Ref<Task>::adopt(new Launch(exec, previous, done));
  GS_RETURN_IF_ERROR(stream->push(TaskWork{std::move(launch)}));
  exec->last_launch = std::move(done);
  return CUDA_SUCCESS;
}

CUresult graph_upload(CUgraphExec exec, CUstream stream) {
  GS_RETURN_IF_ERROR(enter_context());
  if (exec == nullptr) return CUDA_ERROR_INVALID_VALUE;
  GS_RETURN_IF_ERROR(check_stream(stream));
  return refuse_in_capture(stream);
}

CUresult graph_exec_set_executor(CUgraphExec exec, int executor, int64_t seed) {
  GS_RETURN_IF_ERROR(enter_context());
  if (exec == nullptr || (executor != kCooperative && executor != kThreaded)) return CUDA_ERROR_INVALID_VALUE;
  if (seed < kCopiesLatest) return CUDA_ERROR_INVALID_VALUE;
  const std::lock_guard lock(exec->mutex);
  if (exec->last_launch && !exec->last_launch->done()) return CUDA_ERROR_NOT_READY;
  auto fresh = executor == kCooperative ? make_cooperative_executor(exec->nodes, seed)
                                        : make_threaded_executor(exec->nodes, exec->num_lanes);
  if (!fresh) return CUDA_ERROR_OUT_OF_MEMORY;
  exec->executor = std::move(fresh);
  return CUDA_SUCCESS;
}

}  // namespace graphshard::hostcuda
