// Reduce-scatters: sums in rank order, so the same bits on every rank and run.
#include <cmath>
#include <cstring>
#include <vector>

#include "ranks.h"

using namespace graphshard::litmus;
namespace nccl = graphshard::nccl;

namespace {

constexpr size_t kElements = 300;  // a rank's part

float value_of(int rank, size_t index, int round) {
  // Sums whose result depends on their order.
  const float values[] = {1.0F, 1e8F, -1e8F, 0.3333333F, 7.25F};
  return values[(static_cast<size_t>(rank) + index + static_cast<size_t>(round)) % 5] / static_cast<float>(index + 1);
}

float expected_sum(int num_ranks, size_t index, int round) {
  float total = value_of(0, index, round);
  for (int rank = 1; rank < num_ranks; ++rank) total += value_of(rank, index, round);
  return total;
}

}  // namespace

LITMUS(float32_sums_are_in_rank_order) {
  for (const int num_ranks : {1, 2, 4}) {
    const ncclUniqueId id = new_unique_id();
    run_ranks(num_ranks, [&](int self) {
      const Stream stream;
      const Comm comm(id, num_ranks, self);
      const size_t all = kElements * static_cast<size_t>(num_ranks);
      const Pinned send(all * sizeof(float));
      const Pinned receive(kElements * sizeof(float));
      auto* values = reinterpret_cast<float*>(send.bytes());
      const auto* sums = reinterpret_cast<const float*>(receive.bytes());
      const auto issue = [&] {
        NCCL_OK(nc.reduce_scatter(send.bytes(), receive.bytes(), kElements, nccl::kFloat32, nccl::kSum, comm, stream));
      };
      const auto check = [&](int round) {
        OK(cu.stream_synchronize(stream));
        for (size_t i = 0; i < kElements; ++i) {
          const float expected = expected_sum(num_ranks, static_cast<size_t>(self) * kElements + i, round);
          TRUE(std::memcmp(&sums[i], &expected, sizeof(float)) == 0);
        }
      };
      const auto fill = [&](int round) {
        for (size_t i = 0; i < all; ++i) values[i] = value_of(self, i, round);
      };
      fill(0);
      issue();
      check(0);
      const Captured captured(stream, issue);
      EQUAL(0, num_nodes(captured.graph(), CU_GRAPH_NODE_TYPE_KERNEL));
      if (num_ranks > 1) EQUAL(num_ranks, num_nodes(captured.graph(), CU_GRAPH_NODE_TYPE_MEMCPY));
      int round = 1;
      for (const Order& order : all_orders(3)) {
        captured.set_executor(order.executor, order.seed);
        for (int launch = 0; launch < 5; ++launch, ++round) {
          fill(round);
          launch == 2 ? issue() : captured.launch(stream);
          check(round);
        }
      }
    });
  }
}

// Halves are summed in float32 and rounded once, to nearest even.
LITMUS(halves_are_rounded_once) {
  struct Case {
    int type;
    uint16_t parts[2];
    uint16_t sum;
  };
  const std::vector<Case> cases = {
      {nccl::kBfloat16, {0x3F80, 0x3F80}, 0x4000},  // 1 + 1
      {nccl::kBfloat16, {0x4380, 0x3F80}, 0x4380},  // 256 + 1: a tie, to even
      {nccl::kBfloat16, {0x4381, 0x3F80}, 0x4382},  // 258 + 1: a tie, to even
      {nccl::kBfloat16, {0x7F7F, 0x7F7F}, 0x7F80},  // to infinity
      {nccl::kFloat16, {0x3C00, 0x3C00}, 0x4000},   // 1 + 1
      {nccl::kFloat16, {0x6800, 0x3C00}, 0x6800},   // 2048 + 1: a tie, to even
      {nccl::kFloat16, {0x6801, 0x3C00}, 0x6802},   // 2050 + 1: a tie, to even
      {nccl::kFloat16, {0x7BFF, 0x7BFF}, 0x7C00},   // 65504 + 65504
      {nccl::kFloat16, {0x0001, 0x0001}, 0x0002},   // subnormal: 2 * 2^-24
      {nccl::kFloat16, {0x03FF, 0x0001}, 0x0400},   // the least normal number
      {nccl::kFloat16, {0x8001, 0x0000}, 0x8001},   // - 2^-24
  };
  const ncclUniqueId id = new_unique_id();
  run_ranks(2, [&](int self) {
    const Stream stream;
    const Comm comm(id, 2, self);
    const Pinned send(64);
    const Pinned receive(64);
    for (const Case& one : cases) {
      for (int part = 0; part < 2; ++part) {
        std::memcpy(send.bytes() + 2 * part, &one.parts[self], 2);
      }
      NCCL_OK(nc.reduce_scatter(send.bytes(), receive.bytes(), 1, one.type, nccl::kSum, comm, stream));
      OK(cu.stream_synchronize(stream));
      uint16_t sum = 0;
      std::memcpy(&sum, receive.bytes(), 2);
      EQUAL(one.sum, sum);
    }
  });
}
