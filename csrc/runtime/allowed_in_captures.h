// Calls that captures forbid, made where no capture sees them.
#pragma once

#include "driver/table.h"

namespace graphshard {

// While it lives, what this thread calls is not held against any capture: not its own, nor one of the global mode that
// somebody else has open (another library's, a server's). For calls that touch no stream under capture: making and
// freeing memory, streams and events, and waiting for work that runs. Without it such a call is error 900 and the
// capture is lost.
class AllowedInCaptures {
 public:
  explicit AllowedInCaptures(const Table& table) : table_(table), is_relaxed_(exchange()) {}
  ~AllowedInCaptures() {
    if (is_relaxed_) exchange();
  }
  AllowedInCaptures(const AllowedInCaptures&) = delete;
  AllowedInCaptures& operator=(const AllowedInCaptures&) = delete;

 private:
  // Fails only where there is no context; then the call that follows does, too.
  bool exchange() { return table_.cuThreadExchangeStreamCaptureMode(&mode_) == CUDA_SUCCESS; }

  const Table& table_;
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
  bool is_relaxed_;  // after mode_, which it exchanges
};

}  // namespace graphshard
