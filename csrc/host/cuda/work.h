// What streams and graphs execute: one variant, run whole, in pieces, or polled while it cannot run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <variant>

#include <cuda.h>

#include "completion.h"
#include "event.h"
#include "values.h"

namespace graphshard::hostcuda {

struct EmptyWork {};

/// A 1-D, 2-D or 3-D copy; pitches and slices are in bytes and unused where there is one row or plane.
struct CopyWork {
  char* destination = nullptr;
  const char* source = nullptr;
  size_t row_bytes = 0;
  size_t rows = 1;
  size_t planes = 1;
  size_t destination_pitch = 0;
  size_t source_pitch = 0;
  size_t destination_slice = 0;
  size_t source_slice = 0;

  size_t num_bytes() const { return row_bytes * rows * planes; }
};

struct FillWork {
  char* destination = nullptr;
  uint32_t value = 0;
  uint32_t element_bytes = 1;
  size_t width = 0;  // elements a row
  size_t rows = 1;
  size_t pitch = 0;
};

struct HostWork {
  CUhostFn function = nullptr;
  void* argument = nullptr;
};

/// A host function in a kernel's place: graphs show it as a kernel node.
struct KernelWork {
  CUhostFn function = nullptr;
  void* argument = nullptr;
};

struct ValueWork {
  ValueOp op;
};

struct BatchWork {
  ValueOps ops;
};

/// Reach a completion: an eager event record.
struct SignalWork {
  Ref<Completion> completion;
  bool timed = false;
};

/// Wait for a completion that was bound when the wait was issued.
struct AwaitWork {
  Ref<Completion> completion;
};

/// Graph nodes for external events: a record binds when the node runs, a wait when the graph is launched.
struct EventRecordWork {
  Ref<CUevent_st> event;
};
struct EventWaitWork {
  Ref<CUevent_st> event;
};

/// Something larger that runs in a stream's place: a graph launch.
class Task : public RefCounted {
 public:
  virtual ~Task() = default;
  virtual void run() = 0;
};
struct TaskWork {
  Ref<Task> task;
};

/// A synchronising host waits for this point; the stream counts it as done before it says so.
struct MarkerWork {
  Ref<Completion> completion;
};

/// The last item of a stream: no flag beside the queue can be lost or overtaken.
struct StopWork {
  Ref<Completion> completion;
};

using Work = std::variant<EmptyWork, CopyWork, FillWork, HostWork, KernelWork, ValueWork, BatchWork, SignalWork,
                          AwaitWork, EventRecordWork, EventWaitWork, TaskWork, MarkerWork, StopWork>;

enum class Step : uint8_t { kDone, kAgain, kBlocked };

/// Run `work` as far as it goes without blocking. `progress` starts at 0 and belongs to this execution; copies stop
/// after about `piece_bytes` (0: never) with kAgain. Markers and stops are
/// their stream's business.
Step advance(const Work& work, uint64_t* progress, size_t piece_bytes);

/// Run `work` to its end, sleeping where it has to wait.
void run_to_end(const Work& work);

/// Sleep until a blocked `work` may go on, at most `timeout_ns`.
void sleep_on(const Work& work, uint64_t progress, int64_t timeout_ns);

bool may_block(const Work& work);
bool moves_bytes(const Work& work);

/// Whether this thread is inside a host function, where every driver call is refused.
bool in_host_function();

}  // namespace graphshard::hostcuda
