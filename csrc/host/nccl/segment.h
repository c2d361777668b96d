// What the ranks of one communicator share before they share any window: a memfd that its unique id names.
//
// Peers open it through /proc/PID/fd, so nothing has a name that could outlive the processes.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "failure.h"

namespace graphshard::hostnccl {

constexpr int kMaxRanks = 64;
constexpr size_t kMessageWords = 6;
constexpr size_t kNumDescriptions = 4096;
using Message = std::array<uint64_t, kMessageWords>;

enum class RankState : uint32_t { kAbsent = 0, kJoining, kJoined, kDestroyed, kAborted };

struct RankCell {
  std::atomic<RankState> state;
  std::atomic<uint32_t> phase;  // exchanges that this rank has entered
  std::atomic<int64_t> pid;
  std::atomic<uint64_t> start_time;
  std::atomic<uint64_t> messages[2][kMessageWords];  // by parity of the phase: the last one may still be read
};

/// A call that a rank has issued, found by its header, so that peers can say in words what a rank waits in.
struct Description {
  std::atomic<uint64_t> key;  // the header plus 2^32; 0: none
  std::atomic<uint64_t> words[kMessageWords];
};

struct SegmentLayout {
  std::atomic<uint64_t> nonce;
  std::atomic<int32_t> num_ranks;
  std::atomic<uint32_t> padding;
  RankCell cells[kMaxRanks];
  Description descriptions[kMaxRanks][kNumDescriptions];  // pages that nobody writes take no memory
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<RankState>::is_always_lock_free,
              "shared between processes");

class Segment {
 public:
  /// A new segment, held open by this process until its ranks are complete.
  static ncclUniqueId create();
  /// Maps the segment that `id` names; kInvalidArgument or kSystemError if there is none.
  explicit Segment(const ncclUniqueId& id);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  SegmentLayout* operator->() const { return layout_; }
  /// All ranks have mapped it: whoever holds the descriptor may let go.
  void close_descriptor() const;

 private:
  SegmentLayout* layout_ = nullptr;
  uint64_t nonce_ = 0;
};

}  // namespace graphshard::hostnccl
