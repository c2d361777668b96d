// Mistakes in a capture: the error of each (900 to 908), and that nothing is left of it.
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

// An event recorded before the capture.
LITMUS(waiting_for_eager_work_breaks_isolation) {
  const Stream origin;
  const Stream eager;
  const Event event;
  OK(cu.event_record(event, eager));
  OK(cu.stream_synchronize(eager));
  OpenCapture capture(origin);
  EXPECT(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, cu.stream_wait_event(origin, event, 0));
  EXPECT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, capture.end());
  expect_usable(origin);
}

// After the first error every call says so, and the capture must still be ended.
LITMUS(after_an_error_the_capture_is_lost_until_it_is_ended) {
  const Stream origin;
  const Stream side;
  const Event forked;
  const Event never;
  const Pinned bytes(64);
  OpenCapture capture(origin);
  fork(origin, forked, side);
  EXPECT(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cu.stream_synchronize(side));
  EQUAL(CU_STREAM_CAPTURE_STATUS_INVALIDATED, capture_status(origin));
  EQUAL(CU_STREAM_CAPTURE_STATUS_INVALIDATED, capture_status(side));
  EXPECT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cu.memset_8_async(bytes.address(), 1, 64, origin));
  EXPECT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cu.launch_host_func(side, nothing, nullptr));
  EXPECT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cu.event_record(never, side));
  CUgraph graph = reinterpret_cast<CUgraph>(1);
  EXPECT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, capture.end(&graph));
  TRUE(graph == nullptr);
  expect_usable(origin);
  expect_usable(side);
}

LITMUS(a_capturing_stream_is_not_synchronised_or_queried) {
  const Stream origin;
  {
    OpenCapture capture(origin);
    EXPECT(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cu.stream_query(origin));
  }
  {
    OpenCapture capture(origin);
    EXPECT(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cu.stream_synchronize(origin));
  }
  {
    OpenCapture capture(origin);
    EXPECT(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cu.ctx_synchronize());
  }
  expect_usable(origin);
}

LITMUS(a_captured_event_is_not_synchronised_or_queried) {
  const Stream origin;
  const Event event;
  for (int attempt = 0; attempt < 2; ++attempt) {
    OpenCapture capture(origin);
    OK(cu.event_record(event, origin));
    EXPECT(CUDA_ERROR_CAPTURED_EVENT, attempt == 0 ? cu.event_query(event) : cu.event_synchronize(event));
  }
  OK(cu.event_record(event, origin));
  OK(cu.event_synchronize(event));  // recorded eagerly, it is an event as any other
}

LITMUS(a_capture_ends_on_its_origin) {
  const Stream origin;
  const Stream side;
  const Event forked;
  OpenCapture capture(origin);
  fork(origin, forked, side);
  CUgraph graph = nullptr;
  EXPECT(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, cu.stream_end_capture(side, &graph));
  TRUE(capture.end() != CUDA_SUCCESS);
  expect_usable(origin);
  expect_usable(side);
}

LITMUS(a_capture_ends_in_its_thread_unless_relaxed) {
  const Stream origin;
  const auto end_elsewhere = [&origin] {
    CUresult result = CUDA_SUCCESS;
    std::thread([&] {
      OK(cu.ctx_set_current(cu.context));
      CUgraph graph = nullptr;
      result = cu.stream_end_capture(origin, &graph);
      if (graph != nullptr) cu.graph_destroy(graph);
    }).join();
    return result;
  };
  for (auto mode : {CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL}) {
    OpenCapture capture(origin, mode);
    EXPECT(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, end_elsewhere());
  }
  OK(cu.stream_begin_capture(origin, CU_STREAM_CAPTURE_MODE_RELAXED));
  OK(end_elsewhere());
  expect_usable(origin);
}

LITMUS(captures_do_not_merge) {
  const Stream first;
  const Stream second;
  const Event event;
  OpenCapture first_capture(first);
  OpenCapture second_capture(second);
  OK(cu.event_record(event, first));
  EXPECT(CUDA_ERROR_STREAM_CAPTURE_MERGE, cu.stream_wait_event(second, event, 0));
  EXPECT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, second_capture.end());
  EXPECT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, first_capture.end());
  expect_usable(first);
  expect_usable(second);
}

// An event of one capture in a sibling capture.
LITMUS(an_event_of_an_ended_capture_is_refused_in_another) {
  const Stream origin;
  const Event event;
  const Captured first(origin, [&] { OK(cu.event_record(event, origin)); });
  OpenCapture capture(origin);
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu.stream_wait_event(origin, event, 0));
  EXPECT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, capture.end());
  expect_usable(origin);
}

// An event of a capture in eager code.
LITMUS(an_event_of_an_ended_capture_is_refused_eagerly) {
  const Stream origin;
  const Stream eager;
  const Event event;
  const Captured captured(origin, [&] { OK(cu.event_record(event, origin)); });
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu.stream_wait_event(eager, event, 0));
  EQUAL(CU_STREAM_CAPTURE_STATUS_NONE, capture_status(eager));
  OK(cu.event_record(event, origin));
  OK(cu.stream_wait_event(eager, event, 0));
  OK(cu.stream_synchronize(eager));
}

// A second one cannot be begun on it, nor one be ended that was not begun.
LITMUS(a_stream_is_in_one_capture_at_a_time) {
  const Stream origin;
  CUgraph graph = nullptr;
  EXPECT(CUDA_ERROR_ILLEGAL_STATE, cu.stream_end_capture(origin, &graph));
  OpenCapture capture(origin);
  EXPECT(CUDA_ERROR_ILLEGAL_STATE, cu.stream_begin_capture(origin, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
}

// Captures that failed at any place leave nothing behind.
LITMUS(a_good_capture_follows_a_hundred_failed_ones) {
  const Stream origin;
  const Stream side;
  const Event forked;
  const Event joined;
  const Pinned bytes(64);
  for (int attempt = 0; attempt < 100; ++attempt) {
    OpenCapture capture(origin);
    if (attempt % 3 == 0) EXPECT(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cu.stream_query(origin));
    if (attempt % 3 == 0) continue;
    fork(origin, forked, side);
    OK(cu.memset_8_async(bytes.address(), 1, 64, side));
    if (attempt % 3 == 1) EXPECT(CUDA_ERROR_CAPTURED_EVENT, cu.event_query(forked));
    TRUE(capture.end() != CUDA_SUCCESS);
  }
  const Captured captured(origin, [&] {
    fork(origin, forked, side);
    OK(cu.memset_8_async(bytes.address(), 1, 64, side));
    fork(side, joined, origin);
  });
  captured.launch(origin);
  OK(cu.stream_synchronize(origin));
  TRUE(bytes.is_all(1));
}

LITMUS(unsafe_calls_lose_the_capture_that_forbids_them) {
  const Stream origin;
  CUdeviceptr address = 0;
  for (auto mode : {CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL}) {
    OpenCapture capture(origin, mode);
    EXPECT(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cu.mem_alloc(&address, 4096));
    EXPECT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, capture.end());
  }
  OpenCapture relaxed(origin, CU_STREAM_CAPTURE_MODE_RELAXED);
  auto mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  OK(cu.thread_exchange_capture_mode(&mode));
  const CUresult allocated = cu.mem_alloc(&address, 4096);
  OK(cu.thread_exchange_capture_mode(&mode));
  EQUAL(CU_STREAM_CAPTURE_MODE_RELAXED, mode);
  OK(allocated);
  OK(relaxed.end());
  OK(cu.mem_free(address));
}

LITMUS(a_global_capture_forbids_unsafe_calls_in_other_threads) {
  const Stream origin;
  const auto allocate_elsewhere = [](CUstreamCaptureMode mode) {
    CUresult result = CUDA_SUCCESS;
    std::thread([&] {
      OK(cu.ctx_set_current(cu.context));
      OK(cu.thread_exchange_capture_mode(&mode));
      CUdeviceptr address = 0;
      result = cu.mem_alloc(&address, 4096);
      if (result == CUDA_SUCCESS) cu.mem_free(address);
    }).join();
    return result;
  };
  {
    OpenCapture capture(origin, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    OK(allocate_elsewhere(CU_STREAM_CAPTURE_MODE_GLOBAL));
    OK(capture.end());
  }
  OpenCapture capture(origin, CU_STREAM_CAPTURE_MODE_GLOBAL);
  OK(allocate_elsewhere(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  EXPECT(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, allocate_elsewhere(CU_STREAM_CAPTURE_MODE_GLOBAL));
  EXPECT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, capture.end());
}

LITMUS(a_batch_copy_cannot_be_captured) {
  if (cu.memcpy_batch_async == nullptr) throw Skip("the driver has no cuMemcpyBatchAsync");
  const Stream origin;
  const Pinned bytes(64);
  CUdeviceptr to = bytes.address(32);
  CUdeviceptr from = bytes.address();
  size_t num_bytes = 32;
  CUmemcpyAttributes attributes{};
  attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
  size_t first = 0;
  size_t failed = 0;
  OpenCapture capture(origin);
  EXPECT(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
         cu.memcpy_batch_async(&to, &from, &num_bytes, 1, &attributes, &first, 1, &failed, origin));
}
