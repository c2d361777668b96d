// A communicator: one rank's place in a group, its windows, its flag words, and the collectives it enqueues.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "call.h"
#include "group.h"
#include "progress.h"
#include "reduce.h"
#include "region.h"
#include "runtime/flags.h"
#include "stage.h"

namespace graphshard::hostnccl {

struct Settings {
  bool is_zero_cta = false;  // CTAPolicy: copy engines where both buffers lie in windows
};

class Communicator {
 public:
  Communicator(const ncclUniqueId& id, int num_ranks, int rank);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  /// Collective, blocking the host until all ranks are there.
  void join(const Settings& settings);

  /// Collective, blocking the host. The window's handle; null if so staged.
  ncclWindow_t register_window(CUdeviceptr address, size_t num_bytes);
  /// Local. No collective may be using it.
  void deregister_window(ncclWindow_t window);

  void all_gather(CUdeviceptr send, CUdeviceptr receive, size_t count, int type, CUstream stream);
  void reduce_scatter(CUdeviceptr send, CUdeviceptr receive, size_t count, int type, int op, CUstream stream);

  /// kSuccess, kRemoteError or kInvalidUsage; once it is an error it stays that one.
  Result async_error();
  /// Waits for the calls in flight; unbounded.
  void drain();
  /// Frees this rank's host-side waits and eager calls, then waits for its captured ones: unbounded.
  void abort();
  void leave() { group_.leave(); }

  void set_last_error(const std::string& text);
  std::string last_error() const;

 private:
  struct Window {
    std::unique_ptr<Region> region;  // null: deregistered; windows keep their numbers
  };
  /// How one call is enqueued.
  struct Issue {
    CUstream stream;
    FlagMode mode;
    uint32_t sequence;
    uint32_t header;
  };
  struct GatherCall {
    CUdeviceptr send = 0;
    CUdeviceptr receive = 0;
    size_t num_bytes = 0;
    CUstream stream = nullptr;
  };
  struct CaptureState {
    bool is_capturing = false;
    cuuint64_t id = 0;
  };

  void check_usable() const;
  /// What every call begins with. Refused at once where an abort holds the lock because a graph is stuck.
  std::unique_lock<std::mutex> begin_call() const;
  bool is_idle() const;
  /// Behind this rank's flag words; waited for by a staged hang alone.
  CUdeviceptr stuck_word() const { return flag_memory_->address() + flag_area_bytes(group_.num_ranks()); }
  Place place_of(CUdeviceptr address, size_t num_bytes) const;
  CaptureState capture_of(CUstream stream) const;
  void set_up_flags(const CaptureState& capture);
  void set_up_staging(size_t num_bytes, const CaptureState& capture);
  Issue begin(const Call& call, CUstream stream, const CaptureState& capture);
  void end(const Issue& issue, const CaptureState& capture);
  void enqueue_batch(CUstream stream, std::vector<CUstreamBatchMemOpParams> ops) const;
  void enqueue_entry(const Issue& issue) const;
  void enqueue_exit(const Issue& issue) const;
  void gather(const GatherCall& call);
  void push_chunks(const GatherCall& call, const Region& receive, size_t offset) const;
  void hang_if_staged(const Issue& issue) const;
  bool take_staged(const GatherCall& call);

  Group group_;
  Settings settings_;
  mutable std::mutex calls_;  // one call at a time; held while one blocks the host
  std::vector<Window> windows_;
  std::unique_ptr<Allocation> flag_memory_;
  std::unique_ptr<Region> flag_region_;
  std::unique_ptr<FlagBarrier> flags_;
  // The last is in use; earlier, smaller ones may be part of a graph or in flight.
  std::vector<std::unique_ptr<Allocation>> staging_memory_;
  std::vector<std::unique_ptr<Region>> staging_;

  uint32_t sequence_ = 0;      // of the last call, captured ones too
  bool has_captured_ = false;  // a graph may point at this communicator's memory
  CUevent eager_end_ = nullptr;
  bool has_eager_end_ = false;
  CUevent captured_end_ = nullptr;
  CUstream captured_stream_ = nullptr;
  cuuint64_t captured_id_ = 0;

  uint64_t stage_generation_ = 0;
  uint64_t staged_calls_ = 0;
  std::vector<GatherCall> held_back_;  // a staged swap's

  mutable std::mutex error_mutex_;  // guards what follows
  std::string last_error_;
  Result async_error_ = nccl::kSuccess;
};

}  // namespace graphshard::hostnccl
