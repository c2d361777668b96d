// The ranks of a communicator as their hosts see them: who is there, and messages from each to all.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "process.h"
#include "segment.h"

namespace graphshard::hostnccl {

class Group {
 public:
  /// Takes `rank`'s place; kInvalidArgument if it is taken or `num_ranks` is not what others say.
  Group(const ncclUniqueId& id, int num_ranks, int rank);

  /// Every rank's message, by rank, once all have sent theirs. Blocks the host, bounded by `abort` alone; a peer that
  /// is gone, aborted or destroyed ends it with kRemoteError. Not for two threads of a rank at once.
  std::vector<Message> exchange(const Message& mine);
  /// From any thread: ends this rank's waiting exchange with kInvalidUsage, and is seen by peers.
  void abort();
  bool is_aborted() const { return aborted_.load(std::memory_order_acquire); }
  /// This rank's communicator ended in good order.
  void leave();
  /// Who can no longer take part, in words; empty if everybody can. A communicator destroyed in order is no loss.
  std::string lost_peer() const;

  /// For peers, and for this rank: what the call with this header is.
  void describe(uint32_t header, const Message& words);
  bool find_description(int rank, uint32_t header, Message* words) const;

  ProcessId process_of(int rank) const;
  int rank() const { return rank_; }
  int num_ranks() const { return num_ranks_; }

 private:
  RankCell& cell(int rank) const { return segment_->cells[rank]; }
  void wait_for(int rank, uint32_t phase) const;

  Segment segment_;
  const int num_ranks_;
  const int rank_;
  std::atomic<bool> aborted_{false};
};

}  // namespace graphshard::hostnccl
