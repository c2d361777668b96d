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

// No capture begins while one of these lives: for queries of streams, which would end another thread's capture. To be
// held over calls that do not wait. `is_granted()` is false if a capture is open.
class NoCapture {
 public:
  NoCapture();
  ~NoCapture();
  NoCapture(const NoCapture&) = delete;
  NoCapture& operator=(const NoCapture&) = delete;

  bool is_granted() const { return is_granted_; }

 private:
  bool is_granted_;
};

}  // namespace graphshard
