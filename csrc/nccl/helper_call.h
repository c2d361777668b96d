// A call on a thread of its own, for library calls that wait for peers and may never return.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>

#include "runtime/driver.h"

namespace graphshard {

// Note [calls left behind]: nothing can end a library call that waits for a peer that is gone. So it has a thread of
// its own, whose function owns all that it touches, and that may be left where it is: `abandon` says that nobody will
// ask for the result. Such a thread never touches Python, and takes no signals.
class HelperCall {
 public:
  // Runs `function` on a new thread with `driver`'s context current. `clean_up` runs there after a success that comes
  // when the call has been abandoned; it may be empty.
  static std::shared_ptr<HelperCall> start(Driver& driver, std::function<void()> function,
                                           std::function<void()> clean_up = {});

  // Whether it is over, successfully or not; false if `timeout_ns` passed first.
  bool wait(int64_t timeout_ns);
  // Rethrows what `function` threw. For a call that is over.
  void check() const;
  // True if the call was not over: from now on nobody asks for its result.
  bool abandon();

  // Waits for the calls that are neither over nor abandoned; for the end of the process.
  static void drain(double timeout_s);

 private:
  void run(const std::function<void()>& function, const std::function<void()>& clean_up);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool is_over_ = false;
  bool is_abandoned_ = false;
  std::exception_ptr error_;
};

// A limit in seconds, and how to wait for it: the binding's way lets go of Python's lock and answers Ctrl-C by
// throwing.
struct Limit {
  using Wait = bool (*)(HelperCall& call, double timeout_s);

  static bool wait_plainly(HelperCall& call, double timeout_s);

  double timeout_s = 0.0;
  Wait wait = &wait_plainly;
};

}  // namespace graphshard
