#include "nccl/comm_state.h"

#include <iomanip>
#include <sstream>

namespace graphshard {

namespace {

// After these the communicator can go on.
bool is_harmless(int result) { return result == nccl::kInvalidArgument || result == nccl::kInvalidUsage; }

std::string late_text(const char* entry_point, double timeout_s, const std::string& where) {
  std::ostringstream text;
  text << std::setprecision(3) << entry_point << " did not return within " << timeout_s << " s: " << where
       << "; a peer has not made the same call, or is gone. The call is left behind and the communicator is broken: "
          "abort it and look at the other ranks";
  return text.str();
}

}  // namespace

CommState::CommState(std::shared_ptr<NcclLibrary> library_in, std::string name_in, int rank_in, int world_size_in)
    : library(std::move(library_in)),
      driver(library->driver()),
      name(std::move(name_in)),
      rank(rank_in),
      world_size(world_size_in) {}

std::string CommState::text() const {
  return "communicator '" + name + "', rank " + std::to_string(rank) + " of " + std::to_string(world_size);
}

void CommState::refuse(const char* entry_point, int code, const std::string& why) const {
  throw NcclError(entry_point, code, std::string(entry_point) + " refused: " + text() + ": " + why);
}

void CommState::begin(const char* entry_point) {
  if (is_refusing.load(std::memory_order_acquire)) refuse(entry_point, nccl::kInvalidUsage, refusal());
  const char* other = nullptr;
  if (!entry_point_in_use.compare_exchange_strong(other, entry_point, std::memory_order_acquire)) {
    refuse(entry_point, nccl::kInvalidUsage,
           std::string(other) + " is in progress in another thread; one thread at a time may use a communicator");
  }
}

void CommState::check(int result, const char* entry_point, const std::string& detail) {
  if (__builtin_expect(result == nccl::kSuccess, 1)) return;
  try {
    library->fail(result, entry_point, text() + (detail.empty() ? "" : ", " + detail),
                  is_claimed.load() ? nullptr : comm.load());
  } catch (const NcclError& error) {
    if (!is_harmless(result)) break_off(error.what());
    throw;
  }
}

void CommState::run(const char* entry_point, const Limit& limit, const std::function<void()>& function,
                    const std::function<void()>& clean_up) {
  begin(entry_point);
  std::shared_ptr<HelperCall> call;
  try {
    call = HelperCall::start(
        driver,
        [state = shared_from_this(), function] {
          // Ended before the caller hears of it, who may make the next call at once.
          const EndOfCall end(*state);
          function();
        },
        clean_up);
  } catch (...) {
    end();
    throw;
  }
  bool is_over = false;
  try {
    is_over = limit.wait(*call, limit.timeout_s);
  } catch (...) {  // Ctrl-C
    if (call->abandon()) break_off(std::string(entry_point) + " was interrupted while it waited for peers");
    throw;
  }
  if (!is_over && call->abandon()) {
    const std::string late = late_text(entry_point, limit.timeout_s, text());
    break_off(late);
    throw NcclError(entry_point, nccl::kInProgress, late);
  }
  call->check();
}

void CommState::close(const std::string& reason) {
  const std::lock_guard<std::mutex> guard(mutex);
  if (reason_.empty()) reason_ = reason;
  is_refusing.store(true, std::memory_order_release);
}

void CommState::break_off(const std::string& reason) {
  const std::lock_guard<std::mutex> guard(mutex);
  if (!is_broken_) reason_ = reason;
  is_broken_ = true;
  is_refusing.store(true, std::memory_order_release);
}

std::string CommState::refusal() const {
  const std::lock_guard<std::mutex> guard(mutex);
  return is_broken_ ? "it is broken: " + reason_ : reason_;
}

bool CommState::is_broken() const {
  const std::lock_guard<std::mutex> guard(mutex);
  return is_broken_;
}

void CommState::abort_claimed() {
  const ncclComm_t aborted = comm.load();
  if (aborted != nullptr) check(table().ncclCommAbort(aborted), "ncclCommAbort");
  comm.store(nullptr);
  const std::lock_guard<std::mutex> guard(mutex);
  windows.clear();
}

}  // namespace graphshard
