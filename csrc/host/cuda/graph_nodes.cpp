#include "graph_nodes.h"

#include <algorithm>

#include "graph.h"
#include "guard.h"
#include "transfer.h"

namespace graphshard::hostcuda {

namespace {

CUresult check_place(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count) {
  GS_RETURN_IF_ERROR(enter());
  if (node == nullptr || graph == nullptr || (count != 0 && dependencies == nullptr)) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < count; ++i) {
    if (dependencies[i] == nullptr || dependencies[i]->graph != graph) return CUDA_ERROR_INVALID_VALUE;
    if (std::find(dependencies, dependencies + i, dependencies[i]) != dependencies + i) return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

CUresult add(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count, Work work) {
  const std::vector<CUgraphNode> before(dependencies, dependencies + count);
  *node = graph->add(std::move(work), before, CUgraph_st::kNoLane);
  return CUDA_SUCCESS;
}

/// The work of kind `Kind` in a node; null for another node.
template <typename Kind>
const Kind* work_of(CUgraphNode node) {
  return node == nullptr ? nullptr : std::get_if<Kind>(&node->work);
}

/// A captured single operation and a batch are the same kind of node.
std::vector<ValueOp> value_ops_of(CUgraphNode node) {
  if (const auto* single = work_of<ValueWork>(node)) return {single->op};
  if (const auto* batch = work_of<BatchWork>(node)) return *batch->ops;
  return {};
}

struct TypeOf {
  CUgraphNodeType operator()(const CopyWork&) const { return CU_GRAPH_NODE_TYPE_MEMCPY; }
  CUgraphNodeType operator()(const FillWork&) const { return CU_GRAPH_NODE_TYPE_MEMSET; }
  CUgraphNodeType operator()(const HostWork&) const { return CU_GRAPH_NODE_TYPE_HOST; }
  CUgraphNodeType operator()(const KernelWork&) const { return CU_GRAPH_NODE_TYPE_KERNEL; }
  CUgraphNodeType operator()(const ValueWork&) const { return CU_GRAPH_NODE_TYPE_BATCH_MEM_OP; }
  CUgraphNodeType operator()(const BatchWork&) const { return CU_GRAPH_NODE_TYPE_BATCH_MEM_OP; }
  CUgraphNodeType operator()(const EventRecordWork&) const { return CU_GRAPH_NODE_TYPE_EVENT_RECORD; }
  CUgraphNodeType operator()(const EventWaitWork&) const { return CU_GRAPH_NODE_TYPE_WAIT_EVENT; }
  template <typename Other>
  CUgraphNodeType operator()(const Other&) const {
    return CU_GRAPH_NODE_TYPE_EMPTY;
  }
};

}  // namespace

CUgraphNodeType type_of(const Work& work) { return std::visit(TypeOf{}, work); }

CUresult graph_node_get_type(CUgraphNode node, CUgraphNodeType* type) {
  GS_RETURN_IF_ERROR(enter());
  if (node == nullptr || type == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *type = type_of(node->work);
  return CUDA_SUCCESS;
}

CUresult graph_add_empty_node(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count) {
  GS_RETURN_IF_ERROR(check_place(node, graph, dependencies, count));
  return add(node, graph, dependencies, count, EmptyWork{});
}

CUresult graph_add_memcpy_node(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                               const CUDA_MEMCPY3D* params, CUcontext /*context*/) {
  GS_RETURN_IF_ERROR(check_place(node, graph, dependencies, count));
  CopyWork copy;
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  GS_RETURN_IF_ERROR(parse_copy(*params, &copy));
  if (copy.num_bytes() == 0) return CUDA_ERROR_INVALID_VALUE;
  return add(node, graph, dependencies, count, copy);
}

CUresult graph_add_memset_node(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                               const CUDA_MEMSET_NODE_PARAMS* params, CUcontext /*context*/) {
  GS_RETURN_IF_ERROR(check_place(node, graph, dependencies, count));
  FillWork fill;
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  GS_RETURN_IF_ERROR(parse_fill(*params, &fill));
  return add(node, graph, dependencies, count, fill);
}

CUresult graph_add_host_node(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                             const CUDA_HOST_NODE_PARAMS* params) {
  GS_RETURN_IF_ERROR(check_place(node, graph, dependencies, count));
  if (params == nullptr || params->fn == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return add(node, graph, dependencies, count, HostWork{params->fn, params->userData});
}

CUresult graph_add_event_record_node(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                                     CUevent event) {
  GS_RETURN_IF_ERROR(check_place(node, graph, dependencies, count));
  if (event == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return add(node, graph, dependencies, count, EventRecordWork{Ref<CUevent_st>::share(event)});
}

CUresult graph_add_event_wait_node(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                                   CUevent event) {
  GS_RETURN_IF_ERROR(check_place(node, graph, dependencies, count));
  if (event == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return add(node, graph, dependencies, count, EventWaitWork{Ref<CUevent_st>::share(event)});
}

CUresult graph_add_batch_mem_op_node(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                                     const CUDA_BATCH_MEM_OP_NODE_PARAMS* params) {
  GS_RETURN_IF_ERROR(check_place(node, graph, dependencies, count));
  if (params == nullptr || params->count == 0 || params->paramArray == nullptr || params->flags != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  auto ops = std::make_shared<std::vector<ValueOp>>(params->count);
  for (unsigned int i = 0; i < params->count; ++i) {
    GS_RETURN_IF_ERROR(parse_value_op(params->paramArray[i], &(*ops)[i]));
  }
  return add(node, graph, dependencies, count, BatchWork{std::move(ops)});
}

CUresult graph_add_node_v1(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                           CUgraphNodeParams* params) {
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  switch (params->type) {
    case CU_GRAPH_NODE_TYPE_EMPTY:
      return graph_add_empty_node(node, graph, dependencies, count);
    case CU_GRAPH_NODE_TYPE_MEMCPY:
      return graph_add_memcpy_node(node, graph, dependencies, count, &params->memcpy.copyParams, nullptr);
    case CU_GRAPH_NODE_TYPE_MEMSET: {
      const auto& wide = params->memset;
      const CUDA_MEMSET_NODE_PARAMS fill{wide.dst, wide.pitch, wide.value, wide.elementSize, wide.width, wide.height};
      return graph_add_memset_node(node, graph, dependencies, count, &fill, nullptr);
    }
    case CU_GRAPH_NODE_TYPE_HOST: {
      const CUDA_HOST_NODE_PARAMS host{params->host.fn, params->host.userData};
      return graph_add_host_node(node, graph, dependencies, count, &host);
    }
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
      return graph_add_event_record_node(node, graph, dependencies, count, params->eventRecord.event);
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
      return graph_add_event_wait_node(node, graph, dependencies, count, params->eventWait.event);
    case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP: {
      const auto& wide = params->memOp;
      const CUDA_BATCH_MEM_OP_NODE_PARAMS batch{wide.ctx, wide.count, wide.paramArray, wide.flags};
      return graph_add_batch_mem_op_node(node, graph, dependencies, count, &batch);
    }
    default:
      return CUDA_ERROR_NOT_SUPPORTED;  // kernels, child graphs, semaphores, memory and conditional nodes
  }
}

CUresult graph_add_node_v2(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies,
                           const CUgraphEdgeData* /*edges*/, size_t count, CUgraphNodeParams* params) {
  return graph_add_node_v1(node, graph, dependencies, count, params);
}

CUresult graph_memcpy_node_get_params(CUgraphNode node, CUDA_MEMCPY3D* params) {
  GS_RETURN_IF_ERROR(enter());
  const auto* copy = work_of<CopyWork>(node);
  if (copy == nullptr || params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *params = describe_copy(*copy);
  return CUDA_SUCCESS;
}

CUresult graph_memset_node_get_params(CUgraphNode node, CUDA_MEMSET_NODE_PARAMS* params) {
  GS_RETURN_IF_ERROR(enter());
  const auto* fill = work_of<FillWork>(node);
  if (fill == nullptr || params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *params = describe_fill(*fill);
  return CUDA_SUCCESS;
}

CUresult graph_host_node_get_params(CUgraphNode node, CUDA_HOST_NODE_PARAMS* params) {
  GS_RETURN_IF_ERROR(enter());
  const auto* host = work_of<HostWork>(node);
  if (host == nullptr || params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *params = {host->function, host->argument};
  return CUDA_SUCCESS;
}

CUresult graph_event_record_node_get_event(CUgraphNode node, CUevent* event) {
  GS_RETURN_IF_ERROR(enter());
  const auto* record = work_of<EventRecordWork>(node);
  if (record == nullptr || event == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *event = record->event.get();
  return CUDA_SUCCESS;
}

CUresult graph_event_wait_node_get_event(CUgraphNode node, CUevent* event) {
  GS_RETURN_IF_ERROR(enter());
  const auto* wait = work_of<EventWaitWork>(node);
  if (wait == nullptr || event == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *event = wait->event.get();
  return CUDA_SUCCESS;
}

CUresult graph_batch_mem_op_node_get_params(CUgraphNode node, CUDA_BATCH_MEM_OP_NODE_PARAMS* params) {
  GS_RETURN_IF_ERROR(enter());
  const std::vector<ValueOp> ops = value_ops_of(node);
  if (ops.empty() || params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  node->shown_ops.clear();
  for (const ValueOp& op : ops) node->shown_ops.push_back(describe_value_op(op));
  params->ctx = &process().primary;
  params->count = static_cast<unsigned int>(ops.size());
  params->paramArray = node->shown_ops.data();
  params->flags = 0;
  return CUDA_SUCCESS;
}

}  // namespace graphshard::hostcuda
