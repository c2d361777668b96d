// Adding nodes to graphs by hand, and asking nodes what they do.
#pragma once

#include <cuda.h>

#include "work.h"

namespace graphshard::hostcuda {

CUgraphNodeType type_of(const Work& work);

CUresult graph_add_empty_node(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count);
CUresult graph_add_memcpy_node(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                               const CUDA_MEMCPY3D* params, CUcontext context);
CUresult graph_add_memset_node(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                               const CUDA_MEMSET_NODE_PARAMS* params, CUcontext context);
CUresult graph_add_host_node(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                             const CUDA_HOST_NODE_PARAMS* params);
CUresult graph_add_event_record_node(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                                     CUevent event);
CUresult graph_add_event_wait_node(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                                   CUevent event);
CUresult graph_add_batch_mem_op_node(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                                     const CUDA_BATCH_MEM_OP_NODE_PARAMS* params);
CUresult graph_add_node_v1(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count,
                           CUgraphNodeParams* params);
CUresult graph_add_node_v2(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies,
                           const CUgraphEdgeData* edges, size_t count, CUgraphNodeParams* params);

CUresult graph_memcpy_node_get_params(CUgraphNode node, CUDA_MEMCPY3D* params);
CUresult graph_memset_node_get_params(CUgraphNode node, CUDA_MEMSET_NODE_PARAMS* params);
CUresult graph_host_node_get_params(CUgraphNode node, CUDA_HOST_NODE_PARAMS* params);
CUresult graph_event_record_node_get_event(CUgraphNode node, CUevent* event);
CUresult graph_event_wait_node_get_event(CUgraphNode node, CUevent* event);
/// `params->paramArray` is the node's own.
CUresult graph_batch_mem_op_node_get_params(CUgraphNode node, CUDA_BATCH_MEM_OP_NODE_PARAMS* params);

}  // namespace graphshard::hostcuda
