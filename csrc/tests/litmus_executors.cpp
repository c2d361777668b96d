// The host driver's executors and seeded orders: all respect the edges, and together they show a missing one.
#include <memory>
#include <set>
#include <vector>

#include "litmus.h"

using namespace graphshard::litmus;

namespace {

/// Two slots in turn: each unit is copied into its slot on one stream and summed on the other.
class PingPong {
 public:
  static constexpr size_t kUnits = 12;
  static constexpr size_t kBytes = 2048;

  explicit PingPong(bool with_gates) : shards_(kUnits * kBytes), slots_(2 * kBytes), sums_(kUnits) {
    for (size_t i = 0; i < kUnits * kBytes; ++i) shards_.bytes()[i] = static_cast<unsigned char>(i / kBytes + 1);
    for (size_t unit = 0; unit < kUnits; ++unit) sums_[unit].slot = slots_.bytes() + unit % 2 * kBytes;
    captured_ = std::make_unique<Captured>(compute_, [&] { capture(with_gates); });
  }

  /// Whether every unit was summed over its own bytes.
  bool is_right(const Order& order) {
    captured_->set_executor(order.executor, order.seed);
    for (Sum& sum : sums_) sum.value = 0;
    captured_->launch(compute_);
    OK(cu.stream_synchronize(compute_));
    for (size_t unit = 0; unit < kUnits; ++unit) {
      if (sums_[unit].value != kBytes * (unit + 1)) return false;
    }
    return true;
  }

 private:
  struct Sum {
    const unsigned char* slot = nullptr;
    size_t value = 0;
  };

  static void add_up(void* opaque) {
    auto* sum = static_cast<Sum*>(opaque);
    for (size_t i = 0; i < kBytes; ++i) sum->value += sum->slot[i];
  }

  void capture(bool with_gates) {
    fork(compute_, forked_, copies_);
    for (size_t unit = 0; unit < kUnits; ++unit) {
      const CUdeviceptr slot = slots_.address(unit % 2 * kBytes);
      if (with_gates && unit >= 2) OK(cu.stream_wait_event(copies_, gates_[unit % 2], 0));
      OK(cu.memcpy_async(slot, shards_.address(unit * kBytes), kBytes, copies_));
      fork(copies_, ready_, compute_);
      OK(cu.launch_host_func(compute_, add_up, &sums_[unit]));
      OK(cu.event_record(gates_[unit % 2], compute_));
    }
    fork(copies_, ready_, compute_);
  }

  const Stream compute_;
  const Stream copies_;
  const Event forked_;
  const Event ready_;
  const Event gates_[2];
  const Pinned shards_;
  const Pinned slots_;
  std::vector<Sum> sums_;
  std::unique_ptr<Captured> captured_;
};

}  // namespace

HOST_LITMUS(every_order_respects_the_edges) {
  PingPong program(/*with_gates=*/true);
  for (const Order& order : all_orders(200)) TRUE(program.is_right(order));
}

// A copy that is not held back by its slot's gate: creation order hides it, the seeded orders must not.
HOST_LITMUS(seeded_orders_show_a_missing_gate) {
  PingPong program(/*with_gates=*/false);
  TRUE(program.is_right({0, -1}));
  TRUE(!program.is_right({0, -2}));
  int num_caught = 0;
  for (int64_t seed = 0; seed < 50; ++seed) num_caught += program.is_right({0, seed}) ? 0 : 1;
  if (num_caught < 40) fail(__FILE__, __LINE__, std::to_string(num_caught) + " of 50 seeds showed it");
}

namespace {

struct Trace {
  std::vector<int> order;
};
struct Mark {
  Trace* trace;
  int number;
};
void mark(void* opaque) {
  auto* self = static_cast<Mark*>(opaque);
  self->trace->order.push_back(self->number);
}

}  // namespace

HOST_LITMUS(a_seed_gives_one_order_and_other_seeds_others) {
  const Stream streams[4];
  const Event forked;
  const Event joined;
  Trace trace;
  std::vector<Mark> marks;
  for (int i = 0; i < 16; ++i) marks.push_back({&trace, i});
  const Captured captured(streams[0], [&] {
    for (int i = 1; i < 4; ++i) fork(streams[0], forked, streams[i]);
    for (int i = 0; i < 16; ++i) OK(cu.launch_host_func(streams[i % 4], mark, &marks[i]));
    for (int i = 1; i < 4; ++i) fork(streams[i], joined, streams[0]);
  });
  const auto order_of = [&](int64_t seed) {
    captured.set_executor(0, seed);
    trace.order.clear();
    captured.launch(streams[0]);
    OK(cu.stream_synchronize(streams[0]));
    return trace.order;
  };
  std::set<std::vector<int>> orders;
  for (int64_t seed = 0; seed < 20; ++seed) {
    TRUE(order_of(seed) == order_of(seed));
    orders.insert(order_of(seed));
  }
  TRUE(orders.size() > 15);
  std::vector<int> creation(16);
  for (int i = 0; i < 16; ++i) creation[i] = i;
  TRUE(order_of(-1) == creation);
}

HOST_LITMUS(copies_run_in_pieces_with_others_between) {
  const Stream copying;
  const Stream looking;
  const Event forked;
  const Event joined;
  const Pinned from(1 << 16);
  const Pinned to(1 << 16);
  struct Look {
    const Pinned* bytes;
    bool* saw_part;
  };
  bool saw_part = false;
  Look look{&to, &saw_part};
  from.fill(1);
  const auto look_at = [](void* opaque) {
    const auto* self = static_cast<Look*>(opaque);
    const bool has_begun = self->bytes->bytes()[0] == 1;
    const bool has_ended = self->bytes->bytes()[self->bytes->size() - 1] == 1;
    if (has_begun && !has_ended) *self->saw_part = true;
  };
  const Captured captured(copying, [&] {
    fork(copying, forked, looking);
    OK(cu.memcpy_async(to.address(), from.address(), from.size(), copying));
    for (int i = 0; i < 8; ++i) OK(cu.launch_host_func(looking, look_at, &look));
    fork(looking, joined, copying);
  });
  for (int64_t seed = 0; seed < 20 && !saw_part; ++seed) {
    to.fill(0);
    captured.set_executor(0, seed);
    captured.launch(copying);
    OK(cu.stream_synchronize(copying));
    TRUE(to.is_all(1));
  }
  TRUE(saw_part);
}

HOST_LITMUS(an_executor_is_not_changed_under_a_launch) {
  const Stream stream;
  const Latch latch;
  const Captured captured(stream, [&] { latch.stall(stream); });
  captured.launch(stream);
  EXPECT(CUDA_ERROR_NOT_READY, cu.host_set_executor(captured.exec(), 1, -1));
  latch.set(1);
  OK(cu.stream_synchronize(stream));
  OK(cu.host_set_executor(captured.exec(), 1, -1));
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu.host_set_executor(captured.exec(), 2, -1));
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu.host_set_executor(captured.exec(), 0, -4));
}

HOST_LITMUS(many_threaded_execs_come_and_go) {
  const Stream origin;
  const Stream side;
  const Event forked;
  const Event joined;
  const Pinned bytes(128);
  for (unsigned char round = 0; round < 50; ++round) {
    const Captured captured(origin, [&] {
      fork(origin, forked, side);
      OK(cu.memset_8_async(bytes.address(0), round, 64, side));
      OK(cu.memset_8_async(bytes.address(64), round, 64, origin));
      fork(side, joined, origin);
    });
    captured.set_executor(1, -1);
    for (int launch = 0; launch < 3; ++launch) captured.launch(origin);
    if (round % 2 == 0) continue;  // destroyed while in flight
    OK(cu.stream_synchronize(origin));
    TRUE(bytes.is_all(round));
  }
}

// More chains than lanes: they share threads and are still right.
HOST_LITMUS(a_graph_wider_than_the_lanes) {
  const Stream stream;
  const Pinned bytes(64 * 40);
  CUgraph graph = nullptr;
  OK(cu.graph_create(&graph, 0));
  for (size_t i = 0; i < 40; ++i) {
    CUDA_MEMSET_NODE_PARAMS fill{bytes.address(64 * i), 0, 1, 1, 64, 1};
    CUgraphNode node = nullptr;
    OK(cu.graph_add_memset_node(&node, graph, nullptr, 0, &fill, cu.context));
  }
  CUgraphExec exec = nullptr;
  OK(cu.graph_instantiate(&exec, graph, 0));
  OK(cu.host_set_executor(exec, 1, -1));
  OK(cu.graph_launch(exec, stream));
  OK(cu.stream_synchronize(stream));
  TRUE(bytes.is_all(1));
  OK(cu.graph_exec_destroy(exec));
  OK(cu.graph_destroy(graph));
}
