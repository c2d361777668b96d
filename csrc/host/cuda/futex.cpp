#include "futex.h"

#include <climits>
#include <ctime>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace graphshard::hostcuda {

int64_t now_ns() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return int64_t{time.tv_sec} * 1000000000 + time.tv_nsec;
}

void futex_wait(const void* word, uint32_t expected, int64_t timeout_ns, bool shared) {
  const int operation = FUTEX_WAIT | (shared ? 0 : FUTEX_PRIVATE_FLAG);
  if (timeout_ns == kForever) {
    syscall(SYS_futex, word, operation, expected, nullptr, nullptr, 0);
    return;
  }
  if (timeout_ns <= 0) return;
  timespec timeout{};
  timeout.tv_sec = timeout_ns / 1000000000;
  timeout.tv_nsec = timeout_ns % 1000000000;
  syscall(SYS_futex, word, operation, expected, &timeout, nullptr, 0);
}

void futex_wake(const void* word, int count, bool shared) {
  syscall(SYS_futex, word, FUTEX_WAKE | (shared ? 0 : FUTEX_PRIVATE_FLAG), count, nullptr, nullptr, 0);
}

}  // namespace graphshard::hostcuda
