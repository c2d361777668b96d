// A gs_step as it crosses libraries: the extension makes one, libgraphshard.so replays it.
//
// Note [two copies of the runtime]: the extension and libgraphshard.so each contain the runtime, with drivers, locks
// and thread-local state of their own. So a step brings the functions that work on it, from the copy that made it.
#pragma once

#include <atomic>
#include <memory>

#include "embed/step.h"
#include "include/graphshard.h"

namespace graphshard {

// Where a function leaves the text of its failure; the caller's copy of the library keeps it for gs_last_error.
struct ErrorText {
  char text[2048];
};

// C functions of version kStepAbi; only ever appended to.
struct StepFunctions {
  void (*retain)(gs_step* self);
  void (*release)(gs_step* self);
  gs_status (*info)(gs_step* self, gs_step_info* info, ErrorText* error);
  gs_status (*buffer)(gs_step* self, int is_output, const char* name, gs_tensor* tensor, ErrorText* error);
  gs_status (*buffer_at)(gs_step* self, int is_output, size_t index, gs_tensor* tensor, ErrorText* error);
  gs_status (*replay)(gs_step* self, void* stream, ErrorText* error);
  gs_status (*wait)(gs_step* self, int64_t timeout_ns, ErrorText* error);
  gs_status (*prefetch)(gs_step* self, ErrorText* error);
  gs_status (*prefetch_wait)(gs_step* self, int64_t timeout_ns, ErrorText* error);
  gs_status (*upload)(gs_step* self, void* stream, ErrorText* error);
  gs_status (*epoch)(gs_step* self, uint64_t* epoch, ErrorText* error);
};

constexpr uint64_t kStepMagic = 0x7065747368736867;  // "ghshstep"
constexpr uint64_t kStepAbi = 1;

// One reference, for the caller.
gs_step* new_step(StepParts parts);
// Gives a reference back on a thread that is no caller from outside.
void release_step(gs_step* step);

// How functions of steps run: the extension's copy lets the interpreter know that the thread comes from outside.
using RunFromOutside = void (*)(void (*function)(void*), void* argument);
void set_run_from_outside(RunFromOutside run);

}  // namespace graphshard

// The head is the same in every copy; what follows belongs to the copy that made it.
struct gs_step {
  ~gs_step() { magic.store(0); }  // so that a handle that is used too late is likely to be refused

  std::atomic<uint64_t> magic{graphshard::kStepMagic};
  uint64_t abi = graphshard::kStepAbi;
  const graphshard::StepFunctions* functions = nullptr;

  std::atomic<size_t> num_references{1};
  std::unique_ptr<graphshard::Step> step;
};
