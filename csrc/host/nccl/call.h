// One collective call as ranks compare it.
#pragma once

#include <cstdint>
#include <string>

#include "segment.h"

namespace graphshard::hostnccl {

enum class CallKind : uint64_t { kAllGather = 1, kAllGatherByKernel = 2, kReduceScatter = 3 };

/// Where a buffer lies: in the n-th window that was registered, or in none.
struct Place {
  static constexpr uint64_t kNoWindow = UINT64_MAX;
  uint64_t window = kNoWindow;
  uint64_t offset = 0;  // 0 where there is no window: addresses differ between ranks

  bool is_in_window() const { return window != kNoWindow; }
  std::string text() const;
};

struct Call {
  CallKind kind = CallKind::kAllGather;
  uint64_t num_bytes = 0;  // a rank's part
  Place send;
  Place receive;

  Message words() const;
  static Call from_words(const Message& words);
  /// Equal calls have equal headers; unlike ones but for one in 2^32.
  uint32_t header() const;
  std::string text() const;
};

}  // namespace graphshard::hostnccl
