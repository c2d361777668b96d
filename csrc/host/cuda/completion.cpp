#include "completion.h"

#include <climits>

namespace graphshard::hostcuda {

namespace {
constexpr int64_t kSpinNs = 5000;
}

bool Completion::wait(int64_t timeout_ns) {
  if (done()) return true;
  if (timeout_ns == 0) return false;
  if (spin_until([this] { return done(); }, kSpinNs)) return true;
  const int64_t deadline = timeout_ns == kForever ? 0 : now_ns() + timeout_ns;
  while (true) {
    uint32_t state = kPending;
    state_.compare_exchange_strong(state, kPendingWithSleepers, std::memory_order_acq_rel, std::memory_order_acquire);
    if (state == kDone) return true;
    const int64_t left = timeout_ns == kForever ? kForever : deadline - now_ns();
    if (left != kForever && left <= 0) return done();
    futex_wait(&state_, kPendingWithSleepers, left);
    if (done()) return true;
  }
}

void Completion::finish() {
  const bool has_sleepers = state_.exchange(kDone, std::memory_order_acq_rel) == kPendingWithSleepers;
  if (has_sleepers) futex_wake(&state_, INT_MAX);
}

}  // namespace graphshard::hostcuda
