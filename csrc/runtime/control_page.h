// A rank's control page: 4096 shared bytes that say who it is and how far it has come.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace graphshard {

// A batch of collectives that a rank issued: the `number`th, the hash of all up to it, and what it was.
struct Issue {
  uint64_t number = 0;
  uint64_t hash = 0;
  uint64_t what = 0;
};

// Why a rank gave up; -1 where nothing is known.
struct Failure {
  int64_t kind = 0;
  int64_t unit = -1;
  int64_t op = -1;
  int64_t step = -1;
  int64_t culprit = -1;
  std::string text;
};

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
  std::atomic<uint64_t> begun_step;
  std::atomic<uint64_t> begun_op;
  std::atomic<uint64_t> num_issues;  // written after the entry that it counts
  std::atomic<uint64_t> num_finished;
  struct Entry {
    std::atomic<uint64_t> number;  // 0 while the entry is being written
    std::atomic<uint64_t> hash;
    std::atomic<uint64_t> what;
  };
  std::array<Entry, 64> issues;      // the latest ones, by number modulo their count
  std::atomic<uint64_t> has_failed;  // written last, once
  std::atomic<uint64_t> first;       // on rank 0's page: 1 + the rank whose failure is everybody's
  std::array<std::atomic<uint64_t>, 5> failure;
  std::atomic<uint64_t> num_text_bytes;
  std::array<std::atomic<uint64_t>, 160> text;
};
static_assert(std::atomic<uint64_t>::is_always_lock_free, "words are shared between processes");
static_assert(sizeof(ControlWords) <= 4096, "the page");

class ControlPage : public std::enable_shared_from_this<ControlPage> {
 public:
  static constexpr size_t kNumBytes = 4096;
  static constexpr uint64_t kMagic = 0x6772617068736864;  // "graphshd"
  static constexpr uint64_t kVersion = 2;
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
  void set_begun(uint64_t step, uint64_t op) {
    words_->begun_op.store(op, std::memory_order_release);
    words_->begun_step.store(step, std::memory_order_release);
  }
  uint64_t begun_step() const { return words_->begun_step.load(std::memory_order_acquire); }
  uint64_t begun_op() const { return words_->begun_op.load(std::memory_order_acquire); }

  // The next batch of collectives; returns its number, from 1 on. One thread at a time.
  uint64_t post_issue(uint64_t hash, uint64_t what);
  // The entry with that number; nothing if it was not posted yet, or long ago.
  std::optional<Issue> issue(uint64_t number) const;
  uint64_t num_issues() const { return words_->num_issues.load(std::memory_order_acquire); }
  void set_num_finished(uint64_t value) { words_->num_finished.store(value, std::memory_order_release); }
  uint64_t num_finished() const { return words_->num_finished.load(std::memory_order_acquire); }

  // The first failure stays; text that does not fit is cut.
  void post_failure(const Failure& failure);
  bool has_failed() const { return words_->has_failed.load(std::memory_order_acquire) != 0; }
  std::optional<Failure> failure() const;

  // The one word of a page that every rank may write, on the page of rank 0: `rank` has posted its failure, and asks
  // whose came first. The same answer for all.
  uint64_t claim_first(uint64_t rank);
  // The rank whose failure is everybody's, if there is one.
  std::optional<uint64_t> first_failed() const;

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
