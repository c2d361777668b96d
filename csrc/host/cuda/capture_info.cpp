// Questions about a capture, in the ABIs of three CUDA versions, and edits of a stream's frontier.
#include <algorithm>

#include "capture.h"
#include "graph.h"
#include "guard.h"
#include "stream.h"

namespace graphshard::hostcuda {

namespace {

CUstreamCaptureStatus status_of(const Capture* capture) {
  if (capture == nullptr) return CU_STREAM_CAPTURE_STATUS_NONE;
  return capture->invalidated ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

/// The null stream is never captured, but asking about it may be an implicit dependency (906).
CUresult check_query(CUstream stream, CUstreamCaptureStatus* status) {
  GS_RETURN_IF_ERROR(enter_context());
  if (status == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  const CUresult result = check_stream(stream);
  return result == CUDA_ERROR_NOT_SUPPORTED ? CUDA_SUCCESS : result;
}

bool is_real(CUstream stream) {
  return stream != nullptr && stream != CU_STREAM_LEGACY && stream != CU_STREAM_PER_THREAD;
}

}  // namespace

CUresult stream_is_capturing(CUstream stream, CUstreamCaptureStatus* status) {
  return stream_get_capture_info_v1(stream, status, nullptr);
}

CUresult stream_get_capture_info_v1(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id) {
  return stream_get_capture_info_v3(stream, status, id, nullptr, nullptr, nullptr, nullptr);
}

CUresult stream_get_capture_info_v2(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
                                    const CUgraphNode** dependencies, size_t* num_dependencies) {
  return stream_get_capture_info_v3(stream, status, id, graph, dependencies, nullptr, num_dependencies);
}

CUresult stream_get_capture_info_v3(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
                                    const CUgraphNode** dependencies, const CUgraphEdgeData** edges,
                                    size_t* num_dependencies) {
  GS_RETURN_IF_ERROR(check_query(stream, status));
  if (!is_real(stream)) return CUDA_SUCCESS;
  const std::lock_guard lock(capture_mutex());
  const Capture* capture = stream->capture.load(std::memory_order_relaxed);
  *status = status_of(capture);
  if (*status != CU_STREAM_CAPTURE_STATUS_ACTIVE) return CUDA_SUCCESS;
  stream->shown = stream->frontier;
  stream->shown_edges.assign(stream->shown.size(), CUgraphEdgeData{});
  if (id != nullptr) *id = capture->id;
  if (graph != nullptr) *graph = capture->graph;
  if (dependencies != nullptr) *dependencies = stream->shown.data();
  if (edges != nullptr) *edges = stream->shown_edges.data();
  if (num_dependencies != nullptr) *num_dependencies = stream->shown.size();
  return CUDA_SUCCESS;
}

CUresult stream_update_capture_dependencies_v1(CUstream stream, CUgraphNode* dependencies, size_t num_dependencies,
                                               unsigned int flags) {
  return stream_update_capture_dependencies_v2(stream, dependencies, nullptr, num_dependencies, flags);
}

CUresult stream_update_capture_dependencies_v2(CUstream stream, CUgraphNode* dependencies,
                                               const CUgraphEdgeData* /*edges*/, size_t num_dependencies,
                                               unsigned int flags) {
  GS_RETURN_IF_ERROR(enter_context());
  GS_RETURN_IF_ERROR(check_stream(stream));
  if (flags > CU_STREAM_SET_CAPTURE_DEPENDENCIES) return CUDA_ERROR_INVALID_VALUE;
  if (num_dependencies != 0 && dependencies == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const std::lock_guard lock(capture_mutex());
  const Capture* capture = stream->capture.load(std::memory_order_relaxed);
  if (capture == nullptr) return CUDA_ERROR_ILLEGAL_STATE;
  if (capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  for (size_t i = 0; i < num_dependencies; ++i) {
    if (dependencies[i] == nullptr || dependencies[i]->graph != capture->graph) return CUDA_ERROR_INVALID_VALUE;
  }
  if (flags == CU_STREAM_SET_CAPTURE_DEPENDENCIES) stream->frontier.clear();
  for (size_t i = 0; i < num_dependencies; ++i) {
    auto& frontier = stream->frontier;
    if (std::find(frontier.begin(), frontier.end(), dependencies[i]) == frontier.end()) {
      frontier.push_back(dependencies[i]);
    }
  }
  return CUDA_SUCCESS;
}

}  // namespace graphshard::hostcuda
