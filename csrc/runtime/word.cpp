#include "runtime/word.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <ctime>

namespace graphshard {

namespace {

using Clock = std::chrono::steady_clock;

// A device's store wakes no sleeper: sleep in slices. The host driver's stores do wake.
constexpr auto kSlice = std::chrono::microseconds(200);
constexpr int kSpins = 256;

void sleep_on(uint32_t* word, uint32_t expected, std::chrono::nanoseconds limit) {
  timespec timeout{};
  timeout.tv_sec = static_cast<time_t>(limit.count() / 1'000'000'000);
  timeout.tv_nsec = static_cast<long>(limit.count() % 1'000'000'000);
  syscall(SYS_futex, word, FUTEX_WAIT, expected, &timeout, nullptr, 0);
}

}  // namespace

Word::Word(std::shared_ptr<Memory> memory, size_t offset) : memory_(std::move(memory)), offset_(offset) {
  if (!memory_->is_host_readable()) {
    throw DriverError("Word", CUDA_ERROR_INVALID_VALUE,
                      "a word in device memory at " + hex(memory_->address()) +
                          " is refused: the host cannot read it; use Memory.allocate_host");
  }
  if (offset % sizeof(uint32_t) != 0 || memory_->num_bytes() < sizeof(uint32_t) ||
      offset > memory_->num_bytes() - sizeof(uint32_t)) {
    throw DriverError("Word", CUDA_ERROR_INVALID_VALUE,
                      "offset " + std::to_string(offset) + " is no aligned word of " +
                          std::to_string(memory_->num_bytes()) + " bytes of memory");
  }
}

void Word::store(uint32_t value) {
  __atomic_store_n(pointer(), value, __ATOMIC_RELEASE);
  syscall(SYS_futex, pointer(), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

uint32_t Word::load() const { return __atomic_load_n(pointer(), __ATOMIC_ACQUIRE); }

bool Word::wait(uint32_t value, int64_t timeout_ns) const {
  for (int i = 0; i < kSpins; ++i) {
    if (reached(value)) return true;
  }
  const auto deadline = Clock::now() + std::chrono::nanoseconds(timeout_ns);
  for (;;) {
    const uint32_t seen = load();
    if (static_cast<int32_t>(seen - value) >= 0) return true;
    const auto left = deadline - Clock::now();
    if (left <= Clock::duration::zero()) return false;
    sleep_on(pointer(), seen, std::min<std::chrono::nanoseconds>(left, kSlice));
  }
}

}  // namespace graphshard
