#include "nccl/communicator.h"

#include <algorithm>

namespace graphshard {

namespace {

void open_on_helper(CommState& state, const ncclUniqueId& id) {
  nccl::Config config;
  config.version = static_cast<unsigned int>(std::min<int>(state.library->version(), static_cast<int>(config.version)));
  config.blocking = 1;
  config.cta_policy = nccl::kCtaPolicyZero;
  config.comm_name = state.name.c_str();
  ncclComm_t comm = nullptr;
  state.check(state.table().ncclCommInitRankConfig(&comm, state.world_size, id, state.rank, &config),
              "ncclCommInitRankConfig");
  state.comm.store(comm);
}

// What ncclMemAlloc gave; freed by whoever is done with it last.
struct LentMemory {
  explicit LentMemory(std::shared_ptr<NcclLibrary> library_in) : library(std::move(library_in)) {}
  ~LentMemory() {
    if (pointer != nullptr && library->driver().is_usable()) library->table().ncclMemFree(pointer);
  }
  LentMemory(const LentMemory&) = delete;
  LentMemory& operator=(const LentMemory&) = delete;

  const std::shared_ptr<NcclLibrary> library;
  void* pointer = nullptr;
};

// Keeps a communicator from being destroyed.
struct Hold {
  explicit Hold(std::shared_ptr<CommState> state_in) : state(std::move(state_in)) { state->num_holds.fetch_add(1); }
  ~Hold() { state->num_holds.fetch_sub(1); }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;

  const std::shared_ptr<CommState> state;
};

void gather(CommState& state, CUdeviceptr destination, CUdeviceptr source, size_t num_bytes, CUstream stream) {
  state.check(state.table().ncclAllGather(reinterpret_cast<const void*>(source), reinterpret_cast<void*>(destination),
                                          num_bytes, nccl::kUint8, state.comm.load(), stream),
              "ncclAllGather");
}

void scatter(CommState& state, CUdeviceptr destination, CUdeviceptr source, size_t num_elements, ElementType type,
             CUstream stream) {
  state.check(
      state.table().ncclReduceScatter(reinterpret_cast<const void*>(source), reinterpret_cast<void*>(destination),
                                      num_elements, static_cast<int>(type), nccl::kSum, state.comm.load(), stream),
      "ncclReduceScatter");
}

size_t times(size_t bytes, size_t count) {
  size_t product = 0;
  return __builtin_mul_overflow(bytes, count, &product) ? SIZE_MAX : product;
}

std::string range_text(const Memory& memory) {
  return "memory of " + std::to_string(memory.num_bytes()) + " bytes at " + hex(memory.address());
}

auto find_window(CommState& state, const Memory& memory) {
  return std::find_if(state.windows.begin(), state.windows.end(),
                      [&](const CommState::Window& window) { return window.memory == memory.mapping(); });
}

void check_registrable(CommState& state, const Memory& memory) {
  constexpr const char* kEntryPoint = "ncclCommWindowRegister";
  const auto refuse = [&](const std::string& why) {
    state.refuse(kEntryPoint, nccl::kInvalidArgument, range_text(memory) + " " + why);
  };
  if (&memory.driver() != &state.driver) refuse("is another driver's, " + memory.driver().path());
  if (memory.is_read_only()) refuse("is imported read-only: register memory of this rank's own");
  if (memory.address() % nccl::kWindowAlignmentBytes != 0) {
    refuse("does not begin at a multiple of 4096 bytes, as windows must; take it from allocate()");
  }
  const std::lock_guard<std::mutex> guard(state.mutex);
  if (find_window(state, memory) != state.windows.end()) {
    refuse("is registered already: a buffer has one window; deregister it first");
  }
}

}  // namespace

std::shared_ptr<Communicator> Communicator::open(std::shared_ptr<NcclLibrary> library, const ncclUniqueId& id,
                                                 int world_size, int rank, const std::string& name,
                                                 const Limit& limit) {
  if (world_size < 1 || rank < 0 || rank >= world_size) {
    throw std::invalid_argument("communicator '" + name + "': rank " + std::to_string(rank) + " of " +
                                std::to_string(world_size) + "; ranks are 0 to world_size - 1");
  }
  if (!library->missing().empty()) library->require(library->missing().front().c_str());
  auto state = std::make_shared<CommState>(std::move(library), name, rank, world_size);
  state->run(
      "ncclCommInitRankConfig", limit, [state = state.get(), id] { open_on_helper(*state, id); },
      [state] {
        if (state->claim()) state->abort_claimed();  // peers came too late: nobody is going to use it
      });
  return std::shared_ptr<Communicator>(new Communicator(std::move(state)));
}

Communicator::Loan Communicator::borrow(size_t num_bytes, const Limit& limit) {
  constexpr const char* kEntryPoint = "ncclMemAlloc";
  const size_t reserved_bytes = Memory::reserved_bytes(state_->driver, num_bytes, kEntryPoint);
  auto lent = std::make_shared<LentMemory>(state_->library);
  state_->run(kEntryPoint, limit, [state = state_, lent, reserved_bytes] {
    const std::string detail = "allocation of " + std::to_string(reserved_bytes) + " bytes";
    state->check(state->table().ncclMemAlloc(&lent->pointer, reserved_bytes), kEntryPoint, detail);
    if (lent->pointer == nullptr) state->check(nccl::kInternalError, kEntryPoint, detail + ", of which came none");
  });
  const auto address = reinterpret_cast<CUdeviceptr>(lent->pointer);
  return {address, num_bytes, reserved_bytes, std::move(lent)};
}

std::shared_ptr<Memory> Communicator::adopt(Loan loan) const {
  return Memory::adopt(state_->driver, loan.address, loan.num_bytes, loan.reserved_bytes, std::move(loan.lender));
}

void Communicator::register_window(const Memory& memory, const Limit& limit) {
  constexpr const char* kEntryPoint = "ncclCommWindowRegister";
  check_registrable(*state_, memory);
  state_->run(kEntryPoint, limit, [state = state_.get(), mapping = memory.mapping(), text = range_text(memory)] {
    ncclWindow_t window = nullptr;
    state->check(state->table().ncclCommWindowRegister(state->comm.load(), reinterpret_cast<void*>(mapping->address),
                                                       mapping->reserved_bytes, &window, nccl::kWindowCollSymmetric),
                 kEntryPoint, text);
    if (window == nullptr) {
      throw NcclError(kEntryPoint, nccl::kInvalidUsage,
                      std::string(kEntryPoint) + " answered ncclSuccess with a null window: symmetric support is " +
                          "missing for " + text + ", at " + state->text() + ", " + state->library->text() +
                          "; it needs memory from ncclMemAlloc, NCCL_CUMEM_ENABLE, and peers in one NVLink domain");
    }
    const std::lock_guard<std::mutex> guard(state->mutex);
    state->windows.push_back({mapping, window});
  });
}

void Communicator::deregister_window(const Memory& memory, const Limit& limit) {
  constexpr const char* kEntryPoint = "ncclCommWindowDeregister";
  check_unheld(kEntryPoint);
  ncclWindow_t handle = nullptr;
  {
    const std::lock_guard<std::mutex> guard(state_->mutex);
    const auto window = find_window(*state_, memory);
    if (window != state_->windows.end()) handle = window->handle;
  }
  // One that has ended has no windows either; `run` says so.
  if (handle == nullptr && !state_->is_refusing.load())
    state_->refuse(kEntryPoint, nccl::kInvalidArgument, range_text(memory) + " has no window");
  state_->run(kEntryPoint, limit, [state = state_.get(), handle] {
    state->check(state->table().ncclCommWindowDeregister(state->comm.load(), handle), kEntryPoint);
  });
  const std::lock_guard<std::mutex> guard(state_->mutex);
  const auto window = find_window(*state_, memory);
  if (window != state_->windows.end()) state_->windows.erase(window);
}

void Communicator::all_gather(CUdeviceptr destination, CUdeviceptr source, size_t num_bytes, CUstream stream) {
  state_->begin("ncclAllGather");
  const EndOfCall end(*state_);
  gather(*state_, destination, source, num_bytes, stream);
}

void Communicator::reduce_scatter(CUdeviceptr destination, CUdeviceptr source, size_t num_elements, ElementType type,
                                  CUstream stream) {
  state_->begin("ncclReduceScatter");
  const EndOfCall end(*state_);
  scatter(*state_, destination, source, num_elements, type, stream);
}

void Communicator::all_gather(CUdeviceptr destination, CUdeviceptr source, size_t num_bytes, const Stream& stream,
                              const std::optional<Limit>& limit) {
  constexpr const char* kEntryPoint = "ncclAllGather";
  Driver& driver = state_->driver;
  driver.enter();
  check_not_capturing(*stream.handle(), kEntryPoint);
  auto written = driver.find_memory(destination, times(num_bytes, state_->world_size), true, kEntryPoint);
  auto read = driver.find_memory(source, num_bytes, false, kEntryPoint);
  if (!limit) return all_gather(destination, source, num_bytes, stream.handle()->stream);
  state_->run(kEntryPoint, *limit,
              [state = state_.get(), destination, source, num_bytes, stream = stream.handle(), written, read] {
                gather(*state, destination, source, num_bytes, stream->stream);
              });
}

void Communicator::reduce_scatter(CUdeviceptr destination, CUdeviceptr source, size_t num_elements, ElementType type,
                                  const Stream& stream, const std::optional<Limit>& limit) {
  constexpr const char* kEntryPoint = "ncclReduceScatter";
  Driver& driver = state_->driver;
  driver.enter();
  check_not_capturing(*stream.handle(), kEntryPoint);
  const size_t num_bytes = times(num_elements, element_bytes(type));
  auto written = driver.find_memory(destination, num_bytes, true, kEntryPoint);
  auto read = driver.find_memory(source, times(num_bytes, state_->world_size), false, kEntryPoint);
  if (!limit) return reduce_scatter(destination, source, num_elements, type, stream.handle()->stream);
  state_->run(kEntryPoint, *limit,
              [state = state_.get(), destination, source, num_elements, type, stream = stream.handle(), written, read] {
                scatter(*state, destination, source, num_elements, type, stream->stream);
              });
}

std::shared_ptr<void> Communicator::hold() { return std::make_shared<Hold>(state_); }

std::optional<std::string> Communicator::async_error() {
  state_->driver.enter();
  if (state_->is_refusing.load()) return state_->text() + ": " + state_->refusal();
  std::string found;
  {
    // Not while somebody frees the communicator: that begins under this lock.
    const std::lock_guard<std::mutex> guard(state_->mutex);
    if (state_->is_claimed.load()) return state_->text() + ": it is being ended";
    int result = nccl::kSuccess;
    state_->library->check(state_->table().ncclCommGetAsyncError(state_->comm.load(), &result), "ncclCommGetAsyncError",
                           state_->text());
    if (result == nccl::kSuccess || result == nccl::kInProgress) return std::nullopt;
    found = state_->library->describe(result, state_->comm.load());
  }
  state_->break_off("asynchronous error " + found);
  return state_->text() + ": asynchronous error " + found;
}

}  // namespace graphshard
