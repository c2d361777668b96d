// One open capture per process: a second is refused, with a clear text, before it can spoil the first.
#pragma once

namespace graphshard {

class CaptureLock {
 public:
  // Waits up to `timeout_s` for another capture to end; DriverError if it does not. 0 refuses at once.
  explicit CaptureLock(double timeout_s);
  ~CaptureLock();
  CaptureLock(const CaptureLock&) = delete;
  CaptureLock& operator=(const CaptureLock&) = delete;

  static bool is_held();
};

}  // namespace graphshard
