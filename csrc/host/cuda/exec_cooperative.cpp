// One worker runs the whole graph: no wake-ups between nodes, and a blocked wait yields to whatever can run.
#include <algorithm>
#include <functional>
#include <numeric>
#include <random>

#include "graph_exec.h"

namespace graphshard::hostcuda {

namespace {

constexpr int64_t kSpinNs = 5000;
constexpr int64_t kFirstSliceNs = 50000;
constexpr int64_t kLastSliceNs = 1000000;
constexpr size_t kPieces = 8;
constexpr size_t kMinPieceBytes = 64;

class CooperativeExecutor : public Executor {
 public:
  CooperativeExecutor(const std::vector<ExecNode>& nodes, int64_t seed);
  void run(const Launch& launch) override;

 private:
  void make_ready(uint32_t node);
  uint32_t pick();
  void shuffle_lanes();
  size_t pick_at_random();
  void step(const Launch& launch, uint32_t node);
  void poll_blocked(const Launch& launch);
  void idle(const Launch& launch);
  void finish(uint32_t node);

  const std::vector<ExecNode>& nodes_;
  const bool is_random_;
  std::vector<uint32_t> num_dependencies_;
  std::vector<size_t> piece_bytes_;     // by node; 0: copies run whole
  std::vector<uint32_t> rank_of_node_;  // the runnable node of lowest rank goes next
  std::vector<uint32_t> node_of_rank_;
  std::mt19937_64 random_;
  std::vector<uint32_t> lane_rank_;  // if random: of runnable nodes, the one whose lane ranks lowest goes next
  uint32_t shuffle_every_ = 1;       // if random: how many steps, on average, until the lanes are ranked anew

  // Of the launch that runs.
  std::vector<uint32_t> missing_;   // by node: dependencies not done
  std::vector<uint64_t> progress_;  // by node
  std::vector<uint32_t> ready_;     // nodes if random, else a heap of ranks
  std::vector<uint32_t> blocked_;   // nodes whose wait did not hold when last tried
  size_t num_left_ = 0;
};

CooperativeExecutor::CooperativeExecutor(const std::vector<ExecNode>& nodes, int64_t seed)
    : nodes_(nodes), is_random_(seed >= 0), random_(static_cast<uint64_t>(seed)) {
  num_dependencies_.reserve(nodes.size());
  for (const ExecNode& node : nodes) {
    num_dependencies_.push_back(static_cast<uint32_t>(node.dependencies.size()));
    const auto* copy = std::get_if<CopyWork>(&node.work);
    const bool in_pieces = copy != nullptr && seed != kCreationOrder;
    piece_bytes_.push_back(in_pieces ? std::max(kMinPieceBytes, copy->num_bytes() / kPieces) : 0);
  }
  node_of_rank_.resize(nodes.size());
  std::iota(node_of_rank_.begin(), node_of_rank_.end(), 0);
  if (seed == kCopiesEarliest || seed == kCopiesLatest) {
    const bool copies_first = seed == kCopiesEarliest;
    std::stable_partition(node_of_rank_.begin(), node_of_rank_.end(),
                          [&](uint32_t node) { return moves_bytes(nodes[node].work) == copies_first; });
  }
  for (const ExecNode& node : nodes) lane_rank_.resize(std::max<size_t>(lane_rank_.size(), node.lane + 1));
  std::iota(lane_rank_.begin(), lane_rank_.end(), 0);
  rank_of_node_.resize(nodes.size());
  for (uint32_t rank = 0; rank < nodes.size(); ++rank) rank_of_node_[node_of_rank_[rank]] = rank;
}

void CooperativeExecutor::make_ready(uint32_t node) {
  if (is_random_) {
    ready_.push_back(node);
    return;
  }
  ready_.push_back(rank_of_node_[node]);
  std::push_heap(ready_.begin(), ready_.end(), std::greater<>());
}

void CooperativeExecutor::shuffle_lanes() { std::shuffle(lane_rank_.begin(), lane_rank_.end(), random_); }

/// Runs of one lane, of random length: picking evenly among nodes lets no stream get far ahead, and hides races.
size_t CooperativeExecutor::pick_at_random() {
  if (random_() % shuffle_every_ == 0) shuffle_lanes();
  const size_t offset = random_() % ready_.size();
  size_t best = offset;
  for (size_t i = 1; i < ready_.size(); ++i) {
    const size_t candidate = (offset + i) % ready_.size();
    const auto rank = [this](size_t place) { return lane_rank_[nodes_[ready_[place]].lane]; };
    if (rank(candidate) < rank(best)) best = candidate;
  }
  return best;
}

uint32_t CooperativeExecutor::pick() {
  if (is_random_) {
    std::swap(ready_[pick_at_random()], ready_.back());
  } else {
    std::pop_heap(ready_.begin(), ready_.end(), std::greater<>());
  }
  const uint32_t chosen = ready_.back();
  ready_.pop_back();
  return is_random_ ? chosen : node_of_rank_[chosen];
}

void CooperativeExecutor::finish(uint32_t node) {
  --num_left_;
  for (uint32_t dependent : nodes_[node].dependents) {
    if (--missing_[dependent] == 0) make_ready(dependent);
  }
}

void CooperativeExecutor::step(const Launch& launch, uint32_t node) {
  switch (launch.advance_node(nodes_[node], &progress_[node], piece_bytes_[node])) {
    case Step::kDone:
      finish(node);
      break;
    case Step::kAgain:
      make_ready(node);
      break;
    case Step::kBlocked:
      blocked_.push_back(node);
      break;
  }
}

void CooperativeExecutor::poll_blocked(const Launch& launch) {
  size_t kept = 0;
  for (size_t i = 0; i < blocked_.size(); ++i) {
    const uint32_t node = blocked_[i];
    if (launch.advance_node(nodes_[node], &progress_[node], 0) == Step::kDone) {
      finish(node);
    } else {
      blocked_[kept++] = node;
    }
  }
  blocked_.resize(kept);
}

/// Nothing can run: only another thread or process can end a wait.
void CooperativeExecutor::idle(const Launch& launch) {
  const auto freed = [&] {
    poll_blocked(launch);
    return !ready_.empty() || num_left_ == 0;
  };
  if (spin_until(freed, kSpinNs)) return;
  int64_t slice_ns = kFirstSliceNs;
  for (size_t turn = 0; !freed(); ++turn) {
    const uint32_t node = blocked_[turn % blocked_.size()];
    launch.sleep_on_node(nodes_[node], progress_[node], slice_ns);
    slice_ns = std::min(slice_ns * 2, blocked_.size() == 1 ? kLastSliceNs : 2 * kFirstSliceNs);
  }
}

void CooperativeExecutor::run(const Launch& launch) {
  missing_ = num_dependencies_;
  progress_.assign(nodes_.size(), 0);
  num_left_ = nodes_.size();
  if (is_random_) {
    shuffle_lanes();
    shuffle_every_ = 4U << (random_() % 4);
  }
  for (uint32_t node = 0; node < nodes_.size(); ++node) {
    if (missing_[node] == 0) make_ready(node);
  }
  while (num_left_ != 0) {
    if (!blocked_.empty()) poll_blocked(launch);
    if (!ready_.empty()) {
      step(launch, pick());
    } else if (num_left_ != 0) {
      idle(launch);
    }
  }
}

}  // namespace

std::unique_ptr<Executor> make_cooperative_executor(const std::vector<ExecNode>& nodes, int64_t seed) {
  return std::make_unique<CooperativeExecutor>(nodes, seed);
}

}  // namespace graphshard::hostcuda
