// Launches: what is frozen, what is ordered, what outlives what, external events.
#include "litmus.h"

using namespace graphshard::litmus;

namespace {

void add_one(void* number) { ++*static_cast<int*>(number); }

}  // namespace

// Arguments are frozen at capture.
LITMUS(a_replay_repeats_its_frozen_arguments) {
  const Stream stream;
  const Pinned from(64);
  const Pinned to(64);
  unsigned char value = 3;
  int count = 0;
  const Captured captured(stream, [&] {
    OK(cu.memset_8_async(from.address(), value, 64, stream));
    OK(cu.memcpy_async(to.address(), from.address(), 64, stream));
    OK(cu.launch_host_func(stream, add_one, &count));
  });
  value = 4;
  for (int replay = 1; replay <= 5; ++replay) {
    from.fill(9);
    to.fill(9);
    captured.launch(stream);
    OK(cu.stream_synchronize(stream));
    TRUE(to.is_all(3));
    EQUAL(replay, count);
  }
}

// A value is a constant, so the second replay passes on the word that the first one left.
LITMUS(a_stale_word_lets_the_second_replay_pass) {
  const Stream stream;
  const Latch word;
  int count = 0;
  const Captured captured(stream, [&] {
    OK(cu.stream_wait_value_32(stream, word.address(), 1, CU_STREAM_WAIT_VALUE_GEQ));
    OK(cu.launch_host_func(stream, add_one, &count));
  });
  captured.launch(stream);
  EXPECT(CUDA_ERROR_NOT_READY, cu.stream_query(stream));
  word.set(1);
  OK(cu.stream_synchronize(stream));
  captured.launch(stream);
  OK(cu.stream_synchronize(stream));
  EQUAL(2, count);
}

LITMUS(a_word_reset_after_its_wait_stalls_every_replay) {
  const Stream stream;
  const Latch word;
  int count = 0;
  const Captured captured(stream, [&] {
    OK(cu.stream_wait_value_32(stream, word.address(), 1, CU_STREAM_WAIT_VALUE_EQ));
    OK(cu.stream_write_value_32(stream, word.address(), 0, CU_STREAM_WRITE_VALUE_DEFAULT));
    OK(cu.launch_host_func(stream, add_one, &count));
  });
  for (int replay = 1; replay <= 3; ++replay) {
    captured.launch(stream);
    EXPECT(CUDA_ERROR_NOT_READY, cu.stream_query(stream));
    word.set(1);
    OK(cu.stream_synchronize(stream));
    EQUAL(replay, count);
  }
}

// A wait whose release comes later, in another stream of the same graph, must yield.
LITMUS(a_wait_released_by_a_later_node_does_not_deadlock) {
  const Stream origin;
  const Stream side;
  const Event forked;
  const Event joined;
  const Latch word;
  const Pinned bytes(64);
  const Captured captured(origin, [&] {
    fork(origin, forked, side);
    OK(cu.stream_wait_value_32(origin, word.address(), 1, CU_STREAM_WAIT_VALUE_EQ));
    OK(cu.memset_8_async(bytes.address(), 2, 64, origin));
    OK(cu.memset_8_async(bytes.address(), 1, 64, side));
    OK(cu.stream_write_value_32(side, word.address(), 1, CU_STREAM_WRITE_VALUE_DEFAULT));
    fork(side, joined, origin);
    OK(cu.stream_write_value_32(origin, word.address(), 0, CU_STREAM_WRITE_VALUE_DEFAULT));
  });
  for (const Order& order : all_orders(20)) {
    captured.set_executor(order.executor, order.seed);
    bytes.fill(0);
    captured.launch(origin);
    OK(cu.stream_synchronize(origin));
    TRUE(bytes.is_all(2));
  }
}

LITMUS(launches_of_one_exec_are_ordered_across_streams) {
  const Stream first;
  const Stream second;
  const Latch latch;
  int count = 0;
  const Captured captured(first, [&] { OK(cu.launch_host_func(first, add_one, &count)); });
  latch.stall(first);
  captured.launch(first);
  captured.launch(second);
  EXPECT(CUDA_ERROR_NOT_READY, cu.stream_query(second));
  latch.set(1);
  OK(cu.stream_synchronize(second));
  EQUAL(2, count);
  OK(cu.stream_synchronize(first));
}

LITMUS(two_execs_run_side_by_side) {
  const Stream first;
  const Stream second;
  const Latch latch;
  const Pinned bytes(64);
  const Captured stalled(first, [&] { latch.stall(first); });
  const Captured other(second, [&] { OK(cu.memset_8_async(bytes.address(), 1, 64, second)); });
  stalled.launch(first);
  other.launch(second);
  OK(cu.stream_synchronize(second));
  TRUE(bytes.is_all(1));
  EXPECT(CUDA_ERROR_NOT_READY, cu.stream_query(first));
  latch.set(1);
  OK(cu.stream_synchronize(first));
}

LITMUS(a_launch_is_ordered_with_its_stream) {
  const Stream stream;
  const Stream waiting;
  const Event done;
  const Latch latch;
  const Pinned bytes(64);
  const Pinned seen(64);
  const Captured captured(stream, [&] { OK(cu.memset_8_async(bytes.address(), 1, 64, stream)); });
  latch.stall(stream);
  captured.launch(stream);
  fork(stream, done, waiting);
  OK(cu.memcpy_async(seen.address(), bytes.address(), 64, waiting));
  EXPECT(CUDA_ERROR_NOT_READY, cu.stream_query(waiting));
  latch.set(1);
  OK(cu.stream_synchronize(waiting));
  TRUE(seen.is_all(1));
  OK(cu.stream_synchronize(stream));
}

LITMUS(an_exec_outlives_its_graph_and_a_launch_its_exec) {
  const Stream stream;
  const Latch latch;
  int count = 0;
  CUgraph graph = nullptr;
  CUgraphExec exec = nullptr;
  {
    OpenCapture capture(stream);
    OK(cu.launch_host_func(stream, add_one, &count));
    OK(capture.end(&graph));
  }
  OK(cu.graph_instantiate(&exec, graph, 0));
  OK(cu.graph_destroy(graph));
  OK(cu.graph_upload(exec, stream));
  latch.stall(stream);
  OK(cu.graph_launch(exec, stream));
  OK(cu.graph_launch(exec, stream));
  OK(cu.graph_exec_destroy(exec));
  latch.set(1);
  OK(cu.stream_synchronize(stream));
  EQUAL(2, count);
}

LITMUS(an_external_record_is_a_node_that_hosts_can_see) {
  const Stream origin;
  const Event external(CU_EVENT_DEFAULT);
  const Event end(CU_EVENT_DEFAULT);
  const Latch latch;
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu.event_record_with_flags(external, origin, CU_EVENT_RECORD_EXTERNAL));
  const Captured captured(origin, [&] {
    OK(cu.event_record_with_flags(external, origin, CU_EVENT_RECORD_EXTERNAL));
    latch.stall(origin);
    OK(cu.event_record_with_flags(end, origin, CU_EVENT_RECORD_EXTERNAL));
  });
  EQUAL(2, num_nodes(captured.graph(), CU_GRAPH_NODE_TYPE_EVENT_RECORD));
  captured.launch(origin);
  latch.set(1);
  OK(cu.stream_synchronize(origin));
  OK(cu.event_query(external));
  float milliseconds = -1;
  OK(cu.event_elapsed_time(&milliseconds, external, end));
  TRUE(milliseconds >= 0);
}

LITMUS(an_external_wait_waits_for_the_record_before_the_launch) {
  const Stream origin;
  const Stream eager;
  const Event external;
  const Latch latch;
  const Pinned bytes(64);
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu.stream_wait_event(origin, external, CU_EVENT_WAIT_EXTERNAL));
  const Captured captured(origin, [&] {
    OK(cu.stream_wait_event(origin, external, CU_EVENT_WAIT_EXTERNAL));
    OK(cu.memset_8_async(bytes.address(), 1, 64, origin));
  });
  EQUAL(1, num_nodes(captured.graph(), CU_GRAPH_NODE_TYPE_WAIT_EVENT));
  for (const Order& order : all_orders(2)) {
    captured.set_executor(order.executor, order.seed);
    latch.set(0);
    latch.stall(eager);
    OK(cu.event_record(external, eager));
    captured.launch(origin);
    EXPECT(CUDA_ERROR_NOT_READY, cu.stream_query(origin));
    latch.set(1);
    OK(cu.stream_synchronize(origin));
    OK(cu.stream_synchronize(eager));
  }
  TRUE(bytes.is_all(1));
}

// Whether a launch re-arms the event differs among drivers; after the stream it is this replay's.
LITMUS(after_the_stream_an_external_record_is_this_replays) {
  const Stream origin;
  const Event external(CU_EVENT_DEFAULT);
  const Event before(CU_EVENT_DEFAULT);
  const Captured captured(origin, [&] { OK(cu.event_record_with_flags(external, origin, CU_EVENT_RECORD_EXTERNAL)); });
  for (int replay = 0; replay < 3; ++replay) {
    OK(cu.event_record(before, origin));
    captured.launch(origin);
    OK(cu.stream_synchronize(origin));
    float milliseconds = -1;
    OK(cu.event_elapsed_time(&milliseconds, before, external));
    TRUE(milliseconds >= 0);
  }
}

LITMUS(an_empty_graph_can_be_launched) {
  const Stream stream;
  const Captured captured(stream, [] {});
  EQUAL(0, nodes_of(captured.graph()).size());
  for (const Order& order : all_orders(1)) {
    captured.set_executor(order.executor, order.seed);
    captured.launch(stream);
    OK(cu.stream_synchronize(stream));
  }
}

// A graph keeps what was passed by address: the array of a batch, and its events.
LITMUS(a_graph_keeps_its_own_copy_of_arrays) {
  const Stream stream;
  const Latch word;
  CUstreamBatchMemOpParams op{};
  op.writeValue = {CU_STREAM_MEM_OP_WRITE_VALUE_32, word.address(), {7}, CU_STREAM_WRITE_VALUE_DEFAULT, 0};
  const Captured captured(stream, [&] { OK(cu.stream_batch_mem_op(stream, 1, &op, 0)); });
  op.writeValue.value = 8;
  captured.launch(stream);
  OK(cu.stream_synchronize(stream));
  EQUAL(7, word.value());
}

HOST_LITMUS(a_graph_keeps_its_events) {
  const Stream stream;
  const Stream eager;
  const Latch latch;
  Event recorded;
  Event awaited;
  const Captured captured(stream, [&] {
    OK(cu.stream_wait_event(stream, awaited, CU_EVENT_WAIT_EXTERNAL));
    OK(cu.event_record_with_flags(recorded, stream, CU_EVENT_RECORD_EXTERNAL));
  });
  latch.stall(eager);
  OK(cu.event_record(awaited, eager));
  OK(cu.event_destroy(recorded.release()));
  OK(cu.event_destroy(awaited.release()));
  captured.launch(stream);
  EXPECT(CUDA_ERROR_NOT_READY, cu.stream_query(stream));
  latch.set(1);
  OK(cu.stream_synchronize(stream));
  OK(cu.stream_synchronize(eager));
}
