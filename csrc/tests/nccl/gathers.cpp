// Gathers, eager and captured, byte for byte; what a graph shows of them.
#include <algorithm>
#include <memory>
#include <random>

#include "ranks.h"

using namespace graphshard::litmus;
namespace nccl = graphshard::nccl;

namespace {

constexpr int kUnits = 5;
constexpr int kSlots = 2;
constexpr size_t kChunkBytes = 1536;

/// One rank: its chunks of all units in one window, slots in another, copies of what the slots held in a third memory.
struct Rank {
  Rank(const ncclUniqueId& id, int ranks, int self)
      : num_ranks(ranks),
        rank(self),
        unit_bytes(kChunkBytes * static_cast<size_t>(ranks)),
        comm(id, ranks, self),
        shards(kUnits * kChunkBytes, comm),
        slots(kSlots * unit_bytes, comm),
        seen(kUnits * unit_bytes) {}

  void fill(int round) const {
    for (int unit = 0; unit < kUnits; ++unit) {
      fill_chunk(shards.bytes(offset(unit)), kChunkBytes, rank, unit, round);
    }
  }
  static size_t offset(int unit) { return static_cast<size_t>(unit) * kChunkBytes; }

  /// Every unit into the next slot, and from there to where the host looks.
  void issue(CUstream stream) const {
    for (int unit = 0; unit < kUnits; ++unit) {
      const size_t slot = static_cast<size_t>(unit % kSlots) * unit_bytes;
      NCCL_OK(gather(shards.bytes(offset(unit)), slots.bytes(slot), kChunkBytes, comm, stream));
      OK(cu.memcpy_async(seen.address(static_cast<size_t>(unit) * unit_bytes), slots.address(slot), unit_bytes,
                         stream));
    }
  }

  void check(CUstream stream, int round) const {
    OK(cu.stream_synchronize(stream));
    for (int unit = 0; unit < kUnits; ++unit) {
      TRUE(holds_unit(seen.bytes() + static_cast<size_t>(unit) * unit_bytes, kChunkBytes, num_ranks, unit, round));
    }
  }

  const int num_ranks;
  const int rank;
  const size_t unit_bytes;
  const Comm comm;
  const NcclMemory shards;
  const NcclMemory slots;
  const Pinned seen;
};

size_t num_all_nodes(CUgraph graph) { return nodes_of(graph).size(); }

}  // namespace

LITMUS(eager_gathers_bring_every_ranks_bytes) {
  for (const int num_ranks : {1, 2, 3, 4}) {
    const ncclUniqueId id = new_unique_id();
    run_ranks(num_ranks, [&](int self) {
      const Stream stream;
      const Rank rank(id, num_ranks, self);
      for (int round = 0; round < 100; ++round) {
        rank.fill(round);
        rank.issue(stream);
        rank.check(stream, round);
      }
    });
  }
}

// Under every order of the cooperative executor and the threaded one, with eager runs between the launches: a sequence
// number left by one mode must not open a barrier of the other.
LITMUS(captured_and_eager_gathers_mix) {
  for (const int num_ranks : {2, 3, 4}) {
    const ncclUniqueId id = new_unique_id();
    run_ranks(num_ranks, [&](int self) {
      const Stream stream;
      const Rank rank(id, num_ranks, self);
      rank.fill(0);
      rank.issue(stream);  // warm-up
      rank.check(stream, 0);
      const Captured captured(stream, [&] { rank.issue(stream); });
      int round = 1;
      for (const Order& order : all_orders(6)) {
        captured.set_executor(order.executor, order.seed);
        for (int launch = 0; launch < 12; ++launch, ++round) {
          rank.fill(round);
          if (launch % 4 == 3) {
            rank.issue(stream);
          } else {
            captured.launch(stream);
          }
          rank.check(stream, round);
        }
      }
    });
  }
}

// Ranks that run ahead of each other as they like: launches in a row without a host between them.
LITMUS(launches_in_a_row_stay_in_step) {
  const ncclUniqueId id = new_unique_id();
  run_ranks(3, [&](int self) {
    const Stream stream;
    const Rank rank(id, 3, self);
    rank.fill(7);
    rank.issue(stream);
    const Captured captured(stream, [&] { rank.issue(stream); });
    std::mt19937 random(static_cast<unsigned int>(self));
    for (int round = 0; round < 60; ++round) {
      for (unsigned int i = 0; i < 4; ++i) captured.launch(stream);  // as many on every rank
      if (random() % 3 == 0) rank.check(stream, 7);
    }
    rank.check(stream, 7);
  });
}

// Two communicators, their streams in unlike order on unlike ranks: they share nothing.
LITMUS(two_communicators_do_not_meet) {
  const ncclUniqueId first_id = new_unique_id();
  const ncclUniqueId second_id = new_unique_id();
  run_ranks(2, [&](int self) {
    const Stream streams[2];
    const Rank first(first_id, 2, self);
    const Rank second(second_id, 2, self);
    const Rank* ranks[] = {&first, &second};
    for (const int turn : {0, 1}) {  // the first use blocks the host: in one order
      ranks[turn]->fill(0);
      ranks[turn]->issue(streams[turn]);
      ranks[turn]->check(streams[turn], 0);
    }
    for (int round = 0; round < 50; ++round) {
      for (const int turn : {self, 1 - self}) {
        ranks[turn]->fill(round);
        ranks[turn]->issue(streams[turn]);
      }
      for (const int turn : {0, 1}) ranks[turn]->check(streams[turn], round);
    }
  });
}

LITMUS(gathers_of_one_communicator_on_several_streams_are_ordered) {
  const ncclUniqueId id = new_unique_id();
  run_ranks(2, [&](int self) {
    const Stream streams[2];
    const Rank rank(id, 2, self);
    rank.fill(1);
    for (int round = 0; round < 30; ++round) {
      for (int unit = 0; unit < kUnits; ++unit) {
        NCCL_OK(gather(rank.shards.bytes(Rank::offset(unit)), rank.slots.bytes(), kChunkBytes, rank.comm,
                       streams[unit % 2]));
      }
      for (const Stream& stream : streams) OK(cu.stream_synchronize(stream));
      TRUE(holds_unit(rank.slots.bytes(), kChunkBytes, 2, kUnits - 1, 1));
    }
  });
}

LITMUS(a_captured_gather_is_copies_and_two_barriers) {
  for (const int num_ranks : {2, 3, 4}) {
    const ncclUniqueId id = new_unique_id();
    run_ranks(num_ranks, [&](int self) {
      const Stream stream;
      const Rank rank(id, num_ranks, self);
      rank.issue(stream);
      const Captured captured(
          stream, [&] { NCCL_OK(gather(rank.shards.bytes(), rank.slots.bytes(), kChunkBytes, rank.comm, stream)); });
      EQUAL(num_ranks + 4, num_all_nodes(captured.graph()));
      EQUAL(num_ranks, num_nodes(captured.graph(), CU_GRAPH_NODE_TYPE_MEMCPY));
      EQUAL(4, num_nodes(captured.graph(), CU_GRAPH_NODE_TYPE_BATCH_MEM_OP));
      EQUAL(0, num_nodes(captured.graph(), CU_GRAPH_NODE_TYPE_KERNEL));
      OK(cu.stream_synchronize(stream));
    });
  }
}

// The fall-back gives the same bytes, and the graph shows it.
LITMUS(the_fall_back_is_a_kernel_node) {
  const Staged staged("sm_kernel");
  const ncclUniqueId id = new_unique_id();
  run_ranks(3, [&](int self) {
    const Stream stream;
    const Rank rank(id, 3, self);
    rank.fill(0);
    rank.issue(stream);
    rank.check(stream, 0);
    const Captured captured(stream, [&] { rank.issue(stream); });
    EQUAL(kUnits, num_nodes(captured.graph(), CU_GRAPH_NODE_TYPE_KERNEL));
    EQUAL(4 * kUnits, num_nodes(captured.graph(), CU_GRAPH_NODE_TYPE_BATCH_MEM_OP));
    for (int round = 1; round < 20; ++round) {
      rank.fill(round);
      captured.launch(stream);
      rank.check(stream, round);
    }
  });
}

LITMUS(buffers_in_no_window_are_gathered_by_a_kernel) {
  const ncclUniqueId id = new_unique_id();
  run_ranks(3, [&](int self) {
    const Stream stream;
    const Comm comm(id, 3, self);
    const Pinned send(kChunkBytes);
    const Pinned receive(3 * kChunkBytes);
    const auto issue = [&] { NCCL_OK(gather(send.bytes(), receive.bytes(), kChunkBytes, comm, stream)); };
    fill_chunk(send.bytes(), kChunkBytes, self, 0, 0);
    issue();
    OK(cu.stream_synchronize(stream));
    TRUE(holds_unit(receive.bytes(), kChunkBytes, 3, 0, 0));
    const Captured captured(stream, issue);
    EQUAL(1, num_nodes(captured.graph(), CU_GRAPH_NODE_TYPE_KERNEL));
    for (int round = 1; round < 50; ++round) {
      fill_chunk(send.bytes(), kChunkBytes, self, 0, round);
      round % 3 == 0 ? issue() : captured.launch(stream);
      OK(cu.stream_synchronize(stream));
      TRUE(holds_unit(receive.bytes(), kChunkBytes, 3, 0, round));
    }
  });
}

// Without CTAPolicy 2 windows do not help.
LITMUS(another_policy_means_a_kernel) {
  const ncclUniqueId id = new_unique_id();
  run_ranks(2, [&](int self) {
    const Stream stream;
    const Comm comm(id, 2, self, nccl::Config{});
    const NcclMemory send(kChunkBytes, comm);
    const NcclMemory receive(2 * kChunkBytes, comm);
    const auto issue = [&] { NCCL_OK(gather(send.bytes(), receive.bytes(), kChunkBytes, comm, stream)); };
    issue();
    const Captured captured(stream, issue);
    EQUAL(1, num_nodes(captured.graph(), CU_GRAPH_NODE_TYPE_KERNEL));
    OK(cu.stream_synchronize(stream));
  });
}
