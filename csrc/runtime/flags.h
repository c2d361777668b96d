// The barrier that ranks' collectives stand between: flag words in every rank's memory, written and awaited by streams.
//
// Pure: lists of value operations from addresses, a rank and a mode. Whoever issues them picks the stream.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace graphshard {

// Note [flag protocol]: rank w writes only into its own cell of each rank's area, and each rank waits only for words of
// its own area. A gather has two barriers, an entry (everybody's destination may be written) and an exit (everybody's
// writes have arrived), each with a word of its own. A rank writes the next entry word only after an exit that its peer
// took part in after it had seen the last one, and the other way round: no word is overwritten before it was read.
//
// Eager calls write a sequence number and wait for at least that. A graph's values are constants: captured calls write
// 1, wait for exactly 1 and reset the words that they waited for. The modes share no word, so that a sequence number
// left behind by an eager call does not open a captured barrier. All ranks use the same mode for the same call.
//
// Beside its entry flag a rank writes a header, a hash of what it is about to do, and each rank waits for its own value
// there: a rank that skipped or swapped calls stops all ranks at the entry, before a byte is moved.
enum class FlagMode : int { kEager = 0, kCaptured = 1 };

// The words of one writer's cell in one owner's area.
enum class FlagWord : int {
  kEntryEager = 0,
  kEntryCaptured = 1,
  kExitEager = 2,
  kExitCaptured = 3,
  kHeaderEager = 4,
  kHeaderCaptured = 5,
  // Of the owner's own cell only, for whoever watches. There the entry words say "waits at an entry" while not 0, and
  // the headers what the last entry was.
  kBusyCaptured = 6,  // 1 from a captured call's entry to its exit
  kEnteredEager = 7,  // the sequence number of the last eager call whose entry was passed
};

constexpr size_t kFlagCellBytes = 64;  // no two writers share a cache line

constexpr size_t flag_area_bytes(int world_size) { return kFlagCellBytes * static_cast<size_t>(world_size); }

constexpr FlagWord entry_word(FlagMode mode) { return static_cast<FlagWord>(static_cast<int>(mode)); }
constexpr FlagWord exit_word(FlagMode mode) { return static_cast<FlagWord>(2 + static_cast<int>(mode)); }
constexpr FlagWord header_word(FlagMode mode) { return static_cast<FlagWord>(4 + static_cast<int>(mode)); }

// One side of a barrier: a batch of writes, then a batch of waits (and resets). Neither is longer than
// 3 * world_size + 1, and a batch may hold 256: world sizes up to 85.
struct FlagOps {
  std::vector<CUstreamBatchMemOpParams> writes;
  std::vector<CUstreamBatchMemOpParams> waits;
};

class FlagBarrier {
 public:
  // `areas`: every rank's area of flag_area_bytes, by rank, zero at first, where this rank's streams address it.
  FlagBarrier(std::vector<CUdeviceptr> areas, int rank);

  // `sequence`, never 0, counts a communicator's calls, captured ones too; `header` is equal on all ranks of a call.
  FlagOps entry(FlagMode mode, uint32_t sequence, uint32_t header) const;
  FlagOps exit(FlagMode mode, uint32_t sequence) const;

  // The address of `word` in `writer`'s cell of `owner`'s area.
  CUdeviceptr address(int owner, int writer, FlagWord word) const;

  int rank() const { return rank_; }
  int world_size() const { return static_cast<int>(areas_.size()); }
  // The peers in the order in which they are served: rank + 1 first.
  std::vector<int> peers() const;

 private:
  void add_resets(FlagWord word, std::vector<CUstreamBatchMemOpParams>* ops) const;

  std::vector<CUdeviceptr> areas_;
  int rank_;
};

}  // namespace graphshard
