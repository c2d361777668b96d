#include "runtime/capture_lock.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>

#include "driver/error.h"

namespace graphshard {

namespace {

struct State {
  std::mutex mutex;
  std::condition_variable released;
  bool is_held = false;
  int num_forbidding = 0;  // NoCaptures
};

State& state() {
  static auto* one = new State;  // never destroyed: threads may wait on it while the process ends
  return *one;
}

}  // namespace

CaptureLock::CaptureLock(double timeout_s) {
  std::unique_lock<std::mutex> guard(state().mutex);
  const auto is_free = [] { return !state().is_held; };
  if (!state().released.wait_for(guard, std::chrono::duration<double>(timeout_s), is_free)) {
    throw DriverError("cuStreamBeginCapture", CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                      "capture refused: another capture is open in this process, waited " + std::to_string(timeout_s) +
                          " s for it; end it first, or capture from one thread at a time");
  }
  state().is_held = true;
  state().released.wait(guard, [] { return state().num_forbidding == 0; });  // they wait for nothing
}

CaptureLock::~CaptureLock() {
  {
    std::lock_guard<std::mutex> guard(state().mutex);
    state().is_held = false;
  }
  state().released.notify_all();
}

NoCapture::NoCapture() {
  std::lock_guard<std::mutex> guard(state().mutex);
  is_granted_ = !state().is_held;
  if (is_granted_) ++state().num_forbidding;
}

NoCapture::~NoCapture() {
  if (!is_granted_) return;
  {
    std::lock_guard<std::mutex> guard(state().mutex);
    --state().num_forbidding;
  }
  state().released.notify_all();
}

bool CaptureLock::is_held() {
  std::lock_guard<std::mutex> guard(state().mutex);
  return state().is_held;
}

}  // namespace graphshard
