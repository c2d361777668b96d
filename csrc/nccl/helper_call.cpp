#include "nccl/helper_call.h"

#include <csignal>

#include <chrono>
#include <thread>

namespace graphshard {

namespace {

// Calls that somebody waits for or that clean up; never destroyed, as their threads may outlive everything.
struct Active {
  std::mutex mutex;
  std::condition_variable fewer;
  int count = 0;

  void add(int change) {
    const std::lock_guard<std::mutex> guard(mutex);
    count += change;
    fewer.notify_all();
  }
};

Active& active() {
  static auto* one = new Active;
  return *one;
}

// All signals blocked in this thread, hence in the threads that it starts: Python's main thread is to get them.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &previous_);
  }
  ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &previous_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
  sigset_t previous_;
};

}  // namespace

std::shared_ptr<HelperCall> HelperCall::start(Driver& driver, std::function<void()> function,
                                              std::function<void()> clean_up) {
  driver.enter();  // refused here rather than there: a forked child, an ending process
  auto call = std::make_shared<HelperCall>();
  const BlockedSignals blocked;
  active().add(1);
  try {
    std::thread([call, &driver, function = std::move(function), clean_up = std::move(clean_up)] {
      call->run(
          [&] {
            driver.enter();
            function();
          },
          clean_up);
    }).detach();
  } catch (...) {
    active().add(-1);
    throw;
  }
  return call;
}

void HelperCall::run(const std::function<void()>& function, const std::function<void()>& clean_up) {
  std::exception_ptr error;
  try {
    function();
  } catch (...) {  // any: it is the caller's, and a thread has nobody to throw to
    error = std::current_exception();
  }
  bool is_abandoned = false;
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    is_over_ = true;
    is_abandoned = is_abandoned_;
    error_ = error;
  }
  changed_.notify_all();
  if (!is_abandoned) {
    active().add(-1);
  } else if (error == nullptr && clean_up) {
    clean_up();
  }
}

bool HelperCall::wait(int64_t timeout_ns) {
  std::unique_lock<std::mutex> guard(mutex_);
  return changed_.wait_for(guard, std::chrono::nanoseconds(timeout_ns), [this] { return is_over_; });
}

void HelperCall::check() const {
  const std::lock_guard<std::mutex> guard(mutex_);
  if (error_ != nullptr) std::rethrow_exception(error_);
}

bool HelperCall::abandon() {
  const std::lock_guard<std::mutex> guard(mutex_);
  if (is_over_ || is_abandoned_) return !is_over_;
  is_abandoned_ = true;
  active().add(-1);
  return true;
}

void HelperCall::drain(double timeout_s) {
  std::unique_lock<std::mutex> guard(active().mutex);
  active().fewer.wait_for(guard, std::chrono::duration<double>(timeout_s), [] { return active().count == 0; });
}

bool Limit::wait_plainly(HelperCall& call, double timeout_s) {
  constexpr double kLongest = 9e9;  // seconds that fit into 63 bits of nanoseconds
  return call.wait(static_cast<int64_t>(std::min(timeout_s, kLongest) * 1e9));
}

}  // namespace graphshard
