// The ops of a list with all that they refer to, checked once: what eager issues, captures and recordings share.
#pragma once

#include <functional>

#include "runtime/op_observer.h"
#include "runtime/stream.h"

namespace graphshard {

// Which streams are inside a capture, and which events it has recorded so far.
struct CaptureState {
  std::vector<bool> joined;
  std::vector<bool> recorded;
};

class BoundOps {
 public:
  using Streams = std::vector<std::shared_ptr<Stream>>;
  using Collectives = std::vector<std::shared_ptr<Collective>>;

  // Checks indices and addresses, and keeps streams, memory and collectives alive. Stream 0 is the origin.
  BoundOps(Driver& driver, const Streams& streams, size_t num_events, std::vector<Op> ops, Collectives collectives);

  Driver& driver() const { return driver_; }
  size_t size() const { return ops_.size(); }
  size_t num_events() const { return num_events_; }
  const Op& operator[](size_t index) const { return ops_[index]; }
  const std::vector<std::shared_ptr<StreamHandle>>& streams() const { return handles_; }
  CUstream stream(size_t index) const { return streams_[index]; }

  void check_range(size_t begin, size_t end) const;
  void check_calls(const Calls& calls, size_t begin, size_t end) const;
  // A driver runs an op on a stream outside the capture at once, eagerly, and leaves it out of the graph without a
  // word; a wait for an event that was not recorded before it joins nothing. Moves `state` past the range.
  void check_joined(CaptureState& state, size_t begin, size_t end) const;

  // For a graph of these ops, to be kept with it (Collective::hold).
  std::vector<std::shared_ptr<const void>> hold_collectives() const;

  // Tells `observer`, if there is one, of each op that was taken.
  void run(const Calls& calls, const CUevent* events, size_t begin, size_t end, OpObserver* observer = nullptr) const;
  // What op `index` moves in all: all ranks' bytes in an all-gather; 0 for ops that move nothing.
  size_t moved_bytes(size_t index) const;
  std::string where(size_t index) const;

 private:
  void bind(size_t index);
  void bind_addresses(const Op& op);
  const Collective& collective_of(const Op& op) const { return *collectives_[op.index]; }
  void check_index(size_t index, const char* what, size_t count) const;
  void keep(CUdeviceptr address, size_t num_bytes, bool is_written, OpKind kind);

  Driver& driver_;
  const size_t num_events_;
  std::vector<Op> ops_;
  std::vector<std::shared_ptr<StreamHandle>> handles_;
  std::vector<CUstream> streams_;
  std::vector<std::shared_ptr<Mapping>> memories_;
  Collectives collectives_;
  std::vector<Collective*> collective_pointers_;
  size_t num_calls_ = 0;
};

}  // namespace graphshard
