// A loaded driver with its context, and what is alive on it: streams, memory, and owners whose work is still running.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "driver/table.h"

namespace graphshard {

class Driver;
struct OpenCapture;

// What is known of a stream's capture without asking the driver.
enum class CaptureMark : int {
  kNone,  // nobody else can capture it
  kHeld,  // this library is capturing it
  kAsk,   // somebody else may be capturing it: the driver knows
};

// A driver stream. Shared by the Stream that made it and by every op list and graph that uses it.
struct StreamHandle : std::enable_shared_from_this<StreamHandle> {
  explicit StreamHandle(Driver& driver_in);
  // Somebody else's stream, never destroyed here, which must live as long as this. DriverError for the null, legacy and
  // per-thread streams.
  StreamHandle(Driver& driver_in, CUstream foreign);
  ~StreamHandle();
  StreamHandle(const StreamHandle&) = delete;
  StreamHandle& operator=(const StreamHandle&) = delete;

  bool is_capturing() const;

  Driver& driver;
  CUstream stream = nullptr;
  const bool is_foreign;
  std::atomic<CaptureMark> capture_mark;
  // Set by begin_capture (stream_capture.h); only the thread that `capture_thread` names may look at it.
  std::shared_ptr<OpenCapture> open_capture;
  std::atomic<const void*> capture_thread{nullptr};
};

// A reserved, mapped address range backed by one allocation. Unmapped and released when the last owner dies; a range
// that somebody else has mapped (`lender`) is given back to it instead.
struct Mapping {
  explicit Mapping(Driver& driver_in) : driver(driver_in) {}
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  Driver& driver;
  CUmemGenericAllocationHandle handle = 0;
  CUdeviceptr address = 0;
  size_t num_bytes = 0;       // as asked for
  size_t reserved_bytes = 0;  // rounded up to the granularity
  uint64_t generation = 0;
  bool has_handle = false;
  bool is_mapped = false;
  bool is_read_only = false;
  bool is_on_host = false;  // the host may use it at the same address
  std::shared_ptr<void> lender;
};

// This thread inside a host function. CUDA forbids driver calls there, so entries are refused and destructors put off.
class HostFunctionScope {
 public:
  HostFunctionScope();
  ~HostFunctionScope();
  HostFunctionScope(const HostFunctionScope&) = delete;
  HostFunctionScope& operator=(const HostFunctionScope&) = delete;

  static bool is_inside();
};

// Note [drivers live for good]: a Driver is never destroyed, so that everything else may hold a plain reference to it,
// and so that a process can end while its streams are busy.
//
// Note [retired owners]: memory, graphs, call lists and streams may be dropped while enqueued work still uses them.
// `retire` keeps such an owner until every stream has passed the work that it had when the owner was dropped.
class Driver {
 public:
  // One Driver per path and device.
  static Driver& open(const std::string& path, int device_index);

  // After this every destructor leaks instead of calling a driver, and every entry is refused: the process is ending.
  // Waits up to `timeout_s` for the streams of all drivers.
  static void begin_exit(double timeout_s);

  // Whether this process was forked from one that had opened a driver.
  static bool is_forked();

  // Runs `function` without whatever lock its caller must not hold while it blocks (the binding's: Python's).
  using RunUnlocked = void (*)(void (*function)(void*), void* argument);
  static void set_run_unlocked(RunUnlocked run_unlocked);

  const Table& table() const { return table_; }
  const std::string& path() const { return path_; }
  CUdevice device() const { return device_; }
  int version() const;
  bool is_host() const { return table_.gshost_version != nullptr; }
  std::string device_name() const;
  size_t total_bytes() const;
  size_t free_bytes() const;  // now, as the driver counts
  size_t granularity_bytes() const { return granularity_bytes_; }
  int attribute(int attribute) const;
  // On the device, or pinned in the memory of the host's node that is closest to it.
  CUmemAllocationProp allocation_prop(bool is_exportable, bool is_on_host) const;

  // Every entry begins here: refuses a forked child and an ending process, and makes the context current.
  void enter() const;
  bool is_usable() const;

  // Bounded waits: false if `timeout_ns` passed first.
  bool wait_stream(CUstream stream, int64_t timeout_ns) const;
  bool wait_event(CUevent event, int64_t timeout_ns) const;

  void add_stream(StreamHandle* stream);
  void remove_stream(StreamHandle* stream);
  // The stream of this driver's own making that `stream` is; null if there is none.
  std::shared_ptr<StreamHandle> find_own_stream(CUstream stream) const;
  void add_memory(const std::shared_ptr<Mapping>& mapping);
  void remove_memory(const Mapping& mapping);

  // The memory that holds all of [address, address + num_bytes); DriverError for `entry_point` if none does, or if
  // it is read-only and `is_written`.
  std::shared_ptr<Mapping> find_memory(CUdeviceptr address, size_t num_bytes, bool is_written,
                                       const char* entry_point) const;

  void retire(std::shared_ptr<void> owner);
  void reap();
  size_t num_retired() const;

 private:
  struct Retired {
    std::shared_ptr<void> owner;
    bool is_fenced = false;
    std::vector<CUevent> fences;
  };

  Driver(const std::string& path, int device_index);
  bool fence(Retired& retired);
  bool is_over(Retired& retired);

  const std::string path_;
  Table table_;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  size_t granularity_bytes_ = 0;
  uint64_t fork_count_ = 0;

  mutable std::mutex mutex_;
  std::vector<StreamHandle*> streams_;
  std::map<CUdeviceptr, std::weak_ptr<Mapping>> memories_;
  std::vector<Retired> retired_;
  size_t num_going_ = 0;  // no longer retired, but being destroyed by some thread
};

std::string hex(CUdeviceptr address);

}  // namespace graphshard
