// Capture: what a stream records, and how streams join and leave.
#include <thread>

#include "litmus.h"

using namespace graphshard::litmus;

namespace {

void nothing(void* /*argument*/) {}

/// Every stream is out of capture mode and usable.
void expect_usable(CUstream stream) {
  const Pinned bytes(64);
  EQUAL(CU_STREAM_CAPTURE_STATUS_NONE, capture_status(stream));
  OK(cu.memset_8_async(bytes.address(), 1, 64, stream));
  OK(cu.stream_synchronize(stream));
  TRUE(bytes.is_all(1));
}

}  // namespace

LITMUS(a_capture_runs_nothing_and_counts_its_nodes) {
  const Stream stream;
  const Pinned from(64);
  const Pinned to(64);
  const Latch word;
  from.fill(1);
  const Captured captured(stream, [&] {
    EQUAL(CU_STREAM_CAPTURE_STATUS_ACTIVE, capture_status(stream));
    OK(cu.memcpy_async(to.address(), from.address(), 64, stream));
    OK(cu.memset_8_async(from.address(), 2, 64, stream));
    OK(cu.launch_host_func(stream, nothing, nullptr));
    OK(cu.stream_write_value_32(stream, word.address(), 1, CU_STREAM_WRITE_VALUE_DEFAULT));
    OK(cu.stream_wait_value_32(stream, word.address(), 1, CU_STREAM_WAIT_VALUE_GEQ));
  });
  TRUE(to.is_all(0) && from.is_all(1));
  EQUAL(1, num_nodes(captured.graph(), CU_GRAPH_NODE_TYPE_MEMCPY));
  EQUAL(1, num_nodes(captured.graph(), CU_GRAPH_NODE_TYPE_MEMSET));
  EQUAL(1, num_nodes(captured.graph(), CU_GRAPH_NODE_TYPE_HOST));
  EQUAL(2, num_nodes(captured.graph(), CU_GRAPH_NODE_TYPE_BATCH_MEM_OP));
  EQUAL(0, num_nodes(captured.graph(), CU_GRAPH_NODE_TYPE_KERNEL));
  EQUAL(4, num_edges(captured.graph()));
  expect_usable(stream);
}

// Records and waits make edges, not nodes.
LITMUS(events_make_edges_and_no_nodes) {
  const Stream origin;
  const Stream side;
  const Event forked;
  const Event joined;
  const Pinned bytes(256);
  const Captured captured(origin, [&] {
    OK(cu.memset_8_async(bytes.address(0), 1, 64, origin));
    fork(origin, forked, side);
    OK(cu.memset_8_async(bytes.address(64), 2, 64, side));
    OK(cu.memset_8_async(bytes.address(128), 3, 64, origin));
    fork(side, joined, origin);
    OK(cu.memset_8_async(bytes.address(192), 4, 64, origin));
  });
  EQUAL(4, nodes_of(captured.graph()).size());
  EQUAL(4, num_edges(captured.graph()));
  size_t num_roots = 0;
  OK(cu.graph_get_root_nodes(captured.graph(), nullptr, &num_roots));
  EQUAL(1, num_roots);
  size_t num_dependencies = 0;
  OK(cu.graph_node_get_dependencies(nodes_of(captured.graph())[3], nullptr, &num_dependencies));
  EQUAL(2, num_dependencies);
  captured.launch(origin);
  OK(cu.stream_synchronize(origin));
  for (unsigned char i = 0; i < 4; ++i) EQUAL(i + 1, bytes.bytes()[64 * i]);
}

// A wait takes the frontier of the record, not what the stream recorded later.
LITMUS(a_captured_wait_takes_the_frontier_of_its_record) {
  const Stream origin;
  const Stream side;
  const Event forked;
  const Event early;
  const Event late;
  const Pinned bytes(64);
  const Captured captured(origin, [&] {
    fork(origin, forked, side);
    OK(cu.memset_8_async(bytes.address(0), 1, 16, side));
    OK(cu.event_record(early, side));
    OK(cu.memset_8_async(bytes.address(16), 2, 16, side));
    OK(cu.stream_wait_event(origin, early, 0));
    OK(cu.memset_8_async(bytes.address(32), 3, 16, origin));
    fork(side, late, origin);
    OK(cu.memset_8_async(bytes.address(48), 4, 16, origin));
  });
  CUgraphNode dependency = nullptr;
  size_t num_dependencies = 1;
  OK(cu.graph_node_get_dependencies(nodes_of(captured.graph())[2], &dependency, &num_dependencies));
  EQUAL(1, num_dependencies);
  TRUE(dependency == nodes_of(captured.graph())[0]);
}

// Work that no wait of the origin covers.
LITMUS(unjoined_work_fails_and_resets_every_stream) {
  const Stream origin;
  const Stream side;
  const Event forked;
  const Pinned bytes(64);
  OpenCapture capture(origin);
  fork(origin, forked, side);
  EQUAL(CU_STREAM_CAPTURE_STATUS_ACTIVE, capture_status(side));
  OK(cu.memset_8_async(bytes.address(), 1, 64, side));
  CUgraph graph = reinterpret_cast<CUgraph>(1);
  EXPECT(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, capture.end(&graph));
  TRUE(graph == nullptr);
  expect_usable(origin);
  expect_usable(side);
}

// The join covers an earlier record; the tail after it is unjoined.
LITMUS(work_after_the_last_join_is_unjoined) {
  const Stream origin;
  const Stream side;
  const Event forked;
  const Event joined;
  const Pinned bytes(64);
  OpenCapture capture(origin);
  fork(origin, forked, side);
  OK(cu.memset_8_async(bytes.address(), 1, 32, side));
  fork(side, joined, origin);
  OK(cu.memset_8_async(bytes.address(32), 1, 32, side));
  EXPECT(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, capture.end());
  expect_usable(side);
}

// It is ancestry that counts; the origin need not wait for each stream itself.
LITMUS(a_join_through_a_third_stream_is_a_join) {
  const Stream origin;
  const Stream first;
  const Stream second;
  const Event forked;
  const Event first_done;
  const Event second_done;
  const Pinned bytes(64);
  const Captured captured(origin, [&] {
    fork(origin, forked, first);
    OK(cu.memset_8_async(bytes.address(0), 1, 32, first));
    fork(first, first_done, second);
    OK(cu.memset_8_async(bytes.address(32), 1, 32, second));
    fork(second, second_done, origin);
  });
  captured.launch(origin);
  OK(cu.stream_synchronize(origin));
  TRUE(bytes.is_all(1));
  expect_usable(first);
}

LITMUS(a_fork_without_work_needs_no_join) {
  const Stream origin;
  const Stream side;
  const Event forked;
  const Pinned bytes(64);
  OpenCapture capture(origin);
  OK(cu.memset_8_async(bytes.address(), 1, 64, origin));
  fork(origin, forked, side);
  const CUresult result = capture.end();
  if (!cu.is_host() && result != CUDA_SUCCESS) throw Skip("this driver says " + describe(result));
  OK(result);
  expect_usable(side);
}

LITMUS(two_threads_capture_side_by_side) {
  std::atomic<int> num_good{0};
  const auto capture_often = [&num_good] {
    OK(cu.ctx_set_current(cu.context));
    const Stream origin;
    const Stream side;
    const Event forked;
    const Event joined;
    const Pinned bytes(64);
    for (int i = 0; i < 50; ++i) {
      const Captured captured(origin, [&] {
        fork(origin, forked, side);
        OK(cu.memset_8_async(bytes.address(), 1, 64, side));
        fork(side, joined, origin);
      });
      if (nodes_of(captured.graph()).size() == 1) num_good.fetch_add(1);
    }
  };
  std::thread other([&] {
    try {
      capture_often();
    } catch (const Failure&) {
      num_good.store(-1000);
    }
  });
  capture_often();
  other.join();
  EQUAL(100, num_good.load());
}

LITMUS(capture_info_in_three_abis) {
  const Stream origin;
  const Pinned bytes(64);
  CUstreamCaptureStatus status{};
  cuuint64_t id = 0;
  OK(cu.stream_get_capture_info_v1(origin, &status, &id));
  EQUAL(CU_STREAM_CAPTURE_STATUS_NONE, status);
  OpenCapture capture(origin);
  OK(cu.memset_8_async(bytes.address(), 1, 64, origin));
  OK(cu.stream_get_capture_info_v1(origin, &status, &id));
  EQUAL(CU_STREAM_CAPTURE_STATUS_ACTIVE, status);
  cuuint64_t again = 0;
  CUgraph graph = nullptr;
  const CUgraphNode* dependencies = nullptr;
  size_t count = 0;
  OK(cu.stream_get_capture_info_v2(origin, &status, &again, &graph, &dependencies, &count));
  EQUAL(id, again);
  EQUAL(1, count);
  TRUE(dependencies[0] == nodes_of(graph)[0]);
  if (cu.stream_get_capture_info_v3 == nullptr) return;
  const CUgraphEdgeData* edges = nullptr;
  count = 0;
  OK(cu.stream_get_capture_info_v3(origin, &status, nullptr, nullptr, &dependencies, &edges, &count));
  EQUAL(1, count);
}

LITMUS(a_frontier_can_be_set_by_hand) {
  const Stream origin;
  const Pinned bytes(64);
  const Captured captured(origin, [&] {
    OK(cu.memset_8_async(bytes.address(0), 1, 32, origin));
    CUstreamCaptureStatus status{};
    CUgraph graph = nullptr;
    OK(cu.stream_get_capture_info_v2(origin, &status, nullptr, &graph, nullptr, nullptr));
    OK(cu.stream_update_capture_dependencies(origin, nullptr, 0, CU_STREAM_SET_CAPTURE_DEPENDENCIES));
    OK(cu.memset_8_async(bytes.address(32), 1, 32, origin));
    CUgraphNode first = nodes_of(graph)[0];
    OK(cu.stream_update_capture_dependencies(origin, &first, 1, CU_STREAM_ADD_CAPTURE_DEPENDENCIES));
  });
  EQUAL(0, num_edges(captured.graph()));
}
