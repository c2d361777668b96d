// Faults on demand, for tests: what `gshost_nccl_stage` was last told, for the whole process.
#pragma once

#include <cstdint>

#include "nccl/abi.h"

namespace graphshard::hostnccl {

constexpr int kVersion = nccl::version_code(2, 32, 3);
constexpr int kFirstUseFixed = nccl::version_code(2, 31, 2);

/// One rank's n-th call of ncclAllGather, counted by communicator from when the stage was set; none if call is 0.
struct StagedCall {
  int rank = -1;
  uint64_t call = 0;
};

struct Stage {
  uint64_t generation = 0;  // of the stage: counts restart with it
  int version = kVersion;
  bool null_window = false;
  bool first_use_hang = false;
  bool sm_kernel = false;
  bool abort_hang = false;
  StagedCall skip;
  StagedCall swap;
};

Stage stage();
/// False, and nothing changes, for a spec that is not understood. Items are separated by `;`.
bool set_stage(const char* spec);

/// A call of this process has met the staged fault of this name ("skip", "null_window").
void note_met(const char* name);
/// Whether one has since the stage was set.
bool is_met(const char* name);

}  // namespace graphshard::hostnccl
