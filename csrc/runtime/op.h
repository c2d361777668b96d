// One op of a list, bound: which driver or collective call, with absolute addresses.
#pragma once

#include <memory>
#include <vector>

#include "runtime/calls.h"
#include "runtime/collective.h"

namespace graphshard {

enum class OpKind : uint8_t {
  kRecord,
  kWait,
  kCopy,
  kCopy2d,
  kCall,
  kFill,
  kWriteValue,
  kWaitValue,
  kAllGather,
  kReduceScatter,
  kValues  // not a kind of the C API
};

// The entry point that carries out a kind, for errors.
const char* entry_point(OpKind kind);

// Which fields count depends on the kind.
struct Op {
  OpKind kind = OpKind::kRecord;
  uint32_t stream = 0;
  uint32_t index = 0;  // of an event, a call or a collective
  uint32_t value = 0;  // of a fill or a value word; an ElementType
  CUdeviceptr destination = 0;
  CUdeviceptr source = 0;
  size_t num_bytes = 0;  // of a copy or a fill; a row's in a 2-D copy; a rank's in an all-gather
  size_t rows = 0;       // of a 2-D copy
  size_t destination_pitch = 0;
  size_t source_pitch = 0;
  size_t num_elements = 0;  // a rank's in a reduce-scatter
  size_t piece_bytes = 0;   // of a copy: what one call moves; set when the op is bound
  std::shared_ptr<const std::vector<CUstreamBatchMemOpParams>> values;  // of a batch of writes of and waits for words
};

// Note [copies of a bad size]: graph memcpy nodes of exactly 512 MiB, 1 GiB and 2 GiB were measured 2.1 times slower
// than their neighbours (GB200); as several copies of 256 MiB they are not.
size_t copy_piece_bytes(size_t num_bytes);

// Bytes that a reduce-scatter writes (`num_ranks` 1) or reads; SIZE_MAX where that overflows.
size_t elements_bytes(size_t num_elements, ElementType type, int num_ranks);
// Bytes from the first to the last of a pitched block; SIZE_MAX where that overflows.
size_t pitched_bytes(size_t rows, size_t pitch, size_t row_bytes);

// What ops refer to by index.
struct OpTargets {
  const CUevent* events;
  const Calls::Entry* calls;
  Collective* const* collectives;
};

// Enqueues one op. A collective throws CollectiveError.
CUresult enqueue(const Table& table, const Op& op, CUstream stream, const OpTargets& targets);

}  // namespace graphshard
