// How communicators end.
//
// Note [teardown of communicators]: graphs, then windows, then the communicator, then memory. NCCL waits in its destroy
// for captured graphs, forever, so graphs `hold` their communicators and `destroy` refuses as long as one does. Windows
// that are left are deregistered by `destroy` itself, last registered first, and keep their memory until then. Memory
// may be dropped at any time: it keeps the library alone, and its address range until windows, lists and graphs are
// done with it. A communicator that is merely dropped (by gc) is aborted, which waits for nobody, on a helper thread.
#include <chrono>
#include <system_error>
#include <thread>

#include "nccl/communicator.h"

namespace graphshard {

namespace {

void destroy_on_helper(CommState& state) {
  std::vector<CommState::Window> windows;
  {
    const std::lock_guard<std::mutex> guard(state.mutex);
    windows = state.windows;
  }
  const NcclTable& table = state.table();
  for (auto window = windows.rbegin(); window != windows.rend(); ++window) {
    if (state.is_claimed.load()) return;  // aborted, while a call before this one was stuck
    state.check(table.ncclCommWindowDeregister(state.comm.load(), window->handle), "ncclCommWindowDeregister");
  }
  if (state.is_claimed.load()) return;
  state.check(table.ncclCommFinalize(state.comm.load()), "ncclCommFinalize");
  if (!state.claim()) return;
  state.check(table.ncclCommDestroy(state.comm.load()), "ncclCommDestroy");
  state.comm.store(nullptr);
  const std::lock_guard<std::mutex> guard(state.mutex);
  state.windows.clear();
}

// Starts an abort unless the communicator is gone or going. Refused in a forked child and at the process's end.
void begin_abort_of(const std::shared_ptr<CommState>& state) {
  if (state->is_claimed.load()) return;
  state->break_off("it was aborted");
  const std::lock_guard<std::mutex> guard(state->mutex);
  if (!state->claim()) return;
  try {
    state->ending = HelperCall::start(state->driver, [state] { state->abort_claimed(); });
  } catch (...) {
    state->is_claimed.store(false);
    throw;
  }
}

// Aborts a dropped communicator as soon as no stream is busy with its work.
struct Dropped {
  explicit Dropped(std::shared_ptr<CommState> state_in) : state(std::move(state_in)) {}
  ~Dropped() {
    try {
      begin_abort_of(state);
    } catch (const DriverError&) {        // the process is ending: it takes the communicator along
    } catch (const std::system_error&) {  // no thread to be had: leaked, rather than waited for
    }
  }
  Dropped(const Dropped&) = delete;
  Dropped& operator=(const Dropped&) = delete;

  const std::shared_ptr<CommState> state;
};

}  // namespace

Communicator::~Communicator() {
  Driver& driver = state_->driver;
  if (!state_->is_claimed.load()) driver.retire(std::make_shared<Dropped>(std::move(state_)));
}

void Communicator::begin_abort() {
  state_->driver.enter();
  begin_abort_of(state_);
}

bool Communicator::abort(const Limit& limit) {
  begin_abort();
  return wait_for_end(limit, "ncclCommAbort");
}

bool Communicator::wait_unheld(int64_t timeout_ns) const {
  using Clock = std::chrono::steady_clock;
  constexpr auto kPause = std::chrono::microseconds(200);
  const auto deadline = Clock::now() + std::chrono::nanoseconds(timeout_ns);
  while (true) {
    state_->driver.reap();
    if (state_->num_holds.load() == 0 || state_->driver.num_retired() == 0) return true;
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(kPause);
  }
}

void Communicator::check_unheld(const char* entry_point) const {
  const int num_holds = state_->num_holds.load();
  if (num_holds == 0) return;
  state_->refuse(entry_point, nccl::kInvalidUsage,
                 std::to_string(num_holds) + " graphs with its collectives are alive, or not done: drop them first, " +
                     "as NCCL waits for them forever");
}

void Communicator::begin_destroy() {
  constexpr const char* kEntryPoint = "ncclCommDestroy";
  state_->driver.enter();
  {
    const std::lock_guard<std::mutex> guard(state_->mutex);
    if (state_->ending != nullptr) return;
  }
  check_unheld(kEntryPoint);
  state_->begin(kEntryPoint);
  state_->close("it was destroyed");
  const std::lock_guard<std::mutex> guard(state_->mutex);
  try {
    state_->ending = HelperCall::start(state_->driver, [state = state_] {
      const EndOfCall end(*state);
      destroy_on_helper(*state);
    });
  } catch (...) {
    state_->end();
    throw;
  }
}

bool Communicator::destroy(const Limit& limit) {
  begin_destroy();
  return wait_for_end(limit, "ncclCommDestroy");
}

bool Communicator::wait_for_end(const Limit& limit, const char* entry_point) {
  std::shared_ptr<HelperCall> call;
  {
    const std::lock_guard<std::mutex> guard(state_->mutex);
    call = state_->ending;
  }
  bool is_over = false;
  try {
    is_over = limit.wait(*call, limit.timeout_s);
  } catch (...) {  // Ctrl-C
    call->abandon();
    throw;
  }
  if (!is_over && call->abandon()) {
    state_->break_off(std::string(entry_point) + " has not returned in time");
    return false;
  }
  call->check();
  return true;
}

}  // namespace graphshard
