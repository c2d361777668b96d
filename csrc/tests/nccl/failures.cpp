// Ranks that skip, swap, abort or never come: who is told, and who is freed.
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ranks.h"

using namespace graphshard::litmus;
namespace nccl = graphshard::nccl;

namespace {

constexpr size_t kChunkBytes = 4096;
constexpr int kUnits = 6;

/// What a stuck rank uses, which is never freed: a stream stands in it for as long as the process lives.
struct Rank {
  Rank(const ncclUniqueId& id, int num_ranks, int self)
      : comm(id, num_ranks, self),
        shards(kUnits * kChunkBytes, comm),
        slots(kUnits * kChunkBytes * static_cast<size_t>(num_ranks), comm),
        slot_bytes(kChunkBytes * static_cast<size_t>(num_ranks)) {}

  int gather_unit(int unit) const {
    const auto index = static_cast<size_t>(unit);
    return gather(shards.bytes(index * kChunkBytes), slots.bytes(index * slot_bytes), kChunkBytes, comm, stream);
  }
  void warm_up() const {
    NCCL_OK(gather_unit(0));
    OK(cu.stream_synchronize(stream));
  }
  void gather_all() const {
    for (int unit = 0; unit < kUnits; ++unit) NCCL_OK(gather_unit(unit));
  }

  Stream stream;
  Comm comm;
  NcclMemory shards;
  NcclMemory slots;
  size_t slot_bytes;
};

bool mentions(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

/// All ranks up to here.
class Meeting {
 public:
  explicit Meeting(int num_ranks) : num_ranks_(num_ranks) {}
  void wait() {
    const int round = round_.load();
    if (arrived_.fetch_add(1) + 1 == num_ranks_) {
      arrived_.store(0);
      round_.fetch_add(1);
    }
    while (round_.load() == round) std::this_thread::sleep_for(std::chrono::microseconds(100));
  }

 private:
  const int num_ranks_;
  std::atomic<int> arrived_{0};
  std::atomic<int> round_{0};
};

/// Abort in a thread of its own, as whoever must not hang does it.
std::shared_ptr<std::atomic<bool>> abort_aside(ncclComm_t comm) {
  auto ended = std::make_shared<std::atomic<bool>>(false);
  std::thread([comm, ended] {
    nc.comm_abort(comm);
    ended->store(true);
  }).detach();
  return ended;
}

void await(const std::atomic<bool>& flag) {
  while (!flag.load()) std::this_thread::sleep_for(std::chrono::microseconds(200));
}

/// What a slot holds while gathers into it stand in a stream. Whoever lets them pass does so through a peer's mapping
/// of the flag words: at another address, where ThreadSanitizer sees no order.
__attribute__((no_sanitize("thread"))) std::vector<unsigned char> peek(const unsigned char* bytes, size_t num_bytes) {
  std::vector<unsigned char> copy(num_bytes);
  const volatile unsigned char* from = bytes;
  unsigned char* to = copy.data();
  for (size_t i = 0; i < num_bytes; ++i) to[i] = from[i];
  return copy;
}

void expect_unlike(const Rank& rank, int self) {
  EQUAL(nccl::kInvalidUsage, rank.comm.await_async_error());
  const std::string text = rank.comm.last_error();
  // Rank 1 differs from each other; of the others each sees rank 1.
  const std::string peer = self == 1 ? "rank " : "rank 1 waits in a gather of 4096 bytes";
  TRUE(mentions(text, peer) && mentions(text, "this rank (" + std::to_string(self) + ") in a gather of 4096 bytes"));
}

/// Eager gathers of all units, one of rank 1's staged away: every rank is told, no slot has wrong bytes, and aborts
/// free all streams.
void run_staged_eagerly(const char* spec) {
  const int num_ranks = 3;
  const ncclUniqueId id = new_unique_id();
  Meeting meeting(num_ranks);
  run_ranks(num_ranks, [&](int self) {
    Rank rank(id, num_ranks, self);
    for (int unit = 0; unit < kUnits; ++unit) {
      fill_chunk(rank.shards.bytes(static_cast<size_t>(unit) * kChunkBytes), kChunkBytes, self, unit, 1);
    }
    rank.warm_up();
    meeting.wait();
    if (self == 0) nc.stage(spec);
    meeting.wait();
    rank.gather_all();
    expect_unlike(rank, self);
    for (int unit = 0; unit < kUnits; ++unit) {
      const auto slot = peek(rank.slots.bytes(static_cast<size_t>(unit) * rank.slot_bytes), rank.slot_bytes);
      const bool is_whole = holds_unit(slot.data(), kChunkBytes, num_ranks, unit, 1);
      const bool is_untouched = slot == std::vector<unsigned char>(rank.slot_bytes);
      TRUE(unit < 2 ? is_whole : is_untouched);  // call 3 is unit 2
    }
    meeting.wait();
    await(*abort_aside(rank.comm));
    rank.comm.release();
    OK(cu.stream_synchronize(rank.stream));
  });
  nc.stage("");
}

}  // namespace

// Where the others gather the third unit, rank 1 is in the next one's gather, of equal size.
LITMUS(a_skipped_gather_stops_every_rank_and_is_named) { run_staged_eagerly("skip:rank=1,call=3"); }

LITMUS(swapped_gathers_stop_every_rank_and_are_named) { run_staged_eagerly("swap:rank=1,call=3"); }

// The same in a graph; and an abort cannot free it, as on a GPU.
LITMUS(a_captured_skip_is_named_and_cannot_be_aborted) {
  const ncclUniqueId id = new_unique_id();
  Meeting meeting(2);
  run_ranks(2, [&](int self) {
    auto& rank = *new Rank(id, 2, self);
    rank.warm_up();
    meeting.wait();
    if (self == 0) nc.stage("skip:rank=1,call=3");
    meeting.wait();
    auto& captured = *new Captured(rank.stream, [&] { rank.gather_all(); });
    meeting.wait();
    nc.stage("");
    captured.launch(rank.stream);
    expect_unlike(rank, self);
    meeting.wait();
    const auto ended = abort_aside(rank.comm);
    EXPECT(CUDA_ERROR_NOT_READY, cu.host_stream_wait(rank.stream, 20000000));
    TRUE(!ended->load());
    // Meanwhile calls are refused and do not wait for it.
    int result = nccl::kSuccess;
    do {
      result = rank.gather_unit(0);  // until the abort has begun
    } while (result == nccl::kSuccess);
    EQUAL(nccl::kInvalidUsage, result);
  });
}

// One rank replays a graph where the other runs eagerly. Neither is let through.
LITMUS(eager_against_captured_is_named) {
  const ncclUniqueId id = new_unique_id();
  Meeting meeting(2);
  run_ranks(2, [&](int self) {
    auto& rank = *new Rank(id, 2, self);
    rank.warm_up();
    auto& captured = *new Captured(rank.stream, [&] { NCCL_OK(rank.gather_unit(1)); });
    captured.launch(rank.stream);
    OK(cu.stream_synchronize(rank.stream));
    fill_chunk(rank.shards.bytes(kChunkBytes), kChunkBytes, self, 1, 1);
    if (self == 0) {
      captured.launch(rank.stream);
    } else {
      NCCL_OK(rank.gather_unit(1));
    }
    EQUAL(nccl::kInvalidUsage, rank.comm.await_async_error());
    TRUE(mentions(rank.comm.last_error(), self == 0 ? "(eager), this rank (0)" : "(captured), this rank (1)"));
    TRUE(!holds_unit(rank.slots.bytes(rank.slot_bytes), kChunkBytes, 2, 1, 1));
    meeting.wait();
  });
}

// A peer that never comes is no error by itself; one that aborted is.
LITMUS(an_aborted_peer_is_a_remote_error) {
  const ncclUniqueId id = new_unique_id();
  run_ranks(3, [&](int self) {
    Rank rank(id, 3, self);
    rank.warm_up();
    if (self == 2) {
      NCCL_OK(nc.comm_abort(rank.comm));
      rank.comm.release();
      return;
    }
    rank.gather_all();
    EQUAL(nccl::kRemoteError, rank.comm.await_async_error());
    // Rank 2's abort is seen first, unless the other survivor was quicker with its own.
    TRUE(mentions(rank.comm.last_error(), "has aborted"));
    NCCL_OK(nc.comm_abort(rank.comm));
    const ncclComm_t stale = rank.comm;
    rank.comm.release();
    NCCL_EXPECT(nccl::kInvalidArgument, nc.comm_abort(stale));
    OK(cu.stream_synchronize(rank.stream));
  });
}

LITMUS(an_abort_ends_calls_that_block_the_host) {
  const ncclUniqueId id = new_unique_id();
  ncclComm_t comm = nullptr;
  int result = nccl::kSuccess;
  std::thread blocked([&] {
    nccl::Config config = zero_cta();
    result = nc.comm_init_rank_config(&comm, 2, id, 0, &config);  // rank 1 never comes
  });
  ncclComm_t seen = nullptr;
  while (seen == nullptr) seen = __atomic_load_n(&comm, __ATOMIC_ACQUIRE);
  NCCL_OK(nc.comm_abort(seen));
  blocked.join();
  EQUAL(nccl::kInvalidUsage, result);

  const ncclUniqueId second = new_unique_id();
  run_ranks(2, [&](int self) {
    Comm first_use(second, 2, self);
    if (self == 1) return;  // destroys its communicator: rank 0 waits for somebody who will not come
    const Stream stream;
    const NcclMemory memory(3 * kChunkBytes);
    NCCL_EXPECT(nccl::kRemoteError, gather(memory.bytes(), memory.bytes(kChunkBytes), kChunkBytes, first_use, stream));
    TRUE(mentions(first_use.last_error(), "rank 1"));
  });
}

// Two ranks, an early version. A bounded wait sees it, an abort ends it.
LITMUS(the_two_rank_first_use_hang) {
  const Staged staged("version=22809;first_use_hang");
  const ncclUniqueId id = new_unique_id();
  run_ranks(2, [&](int self) {
    Rank rank(id, 2, self);
    NCCL_OK(rank.gather_unit(0));
    EXPECT(CUDA_ERROR_NOT_READY, cu.host_stream_wait(rank.stream, 20000000));
    await(*abort_aside(rank.comm));
    rank.comm.release();
    OK(cu.stream_synchronize(rank.stream));
  });
  const ncclUniqueId three = new_unique_id();
  run_ranks(3, [&](int self) { Rank(three, 3, self).warm_up(); });  // not with three
  nc.stage("version=23102;first_use_hang");
  const ncclUniqueId fixed = new_unique_id();
  run_ranks(2, [&](int self) { Rank(fixed, 2, self).warm_up(); });
}

LITMUS(a_staged_abort_hangs_until_it_is_cleared) {
  Comm comm(new_unique_id(), 1, 0);
  std::shared_ptr<std::atomic<bool>> ended;
  {
    const Staged staged("abort_hang");
    ended = abort_aside(comm);
    comm.release();
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    TRUE(!ended->load());
  }
  await(*ended);
}

// Destroy waits for what is in flight.
LITMUS(destroy_waits_for_eager_gathers) {
  const ncclUniqueId id = new_unique_id();
  const Latch latch;
  std::atomic<int> num_destroyed{0};
  run_ranks(2, [&](int self) {
    Rank rank(id, 2, self);
    rank.warm_up();
    fill_chunk(rank.shards.bytes(), kChunkBytes, self, 0, 3);
    latch.stall(rank.stream);
    NCCL_OK(rank.gather_unit(0));
    if (self == 0) {
      std::thread([&] { latch.set(1); }).detach();
    }
    NCCL_OK(nc.comm_finalize(rank.comm));
    TRUE(holds_unit(rank.slots.bytes(), kChunkBytes, 2, 0, 3));
    num_destroyed.fetch_add(1);
  });
  EQUAL(2, num_destroyed.load());
}
