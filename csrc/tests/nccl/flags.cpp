// The flag protocol by itself: its lists of operations, run by a model of several streams in random order.
#include "runtime/flags.h"

#include <algorithm>
#include <random>
#include <vector>

#include "litmus.h"

using namespace graphshard::litmus;
using graphshard::FlagBarrier;
using graphshard::FlagMode;
using graphshard::FlagOps;
using graphshard::FlagWord;

namespace {

using Ops = std::vector<CUstreamBatchMemOpParams>;

bool is_wait(const CUstreamBatchMemOpParams& op) { return op.operation == CU_STREAM_MEM_OP_WAIT_VALUE_32; }

size_t count_waits(const Ops& ops) { return static_cast<size_t>(std::count_if(ops.begin(), ops.end(), is_wait)); }

/// Ranks that take their operations one at a time, a random rank next; and who may be where.
class Model {
 public:
  Model(int num_ranks, unsigned int seed) : random_(seed), words_(static_cast<size_t>(num_ranks)) {
    std::vector<CUdeviceptr> areas;
    for (auto& words : words_) {
      words.resize(graphshard::flag_area_bytes(num_ranks) / sizeof(uint32_t));
      areas.push_back(reinterpret_cast<CUdeviceptr>(words.data()));
    }
    for (int rank = 0; rank < num_ranks; ++rank) barriers.emplace_back(areas, rank);
    programs.resize(static_cast<size_t>(num_ranks));
  }

  /// A gather on `rank`: entry, a mark for "moves bytes", exit, a mark for "has them".
  void add_gather(int rank, FlagMode mode, uint32_t sequence, uint32_t header) {
    const auto self = static_cast<size_t>(rank);
    const FlagOps entry = barriers[self].entry(mode, sequence, header);
    const FlagOps exit = barriers[self].exit(mode, sequence);
    for (const Ops* ops : {&entry.writes, &entry.waits}) add(self, *ops);
    programs[self].push_back({{}, 1});
    for (const Ops* ops : {&exit.writes, &exit.waits}) add(self, *ops);
    programs[self].push_back({{}, 1});
  }

  /// Until nobody can go on; false if somebody stands in an operation. Checks that no two ranks are more than one mark
  /// apart: nobody moves bytes before all have entered, nor leaves before all have moved theirs.
  bool run() {
    std::vector<size_t> next(programs.size());
    std::vector<int> marks(programs.size());
    for (;;) {
      std::vector<size_t> runnable;
      bool is_done = true;
      for (size_t rank = 0; rank < programs.size(); ++rank) {
        if (next[rank] == programs[rank].size()) continue;
        is_done = false;
        if (can_run(programs[rank][next[rank]])) runnable.push_back(rank);
      }
      if (runnable.empty()) return is_done;
      const size_t rank = runnable[random_() % runnable.size()];
      const Step& step = programs[rank][next[rank]++];
      if (step.marks == 0) store(step.op);
      marks[rank] += step.marks;
      const auto [lowest, highest] = std::minmax_element(marks.begin(), marks.end());
      TRUE(*highest - *lowest <= 1);
    }
  }

  uint32_t word(int owner, int writer, FlagWord word) const {
    return *reinterpret_cast<const uint32_t*>(barriers[0].address(owner, writer, word));
  }

  std::vector<FlagBarrier> barriers;

 private:
  struct Step {
    CUstreamBatchMemOpParams op;
    int marks = 0;
  };

  void add(size_t rank, const Ops& ops) {
    for (const auto& op : ops) programs[rank].push_back({op, 0});
  }
  static bool can_run(const Step& step) {
    if (step.marks != 0 || !is_wait(step.op)) return true;
    const uint32_t word = *reinterpret_cast<const uint32_t*>(step.op.waitValue.address);
    const uint32_t value = step.op.waitValue.value;
    return step.op.waitValue.flags == CU_STREAM_WAIT_VALUE_EQ ? word == value : static_cast<int32_t>(word - value) >= 0;
  }
  static void store(const CUstreamBatchMemOpParams& op) {
    if (is_wait(op)) return;
    *reinterpret_cast<uint32_t*>(op.writeValue.address) = op.writeValue.value;
  }

  std::mt19937 random_;
  std::vector<std::vector<uint32_t>> words_;
  std::vector<std::vector<Step>> programs;
};

}  // namespace

LITMUS(flag_lists_are_as_long_as_they_say) {
  for (const int num_ranks : {2, 3, 8, 64}) {
    Model model(num_ranks, 0);
    const auto peers = static_cast<size_t>(num_ranks - 1);
    const FlagOps eager = model.barriers[0].entry(FlagMode::kEager, 5, 77);
    EQUAL(2 * peers + 2, eager.writes.size());  // header and flag for each peer, and for its own host
    EQUAL(2 * peers, count_waits(eager.waits));
    EQUAL(2 * peers + 2, eager.waits.size());  // and what its own host is told
    const FlagOps captured = model.barriers[0].entry(FlagMode::kCaptured, 5, 77);
    EQUAL(2 * peers, count_waits(captured.waits));
    EQUAL(3 * peers + 1, captured.waits.size());  // the resets
    TRUE(captured.waits.size() <= 256 && captured.writes.size() <= 256);
    EQUAL(peers, model.barriers[0].exit(FlagMode::kEager, 5).writes.size());
    EQUAL(2 * peers + 1, model.barriers[0].exit(FlagMode::kCaptured, 5).waits.size());
    EQUAL(1, model.barriers[0].peers().front());
  }
}

LITMUS(flags_hold_ranks_together_in_any_order_and_mode) {
  for (unsigned int seed = 0; seed < 200; ++seed) {
    const int num_ranks = 2 + static_cast<int>(seed % 3);
    Model model(num_ranks, seed);
    std::mt19937 random(seed);
    // Numbers that pass 2^31 and wrap to 0, which is left out.
    for (uint32_t call = 0, sequence = seed % 2 == 0 ? 1 : UINT32_MAX - 5; call < 12; ++call, ++sequence) {
      if (sequence == 0) ++sequence;
      const FlagMode mode = random() % 2 == 0 ? FlagMode::kEager : FlagMode::kCaptured;
      const auto header = static_cast<uint32_t>(random());
      // The captured values are constants: what the sequence would be at a replay plays no part.
      for (int rank = 0; rank < num_ranks; ++rank) model.add_gather(rank, mode, sequence, header);
    }
    if (seed % 2 != 0) {
      for (int owner = 0; owner < num_ranks; ++owner) {
        for (int writer = 0; writer < num_ranks; ++writer) {
          for (const FlagWord word : {FlagWord::kEntryEager, FlagWord::kExitEager}) {
            *reinterpret_cast<uint32_t*>(model.barriers[0].address(owner, writer, word)) = UINT32_MAX - 6;
          }
        }
      }
    }
    TRUE(model.run());
    for (int rank = 0; rank < num_ranks; ++rank) {
      EQUAL(0, model.word(rank, rank, FlagWord::kEntryCaptured));
      EQUAL(0, model.word(rank, rank, FlagWord::kBusyCaptured));
    }
  }
}

// Equal sizes, another unit. Nobody moves a byte, in either mode.
LITMUS(a_rank_in_another_call_stops_all_at_the_entry) {
  for (const FlagMode mode : {FlagMode::kEager, FlagMode::kCaptured}) {
    for (unsigned int seed = 0; seed < 20; ++seed) {
      Model model(3, seed);
      for (const int rank : {0, 1, 2}) model.add_gather(rank, mode, 1, rank == 1 ? 4 : 3);
      TRUE(!model.run());
      for (const int rank : {0, 1, 2}) {
        TRUE(model.word(rank, rank, graphshard::entry_word(mode)) != 0);  // waits there, as its own host can see
      }
    }
  }
}
