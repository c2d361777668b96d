// Steps of one order: what comes after what, what slots hold, and when outputs may be read.
#include <thread>

#include "embed_rig.h"

namespace embed {

namespace {

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

void test_steps_of_one_order(gs_driver* driver) {
  test_order_and_waits(driver);
  test_slots(driver);
  test_done_word(driver);
  test_a_word_of_two_steps(driver);
  test_threads(driver);
}

}  // namespace embed
