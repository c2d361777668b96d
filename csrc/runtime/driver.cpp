#include "runtime/driver.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <sstream>
#include <thread>

#include "runtime/allowed_in_captures.h"
#include "runtime/capture_lock.h"

namespace graphshard {

namespace {

std::atomic<uint64_t> fork_count{0};
std::atomic<bool> is_exiting{false};
thread_local bool is_in_host_function = false;
std::atomic<Driver::RunUnlocked> run_unlocked{nullptr};

// Never destroyed: see Note [drivers live for good].
struct Drivers {
  std::mutex mutex;
  std::map<std::pair<std::string, int>, Driver*> by_key;
};

Drivers& drivers() {
  static auto* all = new Drivers;
  return *all;
}

void watch_forks() {
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, [] { fork_count.fetch_add(1); }); });
}

void without_lock(void (*function)(void*), void* argument) {
  if (auto run = run_unlocked.load()) {
    run(function, argument);
  } else {
    function(argument);
  }
}

// For drivers without a timed wait: asks again and again, ever less often.
template <typename Query>
bool poll(const Query& query, int64_t timeout_ns) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::nanoseconds(timeout_ns);
  auto pause = std::chrono::microseconds(0);
  for (int turn = 0; !query(); ++turn) {
    if (Clock::now() >= deadline) return false;
    if (turn < 64) continue;  // most waits are short: a sleep costs 50 us at least
    pause = std::min(pause * 2 + std::chrono::microseconds(10), std::chrono::microseconds(1000));
    std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(pause, deadline - Clock::now()));
  }
  return true;
}

}  // namespace

std::string hex(CUdeviceptr address) {
  std::ostringstream text;
  text << "0x" << std::hex << address;
  return text.str();
}

HostFunctionScope::HostFunctionScope() { is_in_host_function = true; }

HostFunctionScope::~HostFunctionScope() { is_in_host_function = false; }

bool HostFunctionScope::is_inside() { return is_in_host_function; }

Driver& Driver::open(const std::string& path, int device_index) {
  watch_forks();
  Drivers& all = drivers();
  std::lock_guard<std::mutex> guard(all.mutex);
  Driver*& driver = all.by_key[{path, device_index}];
  if (driver == nullptr) {
    try {
      driver = new Driver(path, device_index);
    } catch (...) {
      all.by_key.erase({path, device_index});
      throw;
    }
  }
  driver->enter();
  return *driver;
}

Driver::Driver(const std::string& path, int device_index)
    : path_(path), table_(Table::load(path)), fork_count_(fork_count.load()) {
  GRAPHSHARD_CALL(table_, cuInit, 0);
  int num_devices = 0;
  GRAPHSHARD_CALL(table_, cuDeviceGetCount, &num_devices);
  if (device_index < 0 || device_index >= num_devices) {
    throw DriverError("cuDeviceGet", CUDA_ERROR_INVALID_DEVICE,
                      "device " + std::to_string(device_index) + " does not exist: " + path + " has " +
                          std::to_string(num_devices) + " devices");
  }
  GRAPHSHARD_CALL(table_, cuDeviceGet, &device_, device_index);
  GRAPHSHARD_CALL(table_, cuDevicePrimaryCtxRetain, &context_, device_);
  GRAPHSHARD_CALL(table_, cuCtxSetCurrent, context_);
  const CUmemAllocationProp prop = allocation_prop(true, false);
  GRAPHSHARD_CALL(table_, cuMemGetAllocationGranularity, &granularity_bytes_, &prop,
                  CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
}

bool Driver::is_usable() const { return !is_exiting.load() && fork_count_ == fork_count.load(); }

void Driver::enter() const {
  if (fork_count_ != fork_count.load()) {
    throw DriverError("fork", CUDA_ERROR_NOT_INITIALIZED,
                      "driver " + path_ + " was opened before a fork and cannot be used in the forked child: start " +
                          "processes with the spawn method, or open the driver after the fork");
  }
  if (is_exiting.load()) {
    throw DriverError("exit", CUDA_ERROR_DEINITIALIZED, "driver " + path_ + " is closed: the interpreter is exiting");
  }
  if (is_in_host_function) {
    throw DriverError("cuLaunchHostFunc", CUDA_ERROR_NOT_PERMITTED,
                      "a host function may not call the driver: enqueue the call before or after it");
  }
  GRAPHSHARD_CALL(table_, cuCtxSetCurrent, context_);
}

bool Driver::is_forked() { return fork_count.load() != 0; }

void Driver::begin_exit(double timeout_s) {
  if (!is_forked()) {
    using Clock = std::chrono::steady_clock;
    const auto deadline = Clock::now() + std::chrono::duration<double>(timeout_s);
    std::lock_guard<std::mutex> guard(drivers().mutex);
    for (auto& [key, driver] : drivers().by_key) {
      std::lock_guard<std::mutex> streams_guard(driver->mutex_);
      for (StreamHandle* stream : driver->streams_) {
        const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(deadline - Clock::now()).count();
        try {
          if (!stream->is_capturing()) driver->wait_stream(stream->stream, std::max<int64_t>(left, 0));
        } catch (const DriverError&) {  // the process ends: a broken stream has nobody left to hear of it
        }
      }
    }
  }
  is_exiting.store(true);
}

void Driver::set_run_unlocked(RunUnlocked run) { run_unlocked.store(run); }

int Driver::version() const {
  int version = 0;
  GRAPHSHARD_CALL(table_, cuDriverGetVersion, &version);
  return version;
}

std::string Driver::device_name() const {
  enter();
  char name[256] = {};
  GRAPHSHARD_CALL(table_, cuDeviceGetName, name, static_cast<int>(sizeof(name) - 1), device_);
  return name;
}

size_t Driver::free_bytes() const {
  enter();
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  GRAPHSHARD_CALL(table_, cuMemGetInfo, &free_bytes, &total_bytes);
  return free_bytes;
}

size_t Driver::total_bytes() const {
  enter();
  size_t bytes = 0;
  GRAPHSHARD_CALL(table_, cuDeviceTotalMem, &bytes, device_);
  return bytes;
}

int Driver::attribute(int attribute) const {
  enter();
  int value = 0;
  GRAPHSHARD_CALL(table_, cuDeviceGetAttribute, &value, static_cast<CUdevice_attribute>(attribute), device_);
  return value;
}

CUmemAllocationProp Driver::allocation_prop(bool is_exportable, bool is_on_host) const {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = device_;
  if (is_on_host) {
    int node = -1;  // no such attribute, or no such nodes: there is one
    const CUresult result = table_.cuDeviceGetAttribute(&node, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, device_);
    prop.location.type = CU_MEM_LOCATION_TYPE_HOST_NUMA;
    prop.location.id = result == CUDA_SUCCESS && node >= 0 ? node : 0;
  }
  prop.requestedHandleTypes = is_exportable ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_NONE;
  return prop;
}

bool Driver::wait_stream(CUstream stream, int64_t timeout_ns) const {
  const AllowedInCaptures allowed(table_);
  if (table_.gshost_stream_wait != nullptr) {
    const CUresult result = table_.gshost_stream_wait(stream, timeout_ns);
    if (result == CUDA_ERROR_NOT_READY) return false;
    table_.check(result, "gshost_stream_wait");
    return true;
  }
  return poll(
      [&] {
        const CUresult result = table_.cuStreamQuery(stream);
        if (result != CUDA_ERROR_NOT_READY) table_.check(result, "cuStreamQuery");
        return result == CUDA_SUCCESS;
      },
      timeout_ns);
}

bool Driver::wait_event(CUevent event, int64_t timeout_ns) const {
  const AllowedInCaptures allowed(table_);
  if (table_.gshost_event_wait != nullptr) {
    const CUresult result = table_.gshost_event_wait(event, timeout_ns);
    if (result == CUDA_ERROR_NOT_READY) return false;
    table_.check(result, "gshost_event_wait");
    return true;
  }
  return poll(
      [&] {
        const CUresult result = table_.cuEventQuery(event);
        if (result != CUDA_ERROR_NOT_READY) table_.check(result, "cuEventQuery");
        return result == CUDA_SUCCESS;
      },
      timeout_ns);
}

void Driver::add_stream(StreamHandle* stream) {
  std::lock_guard<std::mutex> guard(mutex_);
  streams_.push_back(stream);
}

void Driver::remove_stream(StreamHandle* stream) {
  std::lock_guard<std::mutex> guard(mutex_);
  streams_.erase(std::remove(streams_.begin(), streams_.end(), stream), streams_.end());
}

std::shared_ptr<StreamHandle> Driver::find_own_stream(CUstream stream) const {
  std::lock_guard<std::mutex> guard(mutex_);
  for (StreamHandle* one : streams_) {
    if (one->stream == stream && !one->is_foreign) return one->weak_from_this().lock();
  }
  return nullptr;
}

void Driver::add_memory(const std::shared_ptr<Mapping>& mapping) {
  std::lock_guard<std::mutex> guard(mutex_);
  memories_[mapping->address] = mapping;
}

void Driver::remove_memory(const Mapping& mapping) {
  std::lock_guard<std::mutex> guard(mutex_);
  memories_.erase(mapping.address);
}

std::shared_ptr<Mapping> Driver::find_memory(CUdeviceptr address, size_t num_bytes, bool is_written,
                                             const char* entry_point) const {
  std::shared_ptr<Mapping> mapping;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    auto next = memories_.upper_bound(address);
    if (next != memories_.begin()) mapping = std::prev(next)->second.lock();
  }
  const auto refuse = [&](const std::string& reason) {
    throw DriverError(entry_point, CUDA_ERROR_INVALID_VALUE,
                      std::string(entry_point) + " refused: " + std::to_string(num_bytes) + " bytes at " +
                          hex(address) + " " + reason);
  };
  if (num_bytes == 0) refuse("are no bytes; leave the op out");
  if (mapping == nullptr || address - mapping->address >= mapping->num_bytes) {
    refuse("are not in any memory of this driver; allocate them with Memory or import their window");
  }
  if (num_bytes > mapping->num_bytes - (address - mapping->address)) {
    refuse("run past the end of the memory of " + std::to_string(mapping->num_bytes) + " bytes at " +
           hex(mapping->address));
  }
  if (is_written && mapping->is_read_only) refuse("are in a window that is imported read-only");
  return mapping;
}

// Records one event on each busy stream; false (and nothing recorded) where a stream cannot be asked now.
bool Driver::fence(Retired& retired) {
  std::vector<CUevent> fences;
  bool is_complete = true;
  for (StreamHandle* stream : streams_) {
    if (stream->is_capturing()) {
      is_complete = false;
      break;
    }
    const CUresult state = table_.cuStreamQuery(stream->stream);
    if (state == CUDA_SUCCESS) continue;
    CUevent event = nullptr;
    if (state != CUDA_ERROR_NOT_READY || table_.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS) {
      is_complete = false;
      break;
    }
    fences.push_back(event);
    if (table_.cuEventRecord(event, stream->stream) != CUDA_SUCCESS) {
      is_complete = false;
      break;
    }
  }
  if (!is_complete) {
    for (CUevent event : fences) table_.cuEventDestroy(event);
    return false;
  }
  retired.fences = std::move(fences);
  return true;
}

bool Driver::is_over(Retired& retired) {
  if (!retired.is_fenced) retired.is_fenced = fence(retired);
  if (!retired.is_fenced) return false;
  auto& fences = retired.fences;
  while (!fences.empty() && table_.cuEventQuery(fences.back()) == CUDA_SUCCESS) {
    table_.cuEventDestroy(fences.back());
    fences.pop_back();
  }
  return fences.empty();
}

void Driver::retire(std::shared_ptr<void> owner) {
  if (owner == nullptr) return;
  if (!is_usable()) {
    new std::shared_ptr<void>(std::move(owner));  // leaked: the process is ending, or is a forked child
    return;
  }
  {
    std::lock_guard<std::mutex> guard(mutex_);
    retired_.push_back(Retired{std::move(owner), false, {}});
  }
  reap();
}

void Driver::reap() {
  // An open capture and a host function forbid the calls that destructors make: the next reap will.
  if (!is_usable() || is_in_host_function) return;
  std::vector<std::shared_ptr<void>> over;
  {
    const NoCapture no_capture;
    if (!no_capture.is_granted()) return;
    std::lock_guard<std::mutex> guard(mutex_);
    if (retired_.empty() || table_.cuCtxSetCurrent(context_) != CUDA_SUCCESS) return;
    const AllowedInCaptures allowed(table_);
    for (Retired& retired : retired_) {
      if (is_over(retired)) over.push_back(std::move(retired.owner));
    }
    const auto is_gone = [](const Retired& retired) { return retired.owner == nullptr; };
    retired_.erase(std::remove_if(retired_.begin(), retired_.end(), is_gone), retired_.end());
    num_going_ += over.size();
  }
  if (over.empty()) return;
  const size_t num_over = over.size();
  without_lock([](void* owners) { static_cast<std::vector<std::shared_ptr<void>>*>(owners)->clear(); }, &over);
  std::lock_guard<std::mutex> guard(mutex_);
  num_going_ -= num_over;
}

size_t Driver::num_retired() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return retired_.size() + num_going_;
}

}  // namespace graphshard
