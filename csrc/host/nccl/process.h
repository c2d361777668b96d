// Processes as the kernel sees them: a pid alone may have been given to somebody else by now.
#pragma once

#include <cstdint>

namespace graphshard::hostnccl {

struct ProcessId {
  int64_t pid = 0;
  uint64_t start_time = 0;  // in ticks since boot

  static ProcessId self();
  /// Neither ended nor a zombie.
  bool is_alive() const;
};

}  // namespace graphshard::hostnccl
