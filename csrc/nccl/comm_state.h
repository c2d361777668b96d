// What a communicator shares with the calls it leaves behind: handle, windows, and why calls are refused.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "nccl/helper_call.h"
#include "nccl/table.h"

namespace graphshard {

struct CommState : std::enable_shared_from_this<CommState> {
  // A registered memory, kept as long as its window.
  struct Window {
    std::shared_ptr<Mapping> memory;
    ncclWindow_t handle;
  };

  CommState(std::shared_ptr<NcclLibrary> library, std::string name, int rank, int world_size);

  const NcclTable& table() const { return library->table(); }
  // "communicator 'weights', rank 1 of 4".
  std::string text() const;

  // Marks the begin and end of a call; NcclError if calls are refused, or if another one is in progress: NCCL's
  // communicators are one thread's at a time, and ranks whose order is left to chance do not match.
  void begin(const char* entry_point);
  void end() { entry_point_in_use.store(nullptr, std::memory_order_release); }
  // Throws NcclError if `result` is not success, which breaks the communicator unless only the arguments were wrong.
  void check(int result, const char* entry_point, const std::string& detail = {});
  // `function` between `begin` and `end` on a helper. A limit that passes, or an interrupt, breaks the communicator.
  void run(const char* entry_point, const Limit& limit, const std::function<void()>& function,
           const std::function<void()>& clean_up = {});

  // From now on calls are refused; the first reason for being broken is kept.
  void close(const std::string& reason);
  void break_off(const std::string& reason);
  [[noreturn]] void refuse(const char* entry_point, int code, const std::string& why) const;
  std::string refusal() const;
  bool is_broken() const;

  // Frees the communicator, unless somebody else has begun to.
  bool claim() { return !is_claimed.exchange(true); }
  void abort_claimed();

  const std::shared_ptr<NcclLibrary> library;
  Driver& driver;
  const std::string name;
  const int rank;
  const int world_size;

  std::atomic<ncclComm_t> comm{nullptr};
  std::atomic<const char*> entry_point_in_use{nullptr};
  std::atomic<bool> is_refusing{false};
  std::atomic<bool> is_claimed{false};
  std::atomic<int> num_holds{0};

  mutable std::mutex mutex;            // never held over a call that may wait for a peer
  std::vector<Window> windows;         // in the order of their registration
  std::shared_ptr<HelperCall> ending;  // the last abort or destroy

 private:
  std::string reason_;
  bool is_broken_ = false;
};

// Ends a call that has begun.
class EndOfCall {
 public:
  explicit EndOfCall(CommState& state) : state_(state) {}
  ~EndOfCall() { state_.end(); }
  EndOfCall(const EndOfCall&) = delete;
  EndOfCall& operator=(const EndOfCall&) = delete;

 private:
  CommState& state_;
};

}  // namespace graphshard
