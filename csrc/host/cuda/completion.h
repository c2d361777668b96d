// Reference counts, and the object that an event record binds to.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>

#include "futex.h"

namespace graphshard::hostcuda {

/// Base of objects that die when the last reference goes: destroying what is in use only drops the caller's.
class RefCounted {
 public:
  void retain() { references_.fetch_add(1, std::memory_order_relaxed); }
  bool release() { return references_.fetch_sub(1, std::memory_order_acq_rel) == 1; }

 private:
  std::atomic<int> references_{1};
};

template <typename T>
class Ref {
 public:
  Ref() = default;
  /// Takes over the reference that `new` made.
  static Ref adopt(T* object) { return Ref(object); }
  static Ref share(T* object) {
    if (object != nullptr) object->retain();
    return Ref(object);
  }
  Ref(const Ref& other) : object_(other.object_) {
    if (object_ != nullptr) object_->retain();
  }
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() {
    if (object_ != nullptr && object_->release()) delete object_;
  }
  T* get() const { return object_; }
  T* operator->() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  explicit Ref(T* object) : object_(object) {}
  T* object_ = nullptr;
};

/// One point in one stream: reached once, waited for by any number of streams and hosts.
class Completion : public RefCounted {
 public:
  bool done() const { return state_.load(std::memory_order_acquire) == kDone; }
  /// False if `timeout_ns` (kForever: no limit) passed first.
  bool wait(int64_t timeout_ns);
  void finish();
  void finish_at(int64_t time_ns) {
    time_ns_ = time_ns;
    finish();
  }
  /// When it was reached; 0 unless asked for.
  int64_t time_ns() const { return time_ns_; }

 private:
  static constexpr uint32_t kPending = 0;
  static constexpr uint32_t kDone = 1;
  static constexpr uint32_t kPendingWithSleepers = 2;

  std::atomic<uint32_t> state_{kPending};
  int64_t time_ns_ = 0;
};

}  // namespace graphshard::hostcuda
