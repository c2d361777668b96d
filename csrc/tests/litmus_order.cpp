// Streams and events, eagerly: what is ordered, what is not, and when an event binds.
#include <cstring>
#include <thread>

#include "litmus.h"

using namespace graphshard::litmus;

LITMUS(work_of_a_stream_runs_in_order) {
  const Stream stream;
  const Latch latch;
  const Pinned first(4096);
  const Pinned second(4096);
  latch.stall(stream);
  OK(cu.memset_8_async(first.address(), 1, 4096, stream));
  OK(cu.memcpy_async(second.address(), first.address(), 4096, stream));
  OK(cu.memset_8_async(first.address(), 2, 4096, stream));
  TRUE(first.is_all(0) && second.is_all(0));
  latch.set(1);
  OK(cu.stream_synchronize(stream));
  TRUE(first.is_all(2) && second.is_all(1));
}

LITMUS(a_stalled_stream_holds_up_no_other) {
  const Stream stalled;
  const Stream other;
  const Latch latch;
  const Pinned bytes(64);
  latch.stall(stalled);
  OK(cu.memset_8_async(bytes.address(), 7, 64, other));
  OK(cu.stream_synchronize(other));
  TRUE(bytes.is_all(7));
  EXPECT(CUDA_ERROR_NOT_READY, cu.stream_query(stalled));
  latch.set(1);
  OK(cu.stream_synchronize(stalled));
  OK(cu.stream_query(stalled));
}

LITMUS(an_event_orders_two_streams) {
  const Stream before;
  const Stream after;
  const Event event;
  const Latch latch;
  const Pinned bytes(4096);
  const Pinned seen(4096);
  latch.stall(before);
  OK(cu.memset_8_async(bytes.address(), 9, 4096, before));
  fork(before, event, after);
  OK(cu.memcpy_async(seen.address(), bytes.address(), 4096, after));
  EXPECT(CUDA_ERROR_NOT_READY, cu.stream_query(after));
  EXPECT(CUDA_ERROR_NOT_READY, cu.event_query(event));
  latch.set(1);
  OK(cu.stream_synchronize(after));
  OK(cu.event_query(event));
  TRUE(seen.is_all(9));
}

// A wait binds to the event's latest record when it is called, not to what is recorded later.
LITMUS(a_wait_binds_to_the_record_before_it) {
  const Stream recording;
  const Stream waiting;
  const Event event;
  const Latch first;
  const Latch second;
  first.stall(recording);
  OK(cu.event_record(event, recording));
  OK(cu.stream_wait_event(waiting, event, 0));
  second.stall(recording);
  OK(cu.event_record(event, recording));
  first.set(1);
  OK(cu.stream_synchronize(waiting));  // hangs if the wait had moved on to the second record
  EXPECT(CUDA_ERROR_NOT_READY, cu.event_query(event));
  second.set(1);
  OK(cu.event_synchronize(event));
  OK(cu.stream_synchronize(recording));
}

// A record makes the event pending again; a wait after it is not satisfied by an earlier one.
LITMUS(a_new_record_makes_the_event_pending) {
  const Stream recording;
  const Stream waiting;
  const Event event;
  const Latch latch;
  OK(cu.event_record(event, recording));
  OK(cu.event_synchronize(event));
  latch.stall(recording);
  OK(cu.event_record(event, recording));
  EXPECT(CUDA_ERROR_NOT_READY, cu.event_query(event));
  OK(cu.stream_wait_event(waiting, event, 0));
  EXPECT(CUDA_ERROR_NOT_READY, cu.stream_query(waiting));
  latch.set(1);
  OK(cu.stream_synchronize(waiting));
  OK(cu.event_query(event));
  OK(cu.stream_synchronize(recording));
}

LITMUS(an_event_never_recorded_is_done) {
  const Stream stream;
  const Event event;
  OK(cu.event_query(event));
  OK(cu.event_synchronize(event));
  OK(cu.stream_wait_event(stream, event, 0));
  OK(cu.stream_synchronize(stream));
}

LITMUS(two_waits_join_two_streams) {
  const Stream left;
  const Stream right;
  const Stream joined;
  const Event left_done;
  const Event right_done;
  const Latch left_latch;
  const Latch right_latch;
  left_latch.stall(left);
  right_latch.stall(right);
  fork(left, left_done, joined);
  fork(right, right_done, joined);
  right_latch.set(1);
  OK(cu.stream_synchronize(right));
  EXPECT(CUDA_ERROR_NOT_READY, cu.stream_query(joined));
  left_latch.set(1);
  OK(cu.stream_synchronize(joined));
}

LITMUS(elapsed_time_needs_two_done_timed_records) {
  const Stream stream;
  const Event start(CU_EVENT_DEFAULT);
  const Event end(CU_EVENT_DEFAULT);
  const Event untimed;
  const Latch latch;
  float milliseconds = -1;
  EXPECT(CUDA_ERROR_INVALID_HANDLE, cu.event_elapsed_time(&milliseconds, start, end));
  OK(cu.event_record(start, stream));
  latch.stall(stream);
  OK(cu.event_record(end, stream));
  OK(cu.event_record(untimed, stream));
  EXPECT(CUDA_ERROR_NOT_READY, cu.event_elapsed_time(&milliseconds, start, end));
  latch.set(1);
  OK(cu.stream_synchronize(stream));
  OK(cu.event_elapsed_time(&milliseconds, start, end));
  TRUE(milliseconds >= 0);
  EXPECT(CUDA_ERROR_INVALID_HANDLE, cu.event_elapsed_time(&milliseconds, start, untimed));
}

namespace {

struct Calls {
  std::atomic<int> count{0};
  CUresult result = CUDA_SUCCESS;
  const Pinned* bytes = nullptr;
  bool saw = false;
};

void count_call(void* calls) { static_cast<Calls*>(calls)->count.fetch_add(1); }

void look_at_bytes(void* opaque) {
  auto* calls = static_cast<Calls*>(opaque);
  calls->saw = calls->bytes->is_all(5);
}

void call_the_driver(void* opaque) {
  auto* calls = static_cast<Calls*>(opaque);
  CUstream stream = nullptr;
  calls->result = cu.stream_create(&stream, CU_STREAM_NON_BLOCKING);
}

}  // namespace

LITMUS(host_functions_run_in_stream_order) {
  const Stream stream;
  const Latch latch;
  const Pinned bytes(4096);
  Calls calls;
  calls.bytes = &bytes;
  latch.stall(stream);
  OK(cu.memset_8_async(bytes.address(), 5, 4096, stream));
  OK(cu.launch_host_func(stream, look_at_bytes, &calls));
  OK(cu.memset_8_async(bytes.address(), 6, 4096, stream));
  for (int i = 0; i < 10; ++i) OK(cu.launch_host_func(stream, count_call, &calls));
  EQUAL(0, calls.count.load());
  latch.set(1);
  OK(cu.stream_synchronize(stream));
  TRUE(calls.saw);
  EQUAL(10, calls.count.load());
}

LITMUS(a_host_function_may_not_call_the_driver) {
  const Stream stream;
  Calls calls;
  OK(cu.launch_host_func(stream, call_the_driver, &calls));
  OK(cu.stream_synchronize(stream));
  EXPECT(CUDA_ERROR_NOT_PERMITTED, calls.result);
}

LITMUS(fills_write_their_elements) {
  const Stream stream;
  const Pinned bytes(64);
  OK(cu.memset_32_async(bytes.address(), 0x01020304, 8, stream));
  OK(cu.memset_8_async(bytes.address(32), 0xAB, 16, stream));
  OK(cu.stream_synchronize(stream));
  uint32_t word = 0;
  std::memcpy(&word, bytes.bytes() + 28, 4);
  EQUAL(0x01020304, word);
  EQUAL(0xAB, bytes.bytes()[47]);
  EQUAL(0, bytes.bytes()[48]);
}

LITMUS(a_2d_copy_keeps_to_its_rows) {
  const Stream stream;
  const Pinned from(256);
  const Pinned to(256);
  for (size_t i = 0; i < 256; ++i) from.bytes()[i] = static_cast<unsigned char>(i);
  to.fill(0xEE);
  CUDA_MEMCPY2D copy{};
  copy.srcMemoryType = CU_MEMORYTYPE_UNIFIED;
  copy.srcDevice = from.address(3);
  copy.srcPitch = 32;
  copy.dstMemoryType = CU_MEMORYTYPE_UNIFIED;
  copy.dstDevice = to.address(1);
  copy.dstPitch = 16;
  copy.WidthInBytes = 10;
  copy.Height = 4;
  OK(cu.memcpy_2d_async(&copy, stream));
  OK(cu.stream_synchronize(stream));
  for (size_t i = 0; i < 256; ++i) {
    const bool is_copied = i >= 1 && (i - 1) % 16 < 10 && (i - 1) / 16 < 4;
    EQUAL(is_copied ? 3 + (i - 1) / 16 * 32 + (i - 1) % 16 : 0xEE, to.bytes()[i]);
  }
  copy.dstPitch = 8;
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu.memcpy_2d_async(&copy, stream));
}

LITMUS(a_batch_of_copies_is_ordered_as_a_whole) {
  if (cu.memcpy_batch_async == nullptr) throw Skip("the driver has no cuMemcpyBatchAsync");
  const Stream stream;
  const Latch latch;
  const Pinned from(4096);
  const Pinned to(4096);
  CUdeviceptr destinations[] = {to.address(0), to.address(1024), to.address(2048)};
  CUdeviceptr sources[] = {from.address(2048), from.address(1024), from.address(0)};
  size_t sizes[] = {1024, 1024, 1024};
  CUmemcpyAttributes attributes{};
  attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
  size_t first = 0;
  size_t failed = 0;
  latch.stall(stream);
  OK(cu.memset_8_async(from.address(), 3, 4096, stream));
  OK(cu.memcpy_batch_async(destinations, sources, sizes, 3, &attributes, &first, 1, &failed, stream));
  OK(cu.memset_8_async(from.address(), 4, 4096, stream));
  TRUE(to.is_all(0));
  latch.set(1);
  OK(cu.stream_synchronize(stream));
  EQUAL(3, to.bytes()[0]);
  EQUAL(3, to.bytes()[3071]);
  EQUAL(0, to.bytes()[3072]);
}

// What is in use when it is destroyed lives on until it is not.
LITMUS(a_destroyed_stream_finishes_its_work) {
  Stream stream;
  const Latch latch;
  const Pinned bytes(64);
  const Event done;
  latch.stall(stream);
  OK(cu.memset_8_async(bytes.address(), 8, 64, stream));
  OK(cu.event_record(done, stream));
  OK(cu.stream_destroy(stream.release()));
  latch.set(1);
  OK(cu.event_synchronize(done));
  TRUE(bytes.is_all(8));
}

LITMUS(a_destroyed_event_keeps_its_waiters_waiting) {
  const Stream recording;
  const Stream waiting;
  Event event;
  const Latch latch;
  latch.stall(recording);
  fork(recording, event, waiting);
  OK(cu.event_destroy(event.release()));
  EXPECT(CUDA_ERROR_NOT_READY, cu.stream_query(waiting));
  latch.set(1);
  OK(cu.stream_synchronize(waiting));
}

LITMUS(a_thread_without_a_context_is_refused) {
  CUresult result = CUDA_SUCCESS;
  std::thread([&result] {
    CUstream stream = nullptr;
    result = cu.stream_create(&stream, CU_STREAM_NON_BLOCKING);
  }).join();
  EXPECT(CUDA_ERROR_INVALID_CONTEXT, result);
}

LITMUS(synchronising_the_context_waits_for_all_streams) {
  const Stream first;
  const Stream second;
  const Latch latch;
  const Pinned bytes(64);
  latch.stall(first);
  OK(cu.memset_8_async(bytes.address(), 1, 64, first));
  const Event event;
  fork(first, event, second);
  OK(cu.memset_8_async(bytes.address(), 2, 64, second));
  latch.set(1);
  OK(cu.ctx_synchronize());
  TRUE(bytes.is_all(2));
}
