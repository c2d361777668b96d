// The C API over a driver library: lists, steps, errors, lifetimes.
//
//   graphshard_embed_test LIBRARY
#include "embed_rig.h"

namespace embed {

namespace {

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
  require_error(rig.try_list({make_op(GS_OP_CALL)}, &list), GS_ERROR_INVALID, "op 0: call 0 of 0");
  gs_op narrow = make_copy(rig.at(256), rig.at(0), 9);
  narrow.kind = GS_OP_COPY_2D;
  narrow.destination_pitch = 16;
  narrow.source_pitch = 8;
  narrow.rows = 2;
  require_error(rig.try_list({narrow}, &list), GS_ERROR_INVALID, "op 0: a pitch is less than a row's 9 bytes");
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

// Events, words and lists of one driver in a step of another: refused, as two events of one number may both exist.
void test_parts_that_do_not_belong_together(gs_driver* driver, gs_driver* other) {
  const Rig rig(driver);
  const Rig elsewhere(other);
  gs_list* list = nullptr;
  gs_step* step = nullptr;
  check(rig.try_list({make_op(GS_OP_RECORD)}, &list));
  const auto refuse = [&](const gs_step_desc& desc, const std::string& part) {
    require_error(gs_step_capture(list, &desc, &step), GS_ERROR_INVALID, part);
  };
  gs_step_desc desc = GS_STEP_DESC_INIT;
  check(gs_order_create(other, &desc.order));
  refuse(desc, "the order is of driver");
  gs_order_release(desc.order);
  desc = GS_STEP_DESC_INIT;
  desc.done = elsewhere.memory;
  refuse(desc, "the word is of driver");
  desc = GS_STEP_DESC_INIT;
  check(elsewhere.try_list({}, &desc.prefetch, {}, nullptr, elsewhere.stream));
  refuse(desc, "the prefetch list is of driver");
  gs_list_release(desc.prefetch);
  check(rig.try_list({}, &desc.prefetch));
  refuse(desc, "a prefetch list has one stream, not 2");
  gs_list_release(desc.prefetch);
  check(rig.try_list({make_op(GS_OP_CALL)}, &desc.prefetch, {{&count, nullptr}}, nullptr, rig.other));
  refuse(desc, "calls index 0, Calls has 0 functions");
  gs_list_release(desc.prefetch);
  const gs_tensor twins[2] = {{"x", rig.at(0), 4}, {"x", rig.at(4), 4}};
  desc = GS_STEP_DESC_INIT;
  desc.inputs = twins;
  desc.num_inputs = 2;
  refuse(desc, "are called 'x'");
  gs_list_release(list);
}

// A gs_stream on which a step was replayed may be released before the step.
void test_streams_released_before_steps(gs_driver* driver) {
  const Rig rig(driver);
  std::atomic<int> num_calls{0};
  gs_step* step = rig.capture({make_op(GS_OP_CALL)}, {{&count, &num_calls}});
  for (int i = 0; i < 20; ++i) {
    gs_stream* stream = nullptr;
    check(gs_stream_create(driver, &stream));
    check(gs_step_replay(step, gs_stream_handle(stream)));
    gs_stream_release(stream);
    gs_memory* dropped = nullptr;  // whose end is fenced by all streams that are known
    check(gs_memory_allocate(driver, 64, 0, &dropped));
    gs_memory_release(dropped);
  }
  check(gs_step_wait(step, kTimeoutS));
  require(num_calls == 20, "every replay ran");
  gs_step_release(step);
}

}  // namespace

}  // namespace embed

int main(int argc, char** argv) {
  using namespace embed;
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s LIBRARY\n", argv[0]);
    return 2;
  }
  gs_driver* driver = nullptr;
  check(gs_driver_open(argv[1], 0, &driver));
  test_ops_of_all_kinds(driver);
  test_collectives(driver);
  test_buffers_and_shapes(driver);
  test_misuse(driver);
  gs_driver* again = nullptr;
  check(gs_driver_open(argv[1], 0, &again));
  require(again == driver, "a driver is opened once");
  const std::string path = argv[1];
  const size_t name = path.rfind('/') + 1;
  gs_driver* other = nullptr;  // one of another path
  check(gs_driver_open((path.substr(0, name) + "./" + path.substr(name)).c_str(), 0, &other));
  test_parts_that_do_not_belong_together(driver, other);
  test_streams_released_before_steps(driver);
  test_steps_of_one_order(driver);
  std::printf("embedding: all is well\n");
  return 0;
}
