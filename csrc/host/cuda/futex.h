// Sleeping and waking on 32-bit words, and short adaptive spins.
#pragma once

#include <atomic>
#include <cstdint>

namespace graphshard::hostcuda {

constexpr int64_t kForever = -1;

int64_t now_ns();

/// Sleep while `*word == expected`, at most `timeout_ns` (kForever: no limit). May wake early.
void futex_wait(const void* word, uint32_t expected, int64_t timeout_ns, bool shared = false);
void futex_wake(const void* word, int count, bool shared = false);

inline void cpu_pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Spin briefly until `ready()`: other processes share the cores, and a sleeping thread costs ~25 us to wake.
template <typename Ready>
bool spin_until(const Ready& ready, int64_t budget_ns) {
  for (int i = 0; i < 64; ++i) {
    if (ready()) return true;
    cpu_pause();
  }
  const int64_t deadline = now_ns() + budget_ns;
  while (now_ns() < deadline) {
    for (int i = 0; i < 16; ++i) {
      if (ready()) return true;
      cpu_pause();
    }
  }
  return ready();
}

}  // namespace graphshard::hostcuda
