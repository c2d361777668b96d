// What callers hold: communicators and allocations, found by their handles; a stale handle is an error, not a crash.
#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "failure.h"

namespace graphshard::hostnccl {

/// Objects by a key that callers keep. Each use shares the object, so that it outlives calls in progress.
template <typename Key, typename Object>
class Handles {
 public:
  void add(Key key, std::shared_ptr<Object> object) {
    const std::lock_guard lock(mutex_);
    objects_[key] = std::move(object);
  }
  /// kInvalidArgument for a key that is not there.
  std::shared_ptr<Object> get(Key key, const char* what) const {
    const std::lock_guard lock(mutex_);
    const auto found = objects_.find(key);
    if (found == objects_.end()) {
      throw Failure(nccl::kInvalidArgument, std::string(what) + " is null, or was given back already");
    }
    return found->second;
  }
  /// Whoever takes it first has it.
  std::shared_ptr<Object> take(Key key, const char* what) {
    const std::lock_guard lock(mutex_);
    const auto found = objects_.find(key);
    if (found == objects_.end()) {
      throw Failure(nccl::kInvalidArgument, std::string(what) + " is null, or was given back already");
    }
    std::shared_ptr<Object> object = std::move(found->second);
    objects_.erase(found);
    return object;
  }
  /// Nothing where it is gone already.
  void forget(Key key) {
    std::shared_ptr<Object> object;  // dies after the lock
    const std::lock_guard lock(mutex_);
    const auto found = objects_.find(key);
    if (found == objects_.end()) return;
    object = std::move(found->second);
    objects_.erase(found);
  }

 private:
  mutable std::mutex mutex_;
  std::map<Key, std::shared_ptr<Object>> objects_;
};

}  // namespace graphshard::hostnccl
