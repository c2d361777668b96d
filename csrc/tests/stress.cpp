// Random programs over several streams, eagerly and captured under every executor, against a sequential run.
#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "litmus.h"

using namespace graphshard::litmus;

namespace {

constexpr size_t kBufferBytes = 640;
constexpr size_t kBuffers = 6;
constexpr size_t kStreams = 4;
constexpr size_t kOps = 60;

struct Op {
  enum class Kind { kCopy, kFill, kMix } kind;
  size_t stream;
  size_t to;
  size_t from;
  unsigned char value;
  std::vector<size_t> waits;  // earlier ops on other streams that conflict with this one
};

struct MixArguments {
  unsigned char* to;
  const unsigned char* from;
  unsigned char value;
};

void mix(void* opaque) {
  const auto* arguments = static_cast<const MixArguments*>(opaque);
  for (size_t i = 0; i < kBufferBytes; ++i) {
    arguments->to[i] = static_cast<unsigned char>(arguments->to[i] * 31 + arguments->from[i] + arguments->value);
  }
}

bool conflict(const Op& a, const Op& b) {
  const auto reads = [](const Op& op, size_t buffer) { return op.kind != Op::Kind::kFill && op.from == buffer; };
  return a.to == b.to || reads(a, b.to) || reads(b, a.to);
}

std::vector<Op> random_program(std::mt19937* random) {
  std::vector<Op> ops;
  const auto below = [random](size_t limit) { return (*random)() % limit; };
  for (size_t i = 0; i < kOps; ++i) {
    Op op{static_cast<Op::Kind>(below(3)),
          below(kStreams),
          below(kBuffers),
          below(kBuffers),
          static_cast<unsigned char>(below(256)),
          {}};
    if (op.from == op.to) op.from = (op.to + 1) % kBuffers;
    for (size_t before = 0; before < i; ++before) {
      if (ops[before].stream != op.stream && conflict(ops[before], op)) op.waits.push_back(before);
    }
    ops.push_back(op);
  }
  return ops;
}

class Machine {
 public:
  explicit Machine(const std::vector<Op>& ops)
      : ops_(ops), bytes_(kBuffers * kBufferBytes), events_(ops.size()), joins_(kStreams) {
    for (const Op& op : ops) {
      arguments_.push_back({bytes_.bytes() + op.to * kBufferBytes, bytes_.bytes() + op.from * kBufferBytes, op.value});
    }
  }

  void reset() {
    for (size_t i = 0; i < bytes_.size(); ++i) bytes_.bytes()[i] = static_cast<unsigned char>(i * 7 + i / 256);
  }

  std::vector<unsigned char> run_in_turn() {
    reset();
    for (size_t i = 0; i < ops_.size(); ++i) {
      const MixArguments& arguments = arguments_[i];
      if (ops_[i].kind == Op::Kind::kCopy) std::memcpy(arguments.to, arguments.from, kBufferBytes);
      if (ops_[i].kind == Op::Kind::kFill) std::memset(arguments.to, arguments.value, kBufferBytes);
      if (ops_[i].kind == Op::Kind::kMix) mix(&arguments_[i]);
    }
    return contents();
  }

  /// Fork all streams from the first, issue, join them.
  void issue() {
    OK(cu.event_record(joins_[0], streams_[0]));
    for (size_t i = 1; i < kStreams; ++i) OK(cu.stream_wait_event(streams_[i], joins_[0], 0));
    for (size_t i = 0; i < ops_.size(); ++i) {
      for (size_t before : ops_[i].waits) OK(cu.stream_wait_event(streams_[ops_[i].stream], events_[before], 0));
      issue_op(i);
      OK(cu.event_record(events_[i], streams_[ops_[i].stream]));
    }
    for (size_t i = 1; i < kStreams; ++i) fork(streams_[i], joins_[i], streams_[0]);
  }

  std::vector<unsigned char> finish() {
    OK(cu.stream_synchronize(streams_[0]));
    return contents();
  }

  CUstream origin() const { return streams_[0]; }

 private:
  void issue_op(size_t index) {
    const Op& op = ops_[index];
    CUstream stream = streams_[op.stream];
    const CUdeviceptr to = bytes_.address(op.to * kBufferBytes);
    if (op.kind == Op::Kind::kCopy)
      OK(cu.memcpy_async(to, bytes_.address(op.from * kBufferBytes), kBufferBytes, stream));
    if (op.kind == Op::Kind::kFill) OK(cu.memset_8_async(to, op.value, kBufferBytes, stream));
    if (op.kind == Op::Kind::kMix) OK(cu.launch_host_func(stream, mix, &arguments_[index]));
  }

  std::vector<unsigned char> contents() const { return {bytes_.bytes(), bytes_.bytes() + bytes_.size()}; }

  const std::vector<Op>& ops_;
  const Pinned bytes_;
  const Stream streams_[kStreams];
  std::vector<Event> events_;
  std::vector<Event> joins_;
  std::vector<MixArguments> arguments_;
};

}  // namespace

LITMUS(random_programs_agree_with_a_sequential_run) {
  std::mt19937 random(7);
  for (int round = 0; round < 40; ++round) {
    const std::vector<Op> ops = random_program(&random);
    Machine machine(ops);
    const std::vector<unsigned char> expected = machine.run_in_turn();
    machine.reset();
    machine.issue();
    TRUE(machine.finish() == expected);
    const Captured captured(machine.origin(), [&machine] { machine.issue(); });
    for (const Order& order : all_orders(8)) {
      captured.set_executor(order.executor, order.seed);
      machine.reset();
      captured.launch(machine.origin());
      TRUE(machine.finish() == expected);
    }
  }
}
