// Threads as ranks over one driver: lists issued, captured, replayed and dropped while their work is still enqueued.
//
//   graphshard_runtime_stress LIBRARY [ROUNDS] [HANDOFFS]
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#include "check.h"
#include "runtime/control_page.h"
#include "runtime/memory.h"
#include "runtime/op_list.h"

namespace graphshard {

namespace {

constexpr int kNumThreads = 4;
constexpr size_t kUnitBytes = 4096;
constexpr size_t kNumUnits = 6;
constexpr int64_t kTimeoutNs = 60'000'000'000;

// What a compute op sees: the first byte of a slot, added up.
struct Reader {
  const unsigned char* slot = nullptr;
  uint64_t sum = 0;

  static void run(void* self) {
    auto& reader = *static_cast<Reader*>(self);
    reader.sum += reader.slot[0] + reader.slot[kUnitBytes - 1];
  }
};

std::vector<Op> ping_pong(CUdeviceptr shard, CUdeviceptr slots) {
  const auto event = [](OpKind kind, uint32_t stream, size_t index) {
    Op op;
    op.kind = kind;
    op.stream = stream;
    op.index = static_cast<uint32_t>(index);
    return op;
  };
  std::vector<Op> ops{event(OpKind::kRecord, 0, 2 * kNumUnits), event(OpKind::kWait, 1, 2 * kNumUnits)};
  for (size_t unit = 0; unit < kNumUnits; ++unit) {
    if (unit >= 2) ops.push_back(event(OpKind::kWait, 1, 2 * (unit - 2) + 1));
    Op copy = event(OpKind::kCopy, 1, 0);
    copy.destination = slots + (unit % 2) * kUnitBytes;
    copy.source = shard + unit * kUnitBytes;
    copy.num_bytes = kUnitBytes;
    ops.push_back(copy);
    ops.push_back(event(OpKind::kRecord, 1, 2 * unit));
    ops.push_back(event(OpKind::kWait, 0, 2 * unit));
    ops.push_back(event(OpKind::kCall, 0, unit % 2));
    ops.push_back(event(OpKind::kRecord, 0, 2 * unit + 1));
  }
  return ops;
}

// One rank's round: the same list eagerly and captured; everything is dropped before the streams are done.
void run_round(Driver& driver, int round) {
  auto readers = std::make_shared<std::array<Reader, 2>>();
  auto compute = std::make_shared<Stream>(driver);
  Event done(driver, false);
  {
    auto copy = std::make_shared<Stream>(driver);
    auto shard = Memory::allocate(driver, kNumUnits * kUnitBytes, true);
    auto slots = Memory::allocate(driver, 2 * kUnitBytes, false);
    std::memset(reinterpret_cast<void*>(shard->address()), 1 + round % 100, shard->num_bytes());
    std::vector<std::pair<Calls::Function, void*>> functions;
    for (size_t slot = 0; slot < 2; ++slot) {
      auto& reader = (*readers)[slot];
      reader.slot = reinterpret_cast<const unsigned char*>(slots->address() + slot * kUnitBytes);
      functions.emplace_back(&Reader::run, &reader);
    }
    auto calls = std::make_shared<Calls>(functions, std::make_shared<CallErrors>(), readers);
    OpList list(driver, {compute, copy}, 2 * kNumUnits + 1, ping_pong(shard->address(), slots->address()));
    auto exec = list.capture(calls, {}, 60.0)->instantiate(round % 2 == 0 ? "cooperative" : "threaded", -1);
    list.issue(calls, 0, list.size());
    exec->launch(*compute);
    list.issue(calls, 0, list.size());
    exec->launch(*compute);
    compute->record(done);
  }
  require(done.wait(kTimeoutNs), "a round ends in time");
  const uint64_t right = uint64_t{4} * kNumUnits * 2 * static_cast<uint64_t>(1 + round % 100);
  require((*readers)[0].sum + (*readers)[1].sum == right, "every call saw the bytes of its unit");
}

void run_ranks(Driver& driver, int num_rounds) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kNumThreads; ++rank) {
    threads.emplace_back([&driver, num_rounds, rank] {
      for (int round = 0; round < num_rounds; ++round) run_round(driver, round + rank);
    });
  }
  for (auto& thread : threads) thread.join();
  while (driver.num_retired() > 0) {
    driver.reap();
    std::this_thread::yield();
  }
}

// Plain payloads announced by a page's step: right only because the step is released and acquired.
void hand_off(size_t num_bytes, uint64_t num_handoffs) {
  auto page = ControlPage::create();
  auto reply = ControlPage::create();
  std::vector<uint64_t> payload(num_bytes / sizeof(uint64_t));
  std::thread reader([&] {
    for (uint64_t step = 1; step <= num_handoffs; ++step) {
      while (page->step() < step) std::this_thread::yield();
      for (uint64_t word : payload) require(word == step, "the payload of the step announced");
      reply->set_progress(step, 0);
    }
  });
  for (uint64_t step = 1; step <= num_handoffs; ++step) {
    for (uint64_t& word : payload) word = step;
    page->set_progress(step, 0);
    while (reply->step() < step) std::this_thread::yield();
  }
  reader.join();
}

}  // namespace

}  // namespace graphshard

int main(int argc, char** argv) {
  using namespace graphshard;
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s LIBRARY [ROUNDS] [HANDOFFS]\n", argv[0]);
    return 2;
  }
  const int num_rounds = argc > 2 ? std::atoi(argv[2]) : 50;
  const auto num_handoffs = static_cast<uint64_t>(argc > 3 ? std::atoll(argv[3]) : 100'000);
  run_ranks(Driver::open(argv[1], 0), num_rounds);
  hand_off(64, num_handoffs);
  hand_off(4096, num_handoffs / 10);
  std::printf("%d rounds on %d threads, %llu hand-offs\n", num_rounds, kNumThreads,
              static_cast<unsigned long long>(num_handoffs));
  return 0;
}
