#include "runtime/calls.h"

namespace graphshard {

void CallErrors::fail(std::exception_ptr error) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (first_ == nullptr) std::swap(first_, error);
  has_failed_.store(true, std::memory_order_release);
}

void CallErrors::check() {
  if (!has_failed()) return;
  std::exception_ptr error;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    std::swap(error, first_);
    has_failed_.store(false, std::memory_order_release);
  }
  if (error != nullptr) std::rethrow_exception(error);
}

Calls::Calls(std::vector<std::pair<Function, void*>> functions, std::shared_ptr<CallErrors> errors,
             std::shared_ptr<void> owner)
    : errors_(std::move(errors)), owner_(std::move(owner)) {
  entries_.reserve(functions.size());
  for (const auto& [function, argument] : functions) entries_.push_back(Entry{function, argument, errors_.get()});
}

}  // namespace graphshard
