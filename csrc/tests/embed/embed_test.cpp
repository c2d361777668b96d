// The C API over a driver library: steps, their order and slots, errors, lifetimes.
//
//   graphshard_embed_test LIBRARY
#include <graphshard.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr double kTimeoutS = 60.0;

void require(bool is_true, const char* what) {
  if (is_true) return;
  std::fprintf(stderr, "FAILED: %s (last error: %s)\n", what, gs_last_error());
  std::abort();
}

void check(gs_status status) { require(status == GS_OK, "a call succeeds"); }

void require_error(gs_status status, gs_status right, const std::string& part) {
  require(status == right, ("status of: " + part).c_str());
  require(std::string(gs_last_error()).find(part) != std::string::npos, part.c_str());
}

gs_op make_op(gs_op_kind kind, uint32_t stream = 0, uint32_t index = 0) {
  gs_op op = {};
  op.kind = kind;
  op.stream = stream;
  op.index = index;
  return op;
}

gs_op make_copy(uint64_t destination, uint64_t source, uint64_t num_bytes) {
  gs_op op = make_op(GS_OP_COPY);
  op.destination = destination;
  op.source = source;
  op.num_bytes = num_bytes;
  return op;
}

gs_op make_value(gs_op_kind kind, uint64_t address, uint32_t value) {
  gs_op op = make_op(kind);
  (kind == GS_OP_WAIT_VALUE ? op.source : op.destination) = address;
  op.value = value;
  op.num_bytes = kind == GS_OP_FILL ? 64 : 0;
  return op;
}

struct Rig {
  explicit Rig(gs_driver* driver_in) : driver(driver_in) {
    check(gs_stream_create(driver, &stream));
    check(gs_stream_create(driver, &other));
    check(gs_memory_allocate(driver, 4096, 0, &memory));
  }
  ~Rig() {
    gs_stream_release(stream);
    gs_stream_release(other);
    gs_memory_release(memory);
  }

  uint64_t at(uint64_t offset) const { return gs_memory_address(memory) + offset; }
  uint8_t* byte(uint64_t offset) const { return reinterpret_cast<uint8_t*>(at(offset)); }
  void* cu_stream() const { return gs_stream_handle(stream); }

  gs_status try_list(const std::vector<gs_op>& ops, gs_list** list, const std::vector<gs_call>& calls = {},
                     const gs_collective* collective = nullptr, gs_stream* on = nullptr) const {
    gs_stream* streams[2] = {on == nullptr ? stream : on, other};
    gs_list_desc desc = GS_LIST_DESC_INIT;
    desc.streams = streams;
    desc.num_streams = on == nullptr ? 2 : 1;
    desc.num_events = 2;
    desc.ops = ops.data();
    desc.num_ops = ops.size();
    desc.calls = calls.data();
    desc.num_calls = calls.size();
    desc.collectives = collective;
    desc.num_collectives = collective == nullptr ? 0 : 1;
    return gs_list_create(driver, &desc, list);
  }
  gs_step* capture(const std::vector<gs_op>& ops, const std::vector<gs_call>& calls = {},
                   gs_step_desc desc = GS_STEP_DESC_INIT) const {
    gs_list* list = nullptr;
    gs_step* step = nullptr;
    check(try_list(ops, &list, calls));
    check(gs_step_capture(list, &desc, &step));
    gs_list_release(list);
    return step;
  }

  gs_driver* driver;
  gs_stream* stream = nullptr;
  gs_stream* other = nullptr;
  gs_memory* memory = nullptr;
};

void count(void* counter) { ++*static_cast<std::atomic<int>*>(counter); }

void test_ops_of_all_kinds(gs_driver* driver) {
  const Rig rig(driver);
  std::atomic<int> num_calls{0};
  gs_op copy_2d = make_copy(rig.at(256), rig.at(0), 4);
  copy_2d.kind = GS_OP_COPY_2D;
  copy_2d.destination_pitch = 16;
  copy_2d.source_pitch = 8;
  copy_2d.rows = 3;
  gs_op on_other = make_copy(rig.at(512), rig.at(0), 64);
  on_other.stream = 1;
  const std::vector<gs_op> ops = {
      make_value(GS_OP_FILL, rig.at(0), 7),
      make_op(GS_OP_RECORD, 0, 0),
      make_op(GS_OP_WAIT, 1, 0),
      on_other,
      make_op(GS_OP_RECORD, 1, 1),
      copy_2d,
      make_op(GS_OP_CALL),
      make_value(GS_OP_WRITE_VALUE, rig.at(800), 5),
      make_op(GS_OP_WAIT, 0, 1),
      make_value(GS_OP_WAIT_VALUE, rig.at(800), 5),
  };
  const auto is_right = [&] {
    return rig.byte(512)[63] == 7 && rig.byte(256)[35] == 7 && rig.byte(256)[36] == 0 && rig.byte(800)[0] == 5;
  };
  gs_list* list = nullptr;
  check(rig.try_list(ops, &list, {{&count, &num_calls}}));
  check(gs_list_issue(list, 0, ops.size()));
  check(gs_stream_wait(rig.stream, kTimeoutS));
  require(is_right() && num_calls == 1, "a list that is issued");
  require_error(gs_list_issue(list, 3, 99), GS_ERROR_INVALID, "ops 3..99 of 10");
  gs_step_desc desc = GS_STEP_DESC_INIT;
  for (const char* executor : {"cooperative", "threaded"}) {
    std::memset(rig.byte(0), 0, 4096);
    desc.executor = executor;
    gs_step* step = nullptr;
    check(gs_step_capture(list, &desc, &step));
    check(gs_step_upload(step, rig.cu_stream()));
    check(gs_step_replay(step, rig.cu_stream()));
    check(gs_step_wait(step, kTimeoutS));
    require(is_right(), "a step that is replayed");
    gs_step_release(step);
  }
  gs_list_release(list);
  require(num_calls == 3, "calls run once a replay");
}

struct Peers {
  int code = 0;

  static int all_gather(void* self, uint64_t destination, uint64_t source, uint64_t num_bytes, void* stream) {
    auto& peers = *static_cast<Peers*>(self);
    peers.last[0] = destination;
    peers.last[1] = source;
    peers.last[2] = num_bytes;
    peers.stream = stream;
    return peers.code;
  }
  uint64_t last[3] = {};
  void* stream = nullptr;
};

void test_collectives(gs_driver* driver) {
  const Rig rig(driver);
  Peers peers;
  const gs_collective collective = {&peers, "mine", 4, &Peers::all_gather, nullptr};
  gs_op gather = make_copy(rig.at(1024), rig.at(0), 64);
  gather.kind = GS_OP_ALL_GATHER;
  gs_list* list = nullptr;
  check(rig.try_list({gather}, &list, {}, &collective));
  check(gs_list_issue(list, 0, 1));
  require(peers.last[0] == rig.at(1024) && peers.last[1] == rig.at(0) && peers.last[2] == 64, "what was gathered");
  require(peers.stream == rig.cu_stream(), "where it was gathered");
  peers.code = 6;
  require_error(gs_list_issue(list, 0, 1), GS_ERROR_COLLECTIVE,
                "all_gather of 'mine' failed with code 6, at op 0 of 1 on stream 0");
  gs_list_release(list);
  gather.num_bytes = 1024;
  require_error(rig.try_list({gather}, &list, {}, &collective), GS_ERROR_DRIVER, "all_gather refused: 4096 bytes");
  gs_op reduce = make_copy(rig.at(1024), rig.at(0), 0);
  reduce.kind = GS_OP_REDUCE_SCATTER;
  reduce.num_elements = 4;
  require_error(rig.try_list({reduce}, &list, {}, &collective), GS_ERROR_INVALID, "value is a gs_type");
  reduce.value = GS_BFLOAT16;
  check(rig.try_list({reduce}, &list, {}, &collective));
  require_error(gs_list_issue(list, 0, 1), GS_ERROR_COLLECTIVE, "'mine' has no reduce_scatter");
  gs_list_release(list);
}

void test_buffers_and_shapes(gs_driver* driver) {
  const Rig rig(driver);
  const gs_tensor inputs[2] = {{"tokens", rig.at(0), 16}, {"positions", rig.at(16), 16}};
  gs_step* steps[4] = {};
  const int64_t shapes[4][2] = {{8, 1}, {2, 1}, {4, 1}, {2, 5}};
  for (int i = 0; i < 4; ++i) {
    gs_step_desc desc = GS_STEP_DESC_INIT;
    desc.batch_size = shapes[i][0];
    desc.tokens_per_sequence = shapes[i][1];
    desc.inputs = inputs;
    desc.num_inputs = 2;
    steps[i] = rig.capture({}, {}, desc);
  }
  gs_step* found = nullptr;
  check(gs_steps_choose(steps, 4, 3, 1, &found));
  require(found == steps[2], "the smallest that fits");
  check(gs_steps_choose(steps, 4, 1, 5, &found));
  require(found == steps[3], "tokens are matched exactly");
  require_error(gs_steps_choose(steps, 4, 9, 1, &found), GS_ERROR_NOT_FOUND, "fits 9x1; captured: 8x1, 2x1, 4x1, 2x5");
  require_error(gs_steps_choose(nullptr, 0, 9, 1, &found), GS_ERROR_NOT_FOUND, "captured: none");
  gs_step_info info = GS_STEP_INFO_INIT;
  check(gs_step_get_info(steps[0], &info));
  require(info.batch_size == 8 && info.num_inputs == 2 && info.num_outputs == 0, "what a step says of itself");
  require(info.stream == rig.cu_stream() && info.has_prefetch == 0, "where it may be replayed");
  gs_tensor tensor = {};
  check(gs_step_input(steps[0], "positions", &tensor));
  require(tensor.address == rig.at(16) && tensor.num_bytes == 16, "an input by name");
  check(gs_step_input_at(steps[0], 0, &tensor));
  require(std::string(tensor.name) == "tokens", "an input by index");
  require_error(gs_step_input(steps[0], "logits", &tensor), GS_ERROR_NOT_FOUND, "known: tokens, positions");
  require_error(gs_step_output(steps[0], "logits", &tensor), GS_ERROR_NOT_FOUND, "no output 'logits'; known: none");
  require_error(gs_step_output_at(steps[0], 0, &tensor), GS_ERROR_INVALID, "buffer 0 of 0 outputs");
  uint64_t epoch = 9;
  check(gs_step_epoch(steps[0], &epoch));
  require(epoch == 0, "a step without a control page has no epoch");
  for (gs_step* step : steps) gs_step_release(step);
}

// Steps of one order are ordered on whatever streams; waits are bounded; a released step runs to its end.
void test_order_and_waits(gs_driver* driver) {
  const Rig rig(driver);
  std::atomic<int> num_calls{0};
  gs_order* order = nullptr;
  check(gs_order_create(driver, &order));
  gs_step_desc desc = GS_STEP_DESC_INIT;
  desc.order = order;
  gs_step* held =
      rig.capture({make_value(GS_OP_WAIT_VALUE, rig.at(0), 1), make_op(GS_OP_CALL)}, {{&count, &num_calls}}, desc);
  gs_step* next = rig.capture({make_op(GS_OP_CALL)}, {{&count, &num_calls}}, desc);
  gs_order_release(order);
  require_error(gs_step_wait(held, 0.0), GS_ERROR_STATE, "was not replayed yet");
  check(gs_step_replay(held, rig.cu_stream()));
  check(gs_step_replay(next, gs_stream_handle(rig.other)));  // a stream that has nothing to do
  require_error(gs_step_wait(held, 0.02), GS_TIMEOUT, "did not come within 20 ms");
  require_error(gs_step_wait(next, 0.02), GS_TIMEOUT, "did not come within 20 ms");
  require_error(gs_step_wait(next, -1.0), GS_ERROR_INVALID, "waits are never unbounded");
  require(num_calls == 0, "a replay waits for the order's last one");
  gs_step_retain(held);
  gs_step_release(held);
  gs_step_release(held);  // gone, with its work still held
  __atomic_store_n(reinterpret_cast<uint32_t*>(rig.at(0)), 1, __ATOMIC_RELEASE);
  check(gs_step_wait(next, kTimeoutS));
  require(num_calls == 2, "both ran");
  for (uintptr_t handle = 0; handle <= 2; ++handle) {
    require_error(gs_step_replay(next, reinterpret_cast<void*>(handle)), GS_ERROR_DRIVER,
                  "the null, legacy and per-thread default streams");
  }
  gs_step_release(next);
}

// What slots hold: a step that needs state 1 brings it once, again after `forget`, and after a step that leaves
// state 2.
void test_slots(gs_driver* driver) {
  const Rig rig(driver);
  std::atomic<int> num_gathers{0};
  gs_list* gathers = nullptr;
  check(rig.try_list({make_copy(rig.at(0), rig.at(64), 64)}, &gathers, {}, nullptr, rig.other));
  std::memset(rig.byte(64), 9, 64);
  gs_order* order = nullptr;
  check(gs_order_create(driver, &order));
  gs_step_desc desc = GS_STEP_DESC_INIT;
  desc.order = order;
  desc.prefetch = gathers;
  desc.entry = desc.exit = 1;
  gs_step* step =
      rig.capture({make_copy(rig.at(128), rig.at(0), 64), make_op(GS_OP_CALL)}, {{&count, &num_gathers}}, desc);
  desc.entry = desc.exit = 2;
  desc.prefetch = nullptr;
  gs_step* lost = rig.capture({make_op(GS_OP_CALL)}, {{&count, &num_gathers}}, desc);
  desc.entry = 0;
  gs_step* spoiler = rig.capture({make_value(GS_OP_FILL, rig.at(0), 0)}, {}, desc);
  const auto replay = [&](uint8_t right) {
    check(gs_step_replay(step, rig.cu_stream()));
    check(gs_step_wait(step, kTimeoutS));
    require(rig.byte(128)[0] == right && rig.byte(128)[63] == right, "the slot's bytes");
  };
  check(gs_step_prefetch(step));
  check(gs_step_prefetch_wait(step, kTimeoutS));
  require(rig.byte(0)[63] == 9, "a prefetch fills the slot");
  replay(9);
  std::memset(rig.byte(64), 8, 64);
  replay(9);  // the slot still holds what it needs: nothing is gathered
  gs_order_forget(order);
  replay(8);
  check(gs_step_replay(spoiler, rig.cu_stream()));
  replay(8);  // gathered again, after the spoiler
  require_error(gs_step_replay(lost, rig.cu_stream()), GS_ERROR_STATE, "expects state 2 in its slots, which hold 1");
  check(gs_step_replay(spoiler, rig.cu_stream()));
  check(gs_step_replay(lost, rig.cu_stream()));
  check(gs_step_wait(lost, kTimeoutS));
  for (gs_step* one : {step, lost, spoiler}) gs_step_release(one);
  gs_list_release(gathers);
  gs_order_release(order);
}

// The word tells when outputs may be read, before a tail that is held; never of an earlier replay.
void test_done_word(gs_driver* driver) {
  const Rig rig(driver);
  gs_memory* word = nullptr;
  check(gs_memory_allocate(driver, 4, GS_MEMORY_HOST, &word));
  gs_step_desc desc = GS_STEP_DESC_INIT;
  desc.done = word;
  gs_step* step = rig.capture({make_value(GS_OP_WRITE_VALUE, gs_memory_address(word), 1),
                               make_value(GS_OP_WAIT_VALUE, rig.at(0), 1), make_value(GS_OP_WRITE_VALUE, rig.at(0), 0)},
                              {}, desc);
  const auto release_tail = [&] { __atomic_store_n(reinterpret_cast<uint32_t*>(rig.at(0)), 1, __ATOMIC_RELEASE); };
  gs_memory_release(word);
  check(gs_step_replay(step, rig.cu_stream()));
  check(gs_step_wait(step, kTimeoutS));
  check(gs_step_replay(step, rig.cu_stream()));  // behind the tail that is held
  check(gs_step_replay(step, rig.cu_stream()));
  require_error(gs_step_wait(step, 0.02), GS_TIMEOUT, "did not come");
  for (int tail = 0; tail < 3; ++tail) {
    while (__atomic_load_n(reinterpret_cast<uint32_t*>(rig.at(0)), __ATOMIC_ACQUIRE) != 0) std::this_thread::yield();
    release_tail();
  }
  check(gs_step_wait(step, kTimeoutS));
  gs_step_release(step);
}

// Two steps of one order that write the same word: a wait for one is never answered, or held up, by the other.
void test_a_word_of_two_steps(gs_driver* driver) {
  const Rig rig(driver);
  gs_memory* word = nullptr;
  gs_order* order = nullptr;
  check(gs_memory_allocate(driver, 4, GS_MEMORY_HOST, &word));
  check(gs_order_create(driver, &order));
  gs_step_desc desc = GS_STEP_DESC_INIT;
  desc.done = word;
  desc.order = order;
  const gs_op says_done = make_value(GS_OP_WRITE_VALUE, gs_memory_address(word), 1);
  gs_step* quick = rig.capture({says_done}, {}, desc);
  gs_step* held = rig.capture({make_value(GS_OP_WAIT_VALUE, rig.at(0), 1), says_done}, {}, desc);
  gs_memory_release(word);
  gs_order_release(order);
  check(gs_step_replay(quick, rig.cu_stream()));
  check(gs_step_wait(quick, kTimeoutS));
  check(gs_step_replay(held, rig.cu_stream()));
  check(gs_step_wait(quick, 0.0));  // its replay is over, though `held` has cleared the word
  require_error(gs_step_wait(held, 0.02), GS_TIMEOUT, "did not come");
  check(gs_step_replay(quick, rig.cu_stream()));
  require_error(gs_step_wait(quick, 0.02), GS_TIMEOUT, "did not come");
  __atomic_store_n(reinterpret_cast<uint32_t*>(rig.at(0)), 1, __ATOMIC_RELEASE);
  check(gs_step_wait(quick, kTimeoutS));
  check(gs_step_wait(held, kTimeoutS));
  gs_step_release(quick);
  gs_step_release(held);
}

void test_misuse(gs_driver* driver) {
  const Rig rig(driver);
  gs_list* list = nullptr;
  gs_step* step = nullptr;
  require_error(rig.try_list({make_op(static_cast<gs_op_kind>(77))}, &list), GS_ERROR_INVALID,
                "op 0: kind 77 is unknown");
  require_error(rig.try_list({make_op(GS_OP_RECORD, 5)}, &list), GS_ERROR_INVALID,
                "op 0 of 1 on stream 5: the list has 2");
  require_error(rig.try_list({make_value(GS_OP_FILL, rig.at(0), 256)}, &list), GS_ERROR_INVALID,
                "a fill's value is a byte");
  require_error(rig.try_list({make_copy(rig.at(4000), rig.at(0), 97)}, &list), GS_ERROR_DRIVER, "run past the end");
  require_error(rig.try_list({make_op(GS_OP_CALL)}, &list, {{nullptr, nullptr}}), GS_ERROR_INVALID, "function is NULL");
  check(rig.try_list({make_op(GS_OP_RECORD, 1, 0)}, &list));
  gs_step_desc desc = GS_STEP_DESC_INIT;
  require_error(gs_step_capture(list, &desc, &step), GS_ERROR_DRIVER, "has not joined it");
  desc.size = 8;
  require_error(gs_step_capture(list, &desc, &step), GS_ERROR_INVALID, "gs_step_desc.size is 8");
  gs_list_release(list);
  check(rig.try_list({}, &list));
  desc = GS_STEP_DESC_INIT;
  desc.batch_size = 0;
  require_error(gs_step_capture(list, &desc, &step), GS_ERROR_INVALID, "step shape 0x1: both numbers start at 1");
  desc = GS_STEP_DESC_INIT;
  desc.executor = "magic";
  require_error(gs_step_capture(list, &desc, &step), GS_ERROR_INVALID, "executor 'magic' is unknown");
  const gs_tensor foreign = {"x", 4096, 4};
  desc = GS_STEP_DESC_INIT;
  desc.outputs = &foreign;
  desc.num_outputs = 1;
  require_error(gs_step_capture(list, &desc, &step), GS_ERROR_DRIVER, "not in any memory of this driver");
  gs_list_release(list);
  const uint64_t nothing[8] = {};
  require_error(gs_step_open(reinterpret_cast<uintptr_t>(&nothing), &step), GS_ERROR_INVALID, "is no step");
  require_error(gs_step_open(0, &step), GS_ERROR_INVALID, "handle 0x0 is no step");
  require_error(gs_step_wait(nullptr, 1.0), GS_ERROR_INVALID, "step is NULL");
  gs_step_release(nullptr);
}

// Replays, waits, retains and releases of two steps of one order, from several threads.
void test_threads(gs_driver* driver) {
  const Rig rig(driver);
  std::atomic<int> num_calls{0};
  gs_order* order = nullptr;
  check(gs_order_create(driver, &order));
  gs_step_desc desc = GS_STEP_DESC_INIT;
  desc.order = order;
  gs_step* steps[2] = {};
  for (gs_step*& step : steps) step = rig.capture({make_op(GS_OP_CALL)}, {{&count, &num_calls}}, desc);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    gs_step* step = steps[thread % 2];
    gs_step_retain(step);
    threads.emplace_back([&rig, step, thread] {
      for (int i = 0; i < 100; ++i) {
        check(gs_step_replay(step, gs_stream_handle(thread < 2 ? rig.stream : rig.other)));
        check(gs_step_wait(step, kTimeoutS));
      }
      gs_step_release(step);
    });
  }
  for (gs_step* step : steps) gs_step_release(step);
  gs_order_release(order);
  for (std::thread& thread : threads) thread.join();
  require(num_calls == 400, "every replay ran");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s LIBRARY\n", argv[0]);
    return 2;
  }
  gs_driver* driver = nullptr;
  check(gs_driver_open(argv[1], 0, &driver));
  test_ops_of_all_kinds(driver);
  test_collectives(driver);
  test_buffers_and_shapes(driver);
  test_order_and_waits(driver);
  test_slots(driver);
  test_done_word(driver);
  test_a_word_of_two_steps(driver);
  test_misuse(driver);
  test_threads(driver);
  std::printf("embedding: all is well\n");
  return 0;
}
