// Op lists over a collective of the test's own: eagerly, captured and recorded; errors, lifetimes, pieces of copies.
//
//   graphshard_op_list_test LIBRARY
#include <cstring>

#include "check.h"
#include "runtime/flags.h"
#include "runtime/memory.h"
#include "runtime/op_list.h"
#include "runtime/recording.h"
#include "runtime/stream_capture.h"

namespace graphshard {

namespace {

constexpr int64_t kTimeoutNs = 60'000'000'000;
constexpr int kNumRanks = 3;
constexpr size_t kBytes = 256;

// A rank whose peers all hold what it holds: a gather is copies, and a reduction leaves rank 0's part of the source.
class FakeCollective final : public Collective {
 public:
  explicit FakeCollective(Driver& driver) : driver_(driver) {}

  void all_gather(CUdeviceptr destination, CUdeviceptr source, size_t num_bytes, CUstream stream) override {
    if (is_broken) throw CollectiveError("fakeAllGather", 7, "fakeAllGather failed: remote error (7)");
    for (int rank = 0; rank < kNumRanks; ++rank) {
      const CUdeviceptr chunk = destination + static_cast<size_t>(rank) * num_bytes;
      GRAPHSHARD_CALL(driver_.table(), cuMemcpyAsync, chunk, source, num_bytes, stream);
    }
  }
  void reduce_scatter(CUdeviceptr destination, CUdeviceptr source, size_t num_elements, ElementType type,
                      CUstream stream) override {
    GRAPHSHARD_CALL(driver_.table(), cuMemcpyAsync, destination, source, num_elements * element_bytes(type), stream);
  }
  std::shared_ptr<void> hold() override { return held; }
  int world_size() const override { return kNumRanks; }
  std::string name() const override { return "fake"; }

  bool is_broken = false;
  std::shared_ptr<int> held = std::make_shared<int>(0);

 private:
  Driver& driver_;
};

struct Rig {
  explicit Rig(Driver& driver_in) : driver(driver_in) {
    std::memset(reinterpret_cast<void*>(source->address()), 7, kBytes);
  }

  Op gather(CUdeviceptr destination, size_t num_bytes) const {
    Op op;
    op.kind = OpKind::kAllGather;
    op.destination = destination;
    op.source = source->address();
    op.num_bytes = num_bytes;
    return op;
  }
  Op reduce(size_t num_elements) const {
    Op op;
    op.kind = OpKind::kReduceScatter;
    op.destination = reduced->address();
    op.source = gathered->address();
    op.num_elements = num_elements;
    op.value = static_cast<uint32_t>(ElementType::kFloat32);
    return op;
  }
  std::vector<Op> ops() const { return {gather(gathered->address(), kBytes), reduce(kBytes / sizeof(float))}; }
  std::unique_ptr<OpList> list(std::vector<Op> ops_in) const {
    return std::make_unique<OpList>(driver, BoundOps::Streams{stream}, 0, std::move(ops_in),
                                    BoundOps::Collectives{collective});
  }
  void check_bytes() const {
    require(stream->wait_idle(kTimeoutNs), "the stream is done in time");
    const auto* bytes = reinterpret_cast<unsigned char*>(gathered->address());
    for (size_t i = 0; i < kNumRanks * kBytes; ++i) require(bytes[i] == 7, "every rank's bytes were gathered");
    const auto* part = reinterpret_cast<unsigned char*>(reduced->address());
    for (size_t i = 0; i < kBytes; ++i) require(part[i] == 7, "the part was reduced");
    std::memset(reinterpret_cast<void*>(gathered->address()), 0, gathered->num_bytes());
    std::memset(reinterpret_cast<void*>(reduced->address()), 0, reduced->num_bytes());
  }

  Driver& driver;
  std::shared_ptr<Stream> stream = std::make_shared<Stream>(driver);
  std::shared_ptr<Memory> source = Memory::allocate(driver, kBytes, false);
  std::shared_ptr<Memory> gathered = Memory::allocate(driver, kNumRanks* kBytes, false);
  std::shared_ptr<Memory> reduced = Memory::allocate(driver, kBytes, false);
  std::shared_ptr<FakeCollective> collective = std::make_shared<FakeCollective>(driver);
  std::shared_ptr<Calls> no_calls = std::make_shared<Calls>(std::vector<std::pair<Calls::Function, void*>>{},
                                                            std::make_shared<CallErrors>(), nullptr);
};

void test_modes(Driver& driver) {
  const Rig rig(driver);
  const auto list = rig.list(rig.ops());
  list->issue(rig.no_calls, 0, list->size());
  rig.check_bytes();
  const auto exec = list->capture(rig.no_calls, {}, 0.0)->instantiate("", -1);
  for (int i = 0; i < 3; ++i) {
    exec->launch(*rig.stream);
    rig.check_bytes();
  }
  const auto recording = list->recording();
  begin_capture(*rig.stream, 0.0);
  recording->issue(rig.no_calls, 0, 1);
  recording->issue(rig.no_calls, 1, 2);
  end_capture(*rig.stream)->instantiate("threaded", -1)->launch(*rig.stream);
  rig.check_bytes();
}

void test_errors(Driver& driver) {
  const Rig rig(driver);
  const auto refused = [&](std::vector<Op> ops, const char* part) {
    require_error<DriverError>([&] { rig.list(std::move(ops)); }, part);
  };
  refused({rig.gather(rig.gathered->address() + 1, kBytes)}, "all_gather refused: 768 bytes at 0x");
  refused({rig.gather(rig.gathered->address(), kBytes + 1)}, "run past the end of the memory of 768 bytes");
  refused({rig.gather(rig.gathered->address(), SIZE_MAX / 2)}, "at op 0 of 1 on stream 0");
  refused({rig.gather(rig.gathered->address(), 0)}, "are no bytes");
  refused({rig.gather(rig.gathered->address(), kBytes), rig.reduce(kBytes / 4 + 1)},
          "reduce_scatter refused: 260 bytes at 0x");
  refused({rig.reduce(SIZE_MAX / 2)}, "run past the end of the memory of 256 bytes");
  Op unknown = rig.reduce(1);
  unknown.index = 1;
  require_error<std::invalid_argument>([&] { rig.list({unknown}); },
                                       "op 0 of 1 on stream 0: collective 1, the list has 1 collectives");

  const auto list = rig.list({rig.reduce(1), rig.gather(rig.gathered->address(), kBytes)});
  rig.collective->is_broken = true;
  const char* placed = "fakeAllGather failed: remote error (7), at op 1 of 2 on stream 0";
  require_error<CollectiveError>([&] { list->issue(rig.no_calls, 0, 2); }, placed);
  require_error<CollectiveError>([&] { list->capture(rig.no_calls, {}, 0.0); }, placed);
  require(!CaptureLock::is_held(), "a failed capture is over");
  rig.collective->is_broken = false;
  list->capture(rig.no_calls, {}, 0.0);
  require(rig.stream->wait_idle(kTimeoutNs), "the stream works after a failed capture");
}

void test_lifetimes(Driver& driver) {
  Rig rig(driver);
  const std::weak_ptr<FakeCollective> collective = rig.collective;
  const std::weak_ptr<int> held = rig.collective->held;
  auto list = rig.list(rig.ops());
  rig.collective->held.reset();
  rig.collective.reset();
  require(!collective.expired() && held.expired(), "a list keeps its collectives, and does not hold them");
  collective.lock()->held = std::make_shared<int>(0);
  const std::weak_ptr<int> held_by_graph = collective.lock()->held;
  auto exec = list->capture(rig.no_calls, {}, 0.0)->instantiate("", -1);
  collective.lock()->held.reset();
  list.reset();
  require(!collective.expired() && !held_by_graph.expired(), "a graph keeps its collectives, and holds them");
  exec->launch(*rig.stream);
  rig.check_bytes();
  exec.reset();
  driver.reap();
  require(collective.expired() && held_by_graph.expired(), "a graph that is gone keeps nothing");
}

// Copies of the sizes that are slow as graph nodes: the rule by itself, then the pieces at a size that fits a test.
void test_pieces(Driver& driver) {
  constexpr size_t kMiB = size_t{1} << 20;
  for (const size_t num_mib : {512, 1024, 2048}) {
    require(copy_piece_bytes(num_mib * kMiB) == 256 * kMiB, "a slow size is copied in pieces");
    require(copy_piece_bytes(num_mib * kMiB - 1) == num_mib * kMiB - 1, "its neighbour below is not");
    require(copy_piece_bytes(num_mib * kMiB + 1) == num_mib * kMiB + 1, "its neighbour above is not");
  }
  for (const size_t num_mib : {1, 256, 768, 1536, 4096}) {
    require(copy_piece_bytes(num_mib * kMiB) == num_mib * kMiB, "other sizes are one copy");
  }
  const Rig rig(driver);
  Op op;
  op.kind = OpKind::kCopy;
  op.destination = rig.reduced->address();
  op.source = rig.source->address();
  op.num_bytes = kBytes;
  op.piece_bytes = 100;
  begin_capture(*rig.stream, 0.0);
  require(enqueue(driver.table(), op, rig.stream->handle()->stream, {}) == CUDA_SUCCESS, "pieces are enqueued");
  const auto graph = end_capture(*rig.stream);
  require(graph->num_nodes() == std::vector<std::pair<std::string, size_t>>{{"memcpy", 3}}, "100, 100 and 56 bytes");
  graph->instantiate("", 5)->launch(*rig.stream);
  require(rig.stream->wait_idle(kTimeoutNs), "the copy is done in time");
  const auto* bytes = reinterpret_cast<unsigned char*>(rig.reduced->address());
  for (size_t i = 0; i < kBytes; ++i) require(bytes[i] == 7, "pieces cover the copy");
}

Op batch(std::vector<CUstreamBatchMemOpParams> values) {
  Op op;
  op.kind = OpKind::kValues;
  op.values = std::make_shared<const std::vector<CUstreamBatchMemOpParams>>(std::move(values));
  return op;
}

// Two ranks' lists on two streams, which meet at barriers of the flag protocol: eagerly, captured, and one of each.
void test_flags(Driver& driver) {
  constexpr int kRounds = 200;
  const auto areas = Memory::allocate(driver, 2 * flag_area_bytes(2), false);
  const CUdeviceptr second = areas->address() + flag_area_bytes(2);
  std::vector<std::unique_ptr<OpList>> lists;
  std::vector<std::shared_ptr<Stream>> streams;
  const Rig rig(driver);
  for (const int rank : {0, 1}) {
    const FlagBarrier barrier({areas->address(), second}, rank);
    const FlagOps entry = barrier.entry(FlagMode::kCaptured, 1, 9);
    const FlagOps exit = barrier.exit(FlagMode::kCaptured, 1);
    streams.push_back(std::make_shared<Stream>(driver));
    lists.push_back(std::make_unique<OpList>(
        driver, BoundOps::Streams{streams.back()}, 0,
        std::vector<Op>{batch(entry.writes), batch(entry.waits), batch(exit.writes), batch(exit.waits)}));
  }
  std::vector<std::shared_ptr<GraphExec>> graphs;
  for (const auto& list : lists) {
    const auto graph = list->capture(rig.no_calls, {}, 0.0);
    require(graph->num_nodes() == std::vector<std::pair<std::string, size_t>>{{"batch_mem_op", 4}}, "a node a batch");
    graphs.push_back(graph->instantiate("", -1));
  }
  for (int round = 0; round < kRounds; ++round) {
    for (const int rank : {0, 1}) {
      const bool is_eager = round % 4 == 0 || round % 4 == 2 + rank;
      if (is_eager) lists[rank]->issue(rig.no_calls, 0, lists[rank]->size());
      if (!is_eager) graphs[rank]->launch(*streams[rank]);
    }
  }
  for (const auto& stream : streams) require(stream->wait_idle(kTimeoutNs), "both ranks come through all barriers");
  lists[0]->issue(rig.no_calls, 0, lists[0]->size());
  require(!streams[0]->wait_idle(20'000'000), "a rank alone waits");
  lists[1]->issue(rig.no_calls, 0, lists[1]->size());
  for (const auto& stream : streams) require(stream->wait_idle(kTimeoutNs), "until the other has come");
  CUstreamBatchMemOpParams outside{};
  outside.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
  outside.writeValue.address = areas->address() + areas->num_bytes();
  require_error<DriverError>([&] { rig.list({batch({outside})}); }, "cuStreamBatchMemOp refused: 4 bytes at 0x");
}

}  // namespace

}  // namespace graphshard

int main(int argc, char** argv) {
  using namespace graphshard;
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s LIBRARY\n", argv[0]);
    return 2;
  }
  Driver& driver = Driver::open(argv[1], 0);
  test_modes(driver);
  test_errors(driver);
  test_lifetimes(driver);
  test_pieces(driver);
  test_flags(driver);
  std::printf("op lists: all is well\n");
  return 0;
}
