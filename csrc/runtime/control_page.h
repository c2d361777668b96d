// A rank's control page: 4096 shared bytes that say who it is and how far it has come.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>

namespace graphshard {

// The page as every process sees it. All words are atomics, written with release and read with acquire order, since
// readers on weakly ordered CPUs must not see a word before what it announces.
struct ControlWords {
  std::atomic<uint64_t> magic;  // written last
  std::atomic<uint64_t> version;
  std::atomic<uint64_t> pid;
  std::atomic<uint64_t> state;
  std::atomic<uint64_t> epoch;
  std::atomic<uint64_t> step;
  std::atomic<uint64_t> op;
  std::array<std::atomic<uint64_t>, 4> digest;
};
static_assert(std::atomic<uint64_t>::is_always_lock_free, "words are shared between processes");

class ControlPage {
 public:
  static constexpr size_t kNumBytes = 4096;
  static constexpr uint64_t kMagic = 0x6772617068736864;  // "graphshd"
  static constexpr uint64_t kVersion = 1;
  using Digest = std::array<unsigned char, 32>;

  static std::shared_ptr<ControlPage> create();
  // The descriptor stays the caller's.
  static std::shared_ptr<ControlPage> open_fd(int fd);
  ~ControlPage();
  ControlPage(const ControlPage&) = delete;
  ControlPage& operator=(const ControlPage&) = delete;

  int duplicate_fd() const;
  void set_digest(const Digest& digest);
  Digest digest() const;

  void set_pid(uint64_t value) { words_->pid.store(value, std::memory_order_release); }
  void set_state(uint64_t value) { words_->state.store(value, std::memory_order_release); }
  void set_epoch(uint64_t value) { words_->epoch.store(value, std::memory_order_release); }
  void set_progress(uint64_t step, uint64_t op) {
    words_->op.store(op, std::memory_order_release);
    words_->step.store(step, std::memory_order_release);
  }
  uint64_t pid() const { return words_->pid.load(std::memory_order_acquire); }
  uint64_t state() const { return words_->state.load(std::memory_order_acquire); }
  uint64_t epoch() const { return words_->epoch.load(std::memory_order_acquire); }
  uint64_t step() const { return words_->step.load(std::memory_order_acquire); }
  uint64_t op() const { return words_->op.load(std::memory_order_acquire); }

 private:
  ControlPage(int fd, ControlWords* words) : fd_(fd), words_(words) {}
  static ControlWords* map(int fd);

  int fd_;
  ControlWords* words_;
};

}  // namespace graphshard
