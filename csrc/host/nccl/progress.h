// What a rank's flag words say to its host, and the words of its own that an abort writes.
#pragma once

#include <cstdint>
#include <string>

#include "group.h"
#include "runtime/flags.h"

namespace graphshard::hostnccl {

/// Stores and wakes who sleeps on the word, streams among them.
void set_word(CUdeviceptr address, uint32_t value);

class Progress {
 public:
  explicit Progress(const FlagBarrier& flags) : flags_(flags) {}

  /// A captured call of this rank has begun and not passed its exit.
  bool is_captured_busy() const;
  /// A peer that waits in another call than this rank does, in words; empty if there is none. Blocks for 1 ms to look
  /// twice before it says so.
  std::string unlike_peer(const Group& group) const;
  /// Lets every eager wait of this rank up to `sequence` pass, as of now; to be repeated until it is idle.
  void release_eager(uint32_t sequence) const;

 private:
  struct Waiting {
    uint32_t flag = 0;
    uint32_t header = 0;
    int peer = 0;
    uint32_t peer_header = 0;
    FlagMode peer_mode = FlagMode::kEager;

    bool operator==(const Waiting& other) const;
  };
  bool is_in(int peer, FlagMode mode, FlagMode own_mode, uint32_t own_flag) const;
  bool find_unlike(FlagMode mode, Waiting* found) const;
  uint32_t load(int writer, FlagWord word) const;
  void store(int writer, FlagWord word, uint32_t value) const;

  const FlagBarrier& flags_;
};

}  // namespace graphshard::hostnccl
