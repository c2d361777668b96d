// What the tests of the C API share: checks, ops, and a driver's streams and memory with lists and steps made of them.
#pragma once

#include <graphshard.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace embed {

constexpr double kTimeoutS = 60.0;

inline void require(bool is_true, const char* what) {
  if (is_true) return;
  std::fprintf(stderr, "FAILED: %s (last error: %s)\n", what, gs_last_error());
  std::abort();
}

inline void check(gs_status status) { require(status == GS_OK, "a call succeeds"); }

inline void require_error(gs_status status, gs_status right, const std::string& part) {
  require(status == right, ("status of: " + part).c_str());
  require(std::string(gs_last_error()).find(part) != std::string::npos, part.c_str());
}

inline gs_op make_op(gs_op_kind kind, uint32_t stream = 0, uint32_t index = 0) {
  gs_op op = {};
  op.kind = kind;
  op.stream = stream;
  op.index = index;
  return op;
}

inline gs_op make_copy(uint64_t destination, uint64_t source, uint64_t num_bytes) {
  gs_op op = make_op(GS_OP_COPY);
  op.destination = destination;
  op.source = source;
  op.num_bytes = num_bytes;
  return op;
}

inline gs_op make_value(gs_op_kind kind, uint64_t address, uint32_t value) {
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

inline void count(void* counter) { ++*static_cast<std::atomic<int>*>(counter); }

// Steps that share slots: order, prefetches, words, threads (embed_order_test.cpp).
void test_steps_of_one_order(gs_driver* driver);

}  // namespace embed
