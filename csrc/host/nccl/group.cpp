#include "group.h"

#include <chrono>
#include <climits>
#include <ctime>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace graphshard::hostnccl {

namespace {

constexpr long kSliceNs = 2000000;    // a local abort is seen within this
constexpr int kSlicesPerLookout = 8;  // a peer's death within this many

void sleep_on(const std::atomic<uint32_t>& word, uint32_t expected) {
  timespec timeout{0, kSliceNs};
  syscall(SYS_futex, &word, FUTEX_WAIT, expected, &timeout, nullptr, 0);
}

void wake(const std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

std::string of_ranks(int rank, int num_ranks) {
  return "rank " + std::to_string(rank) + " of " + std::to_string(num_ranks);
}

int checked_num_ranks(int num_ranks, int rank) {
  if (num_ranks < 1 || num_ranks > kMaxRanks || rank < 0 || rank >= num_ranks) {
    throw Failure(nccl::kInvalidArgument,
                  of_ranks(rank, num_ranks) + " is none; the host NCCL has at most " + std::to_string(kMaxRanks));
  }
  return num_ranks;
}

}  // namespace

Group::Group(const ncclUniqueId& id, int num_ranks, int rank)
    : segment_(id), num_ranks_(checked_num_ranks(num_ranks, rank)), rank_(rank) {
  int32_t agreed = 0;
  if (!segment_->num_ranks.compare_exchange_strong(agreed, num_ranks) && agreed != num_ranks) {
    throw Failure(nccl::kInvalidArgument, of_ranks(rank, num_ranks) + " meets ranks that are " +
                                              std::to_string(agreed) + " in all by the same unique id");
  }
  RankState absent = RankState::kAbsent;
  if (!cell(rank).state.compare_exchange_strong(absent, RankState::kJoining)) {
    throw Failure(nccl::kInvalidArgument, of_ranks(rank, num_ranks) + " is there already by the same unique id");
  }
  const ProcessId self = ProcessId::self();
  cell(rank).pid.store(self.pid);
  cell(rank).start_time.store(self.start_time);
  cell(rank).state.store(RankState::kJoined);
}

void Group::wait_for(int rank, uint32_t phase) const {
  const std::atomic<uint32_t>& word = cell(rank).phase;
  for (int slice = 0;; ++slice) {
    const uint32_t seen = word.load(std::memory_order_acquire);
    if (static_cast<int32_t>(seen - phase) >= 0) return;
    if (is_aborted()) {
      throw Failure(nccl::kInvalidUsage,
                    "the communicator was aborted while this rank waited for rank " + std::to_string(rank));
    }
    if (slice % kSlicesPerLookout == kSlicesPerLookout - 1) {
      const std::string lost = lost_peer();
      // One more look: it may have sent its message and left.
      if (!lost.empty() && word.load(std::memory_order_acquire) == seen) throw Failure(nccl::kRemoteError, lost);
      if (cell(rank).state.load() == RankState::kDestroyed && word.load(std::memory_order_acquire) == seen) {
        throw Failure(nccl::kRemoteError,
                      "rank " + std::to_string(rank) + " has destroyed its communicator; this rank waited for it");
      }
    }
    sleep_on(word, seen);
  }
}

std::vector<Message> Group::exchange(const Message& mine) {
  if (is_aborted()) throw Failure(nccl::kInvalidUsage, "the communicator was aborted");
  const uint32_t phase = cell(rank_).phase.load(std::memory_order_relaxed) + 1;
  for (size_t i = 0; i < kMessageWords; ++i) {
    cell(rank_).messages[phase % 2][i].store(mine[i], std::memory_order_relaxed);
  }
  cell(rank_).phase.store(phase, std::memory_order_release);
  wake(cell(rank_).phase);
  std::vector<Message> all(static_cast<size_t>(num_ranks_));
  for (int rank = 0; rank < num_ranks_; ++rank) {
    wait_for(rank, phase);
    for (size_t i = 0; i < kMessageWords; ++i) {
      all[static_cast<size_t>(rank)][i] = cell(rank).messages[phase % 2][i].load(std::memory_order_relaxed);
    }
  }
  if (phase == 1) segment_.close_descriptor();
  return all;
}

void Group::abort() {
  aborted_.store(true, std::memory_order_release);
  cell(rank_).state.store(RankState::kAborted);
}

void Group::leave() {
  RankState joined = RankState::kJoined;
  cell(rank_).state.compare_exchange_strong(joined, RankState::kDestroyed);  // an aborted one stays that
}

ProcessId Group::process_of(int rank) const { return {cell(rank).pid.load(), cell(rank).start_time.load()}; }

std::string Group::lost_peer() const {
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (rank == rank_) continue;
    const RankState state = cell(rank).state.load();
    if (state == RankState::kAborted) return "rank " + std::to_string(rank) + " has aborted its communicator";
    if (state == RankState::kJoined && !process_of(rank).is_alive()) {
      return "rank " + std::to_string(rank) + " is gone: its process " + std::to_string(process_of(rank).pid) +
             " has ended";
    }
  }
  return "";
}

void Group::describe(uint32_t header, const Message& words) {
  Description& place = segment_->descriptions[rank_][header % kNumDescriptions];
  const uint64_t key = (uint64_t{1} << 32) | header;
  if (place.key.load(std::memory_order_relaxed) == key) return;
  place.key.store(0, std::memory_order_release);
  for (size_t i = 0; i < kMessageWords; ++i) place.words[i].store(words[i], std::memory_order_release);
  place.key.store(key, std::memory_order_release);
}

bool Group::find_description(int rank, uint32_t header, Message* words) const {
  const Description& place = segment_->descriptions[rank][header % kNumDescriptions];
  const uint64_t key = (uint64_t{1} << 32) | header;
  if (place.key.load(std::memory_order_acquire) != key) return false;
  for (size_t i = 0; i < kMessageWords; ++i) (*words)[i] = place.words[i].load(std::memory_order_acquire);
  return place.key.load(std::memory_order_acquire) == key;
}

}  // namespace graphshard::hostnccl
