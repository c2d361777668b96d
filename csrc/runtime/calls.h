// What compute ops call: C functions with one argument, and where their failures are kept.
#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <vector>

namespace graphshard {

// The first failure of a set of host functions. A host function cannot fail its stream, so it leaves its exception
// here.
class CallErrors {
 public:
  bool has_failed() const { return has_failed_.load(std::memory_order_acquire); }
  void fail(std::exception_ptr error);
  // Rethrows the first failure, if there is one, and forgets it.
  void check();

 private:
  std::atomic<bool> has_failed_{false};
  std::mutex mutex_;
  std::exception_ptr first_;
};

class Calls : public std::enable_shared_from_this<Calls> {
 public:
  using Function = void (*)(void*);
  struct Entry {
    Function function;
    void* argument;
    CallErrors* errors;
  };

  // `owner` keeps the arguments alive; `errors` outlives them with it.
  Calls(std::vector<std::pair<Function, void*>> functions, std::shared_ptr<CallErrors> errors,
        std::shared_ptr<void> owner);

  size_t size() const { return entries_.size(); }
  const Entry* data() const { return entries_.data(); }
  void check() { errors_->check(); }

  // The host function of every compute op; skipped once one of them has failed.
  static void run(void* entry) {
    const auto& call = *static_cast<const Entry*>(entry);
    if (!call.errors->has_failed()) call.function(call.argument);
  }

 private:
  std::shared_ptr<CallErrors> errors_;
  std::shared_ptr<void> owner_;
  std::vector<Entry> entries_;
};

}  // namespace graphshard
