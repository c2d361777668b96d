// Threads as ranks over one NCCL library: communicators opened, used, watched from another thread, and ended in each
// way, with calls that are left behind.
//
//   graphshard_communicator_stress DRIVER NCCL [ROUNDS]
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "check.h"
#include "nccl/communicator.h"
#include "runtime/op_list.h"

namespace graphshard {

namespace {

constexpr int kNumRanks = 3;
constexpr size_t kChunkBytes = 4096;
constexpr int64_t kTimeoutNs = 60'000'000'000;
const Limit kLimit{60.0};
const Limit kNone{0.0};

enum class End { kDestroy, kAbort, kDrop, kLeaveBehind };
constexpr int kNumEnds = 4;

// Asks for errors until it dies, as a watchdog does.
class Watcher {
 public:
  explicit Watcher(std::shared_ptr<Communicator> communicator)
      : thread_([this, communicator = std::move(communicator)] {
          while (!is_over_.load()) {
            communicator->async_error();
            std::this_thread::yield();
          }
        }) {}
  ~Watcher() {
    is_over_.store(true);
    thread_.join();
  }

 private:
  std::atomic<bool> is_over_{false};
  std::thread thread_;
};

Op gather_op(const Memory& window, const Memory& shard) {
  Op op;
  op.kind = OpKind::kAllGather;
  op.destination = window.address();
  op.source = shard.address();
  op.num_bytes = kChunkBytes;
  return op;
}

void require_gathered(Memory& window) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(window.address());
  for (size_t i = 0; i < kNumRanks * kChunkBytes; ++i) {
    require(bytes[i] == i / kChunkBytes + 1, "every rank's chunk is in its place");
  }
  std::memset(reinterpret_cast<void*>(window.address()), 0, window.num_bytes());
}

void run_rank(const std::shared_ptr<NcclLibrary>& library, const ncclUniqueId& id, int rank, End end,
              std::atomic<int>& num_done) {
  auto communicator = Communicator::open(library, id, kNumRanks, rank, "stress", kLimit);
  auto stream = std::make_shared<Stream>(library->driver());
  const auto allocate = [&](size_t num_bytes) { return communicator->adopt(communicator->borrow(num_bytes, kLimit)); };
  auto window = allocate(kNumRanks * kChunkBytes);
  auto shard = allocate(kChunkBytes);
  communicator->register_window(*window, kLimit);
  communicator->register_window(*shard, kLimit);
  std::memset(reinterpret_cast<void*>(shard->address()), rank + 1, kChunkBytes);
  {
    const Watcher watcher(communicator);
    communicator->all_gather(window->address(), shard->address(), kChunkBytes, *stream, kLimit);
    require(stream->wait_idle(kTimeoutNs), "the first gather ends");
    require_gathered(*window);
    OpList list(library->driver(), {stream}, 0, {gather_op(*window, *shard)}, {communicator});
    auto calls = std::make_shared<Calls>(std::vector<std::pair<Calls::Function, void*>>{},
                                         std::make_shared<CallErrors>(), nullptr);
    auto exec = list.capture(calls, {}, 60.0)->instantiate("", -1);
    exec->launch(*stream);
    require(stream->wait_idle(kTimeoutNs), "the captured gather ends");
    require_gathered(*window);
    require_error<NcclError>([&] { communicator->destroy(kLimit); }, "graphs with its collectives are alive");
  }
  auto late = allocate(kChunkBytes);
  num_done.fetch_add(1);  // who aborts breaks the others' communicators
  while (num_done.load() < kNumRanks) std::this_thread::yield();
  if (end == End::kLeaveBehind && rank == 0) {
    require_error<NcclError>([&] { communicator->register_window(*late, kNone); }, "did not return");
  }
  window = shard = nullptr;
  if (end == End::kDestroy) {
    require(communicator->wait_unheld(kTimeoutNs), "dropped graphs go in time");
    require(communicator->destroy(kLimit), "a communicator is destroyed in time");
  }
  if (end == End::kAbort || end == End::kLeaveBehind) require(communicator->abort(kLimit), "an abort ends in time");
}

void run_round(const std::shared_ptr<NcclLibrary>& library, End end) {
  const ncclUniqueId id = library->unique_id();
  std::atomic<int> num_done{0};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kNumRanks; ++rank) {
    threads.emplace_back([&, rank] { run_rank(library, id, rank, end, num_done); });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace

}  // namespace graphshard

int main(int argc, char** argv) {
  using namespace graphshard;
  if (argc < 3) {
    std::fprintf(stderr, "usage: %s DRIVER NCCL [ROUNDS]\n", argv[0]);
    return 2;
  }
  const int num_rounds = argc > 3 ? std::atoi(argv[3]) : 20;
  Driver& driver = Driver::open(argv[1], 0);
  auto library = NcclLibrary::load(argv[2], driver);
  for (int round = 0; round < num_rounds; ++round) run_round(library, static_cast<End>(round % kNumEnds));
  while (driver.num_retired() > 0) {
    driver.reap();
    std::this_thread::yield();
  }
  HelperCall::drain(60.0);
  std::printf("%d rounds on %d ranks\n", num_rounds, kNumRanks);
  return 0;
}
