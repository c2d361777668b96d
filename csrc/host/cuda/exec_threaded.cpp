// A persistent thread per lane: copies overlap compute where a core is free. Lane 0 runs in the launching stream.
#include <climits>
#include <memory>

#include "graph_exec.h"
#include "stream.h"

namespace graphshard::hostcuda {

namespace {

constexpr int64_t kSpinNs = 5000;

/// A counter that only grows (and may wrap); waiters spin shortly, then sleep.
class alignas(64) Counter {
 public:
  void set(uint32_t value) {
    value_.store(value, std::memory_order_seq_cst);
    // Sequentially consistent with wait_for: either this sees the sleeper or the sleeper sees the value.
    if (sleepers_.load(std::memory_order_seq_cst) != 0) futex_wake(&value_, INT_MAX);
  }
  bool reached(uint32_t target) const {
    return static_cast<int32_t>(value_.load(std::memory_order_acquire) - target) >= 0;
  }
  void wait_for(uint32_t target) {
    if (spin_until([&] { return reached(target); }, kSpinNs)) return;
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    uint32_t seen = value_.load(std::memory_order_seq_cst);
    while (static_cast<int32_t>(seen - target) < 0) {
      futex_wait(&value_, seen, kForever);
      seen = value_.load(std::memory_order_seq_cst);
    }
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
  std::atomic<uint32_t> value_{0};
  std::atomic<uint32_t> sleepers_{0};
};

struct LaneNode {
  const ExecNode* node = nullptr;
  bool is_awaited = false;                           // from another lane, or the lane's last
  std::vector<std::pair<uint32_t, uint32_t>> waits;  // (lane, how many of its nodes must be done)
};

/// Shared by the executor and its threads, which may outlive it by an instant.
struct Lanes {
  explicit Lanes(uint32_t count) : nodes(count), progress(count) {}

  void run(uint32_t lane, uint32_t generation) {
    for (uint32_t i = 0; i < nodes[lane].size(); ++i) {
      const LaneNode& node = nodes[lane][i];
      for (const auto& [other, count] : node.waits) progress[other].wait_for(target(other, generation, count));
      launch->run_node_to_end(*node.node);
      if (node.is_awaited) progress[lane].set(target(lane, generation, i + 1));
    }
  }
  uint32_t target(uint32_t lane, uint32_t generation, uint32_t count) const {
    return generation * static_cast<uint32_t>(nodes[lane].size()) + count;
  }

  std::vector<std::vector<LaneNode>> nodes;  // by lane
  std::vector<Counter> progress;             // by lane: nodes done over all launches
  Counter command;                           // launches begun; the one after the last is the end
  bool is_ending = false;                    // published by `command`
  const Launch* launch = nullptr;            // published by `command`
};

struct LaneThread {
  std::shared_ptr<Lanes> lanes;
  uint32_t lane;
};

void run_lane_thread(void* opaque) {
  const std::unique_ptr<LaneThread> self(static_cast<LaneThread*>(opaque));
  for (uint32_t generation = 0;; ++generation) {
    self->lanes->command.wait_for(generation + 1);
    if (self->lanes->is_ending) return;
    self->lanes->run(self->lane, generation);
  }
}

class ThreadedExecutor : public Executor {
 public:
  ThreadedExecutor(const std::vector<ExecNode>& nodes, uint32_t num_lanes);
  ~ThreadedExecutor() override;
  bool start();
  void run(const Launch& launch) override;

 private:
  std::shared_ptr<Lanes> lanes_;
  uint32_t generation_ = 0;
};

ThreadedExecutor::ThreadedExecutor(const std::vector<ExecNode>& nodes, uint32_t num_lanes)
    : lanes_(std::make_shared<Lanes>(num_lanes)) {
  std::vector<uint32_t> place(nodes.size());
  for (size_t i = 0; i < nodes.size(); ++i) {
    auto& lane = lanes_->nodes[nodes[i].lane];
    place[i] = static_cast<uint32_t>(lane.size());
    LaneNode entry;
    entry.node = &nodes[i];
    for (uint32_t dependency : nodes[i].dependencies) {
      const uint32_t other = nodes[dependency].lane;
      if (other == nodes[i].lane) continue;
      entry.waits.emplace_back(other, place[dependency] + 1);
      lanes_->nodes[other][place[dependency]].is_awaited = true;
    }
    lane.push_back(std::move(entry));
  }
  for (auto& lane : lanes_->nodes) {
    if (!lane.empty()) lane.back().is_awaited = true;
  }
}

ThreadedExecutor::~ThreadedExecutor() {
  lanes_->is_ending = true;
  lanes_->command.set(generation_ + 1);
}

bool ThreadedExecutor::start() {
  for (uint32_t lane = 1; lane < lanes_->nodes.size(); ++lane) {
    auto thread = std::make_unique<LaneThread>(LaneThread{lanes_, lane});
    if (!start_detached(run_lane_thread, thread.get(), "gs-lane")) return false;
    thread.release();  // the thread's own now
  }
  return true;
}

void ThreadedExecutor::run(const Launch& launch) {
  lanes_->launch = &launch;
  const uint32_t generation = generation_++;
  lanes_->command.set(generation + 1);
  lanes_->run(0, generation);
  for (uint32_t lane = 1; lane < lanes_->nodes.size(); ++lane) {
    const auto count = static_cast<uint32_t>(lanes_->nodes[lane].size());
    lanes_->progress[lane].wait_for(lanes_->target(lane, generation, count));
  }
}

}  // namespace

std::unique_ptr<Executor> make_threaded_executor(const std::vector<ExecNode>& nodes, uint32_t num_lanes) {
  auto executor = std::make_unique<ThreadedExecutor>(nodes, num_lanes);
  if (!executor->start()) return nullptr;
  return executor;
}

}  // namespace graphshard::hostcuda
