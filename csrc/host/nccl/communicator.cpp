#include "communicator.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "driver.h"

namespace graphshard::hostnccl {

namespace {

constexpr auto kPoll = std::chrono::microseconds(200);
constexpr std::chrono::nanoseconds kSlowestPoll = std::chrono::milliseconds(20);

// Looks at what may never end: for half a second as often as elsewhere, and the longer it lasts the less often, since
// threads that look for ever would take the cores from those that work.
class SlowingPoll {
 public:
  void sleep() {
    std::this_thread::sleep_for(pause_);
    pause_ = std::min(pause_ + pause_ / 20, kSlowestPoll);
  }

 private:
  std::chrono::nanoseconds pause_ = kPoll;
};

ncclWindow_t handle_of(size_t index) { return reinterpret_cast<ncclWindow_t>(index + 1); }

}  // namespace

Communicator::Communicator(const ncclUniqueId& id, int num_ranks, int rank) : group_(id, num_ranks, rank) {
  enter_driver();
  HOSTNCCL_CALL(cuEventCreate, &eager_end_, CU_EVENT_DISABLE_TIMING);
  HOSTNCCL_CALL(cuEventCreate, &captured_end_, CU_EVENT_DISABLE_TIMING);
}

Communicator::~Communicator() {
  driver().cuEventDestroy(eager_end_);
  driver().cuEventDestroy(captured_end_);
}

void Communicator::join(const Settings& settings) {
  settings_ = settings;
  const std::lock_guard lock(calls_);
  const auto policy = static_cast<uint64_t>(settings.is_zero_cta ? 1 : 0);
  const std::vector<Message> all = group_.exchange({static_cast<uint64_t>(Purpose::kInit), policy, 0, 0, 0, 0});
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank][1] == policy) continue;
    throw Failure(nccl::kInvalidArgument, "rank " + std::to_string(rank) + "'s CTAPolicy is not this rank's (" +
                                              std::to_string(group_.rank()) + ")");
  }
}

void Communicator::check_usable() const {
  if (group_.is_aborted()) throw Failure(nccl::kInvalidUsage, "the communicator was aborted");
}

std::unique_lock<std::mutex> Communicator::begin_call() const {
  check_usable();
  std::unique_lock lock(calls_);
  check_usable();
  enter_driver();
  return lock;
}

ncclWindow_t Communicator::register_window(CUdeviceptr address, size_t num_bytes) {
  const auto lock = begin_call();
  std::string problem;
  if (address % nccl::kWindowAlignmentBytes != 0) {
    problem = "a window begins on a multiple of " + std::to_string(nccl::kWindowAlignmentBytes) + " bytes";
  }
  for (const Window& window : windows_) {
    if (window.region && window.region->overlaps(address, num_bytes)) {
      problem = "the buffer is registered already, or a part of it: deregister it first";
    }
  }
  auto region = std::make_unique<Region>(&group_, Purpose::kRegister, address, num_bytes, problem);
  if (stage().null_window) {
    note_met("null_window");
    return nullptr;
  }
  windows_.push_back({std::move(region)});
  return handle_of(windows_.size() - 1);
}

void Communicator::deregister_window(ncclWindow_t window) {
  const auto lock = begin_call();
  for (size_t i = 0; i < windows_.size(); ++i) {
    if (handle_of(i) != window || !windows_[i].region) continue;
    windows_[i].region.reset();
    return;
  }
  throw Failure(nccl::kInvalidArgument, "no such window is registered with this communicator");
}

Place Communicator::place_of(CUdeviceptr address, size_t num_bytes) const {
  for (size_t i = 0; i < windows_.size(); ++i) {
    const Window& window = windows_[i];
    if (window.region && window.region->contains(address, num_bytes)) return {i, address - window.region->address()};
  }
  return {};
}

Result Communicator::async_error() {
  {
    const std::lock_guard lock(error_mutex_);
    if (async_error_ != nccl::kSuccess) return async_error_;
  }
  Result found = nccl::kSuccess;
  std::string text = group_.lost_peer();
  if (!text.empty()) {
    found = nccl::kRemoteError;
  } else {
    // A call that blocks the host is before the first use or between collectives: nothing to see meanwhile.
    const std::unique_lock lock(calls_, std::try_to_lock);
    if (lock.owns_lock() && flags_) text = Progress(*flags_).unlike_peer(group_);
    if (!text.empty()) found = nccl::kInvalidUsage;
  }
  if (found == nccl::kSuccess) return found;
  const std::lock_guard lock(error_mutex_);
  async_error_ = found;
  last_error_ = text;
  return found;
}

bool Communicator::is_idle() const {
  if (Progress(*flags_).is_captured_busy()) return false;
  if (!has_eager_end_) return true;
  // Asking for an event would end another thread's capture of the global mode.
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  HOSTNCCL_CALL(cuThreadExchangeStreamCaptureMode, &mode);
  const CUresult result = driver().cuEventQuery(eager_end_);
  HOSTNCCL_CALL(cuThreadExchangeStreamCaptureMode, &mode);
  if (result != CUDA_ERROR_NOT_READY) check(result, "cuEventQuery");
  return result == CUDA_SUCCESS;
}

void Communicator::drain() {
  enter_driver();
  for (SlowingPoll poll;; poll.sleep()) {
    const std::lock_guard lock(calls_);  // given up between looks: others may ask what this one waits for
    if (!flags_ || group_.is_aborted() || is_idle()) return;
  }
}

void Communicator::abort() {
  group_.abort();
  const std::lock_guard lock(calls_);
  enter_driver();
  for (SlowingPoll poll; flags_ && !is_idle(); poll.sleep()) {
    Progress(*flags_).release_eager(sequence_);
    set_word(stuck_word(), 1);
  }
  if (!has_captured_) return;
  // A graph may be launched after all: what its nodes point at stays mapped for good.
  (void)flag_memory_.release();
  (void)flag_region_.release();
  for (auto& memory : staging_memory_) (void)memory.release();
  for (auto& region : staging_) (void)region.release();
  for (auto& window : windows_) (void)window.region.release();
}

void Communicator::set_last_error(const std::string& text) {
  const std::lock_guard lock(error_mutex_);
  last_error_ = text;
}

std::string Communicator::last_error() const {
  const std::lock_guard lock(error_mutex_);
  return last_error_;
}

}  // namespace graphshard::hostnccl
