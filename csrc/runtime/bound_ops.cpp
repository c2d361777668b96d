#include "runtime/bound_ops.h"

#include <algorithm>

namespace graphshard {

BoundOps::BoundOps(Driver& driver, const Streams& streams, size_t num_events, std::vector<Op> ops,
                   Collectives collectives)
    : driver_(driver), num_events_(num_events), ops_(std::move(ops)), collectives_(std::move(collectives)) {
  driver_.enter();
  if (streams.empty()) throw std::invalid_argument("an op list needs a stream: stream 0 is its origin");
  for (const auto& stream : streams) {
    if (stream == nullptr) throw std::invalid_argument("a stream of an op list is none");
    if (&stream->driver() != &driver_) throw std::invalid_argument("an op list's streams belong to its own driver");
    handles_.push_back(stream->handle());
    streams_.push_back(stream->handle()->stream);
  }
  for (const auto& collective : collectives_) {
    if (collective == nullptr) throw std::invalid_argument("a collective of an op list is none");
    collective_pointers_.push_back(collective.get());
  }
  for (size_t i = 0; i < size(); ++i) bind(i);
  std::sort(memories_.begin(), memories_.end());
  memories_.erase(std::unique(memories_.begin(), memories_.end()), memories_.end());
}

std::string BoundOps::where(size_t index) const {
  return "op " + std::to_string(index) + " of " + std::to_string(size()) + " on stream " +
         std::to_string(ops_[index].stream);
}

void BoundOps::check_index(size_t index, const char* what, size_t count) const {
  const Op& op = ops_[index];
  if (op.index < count) return;
  throw std::invalid_argument(where(index) + ": " + what + " " + std::to_string(op.index) + ", the list has " +
                              std::to_string(count) + " " + what + "s");
}

void BoundOps::bind(size_t index) {
  Op& op = ops_[index];
  if (op.stream >= streams_.size()) {
    throw std::invalid_argument(where(index) + ": the list has " + std::to_string(streams_.size()) + " streams");
  }
  switch (op.kind) {
    case OpKind::kRecord:
    case OpKind::kWait:
      return check_index(index, "event", num_events_);
    case OpKind::kCall:
      num_calls_ = std::max<size_t>(num_calls_, op.index + size_t{1});
      return;
    case OpKind::kAllGather:
    case OpKind::kReduceScatter:
      check_index(index, "collective", collectives_.size());
      break;
    case OpKind::kCopy:
      op.piece_bytes = copy_piece_bytes(op.num_bytes);  // Note [copies of a bad size]
      break;
    default:
      break;
  }
  try {
    bind_addresses(op);
  } catch (const DriverError& error) {
    throw DriverError(error.entry_point(), error.code(), std::string(error.what()) + ", at " + where(index));
  }
}

void BoundOps::keep(CUdeviceptr address, size_t num_bytes, bool is_written, OpKind kind) {
  memories_.push_back(driver_.find_memory(address, num_bytes, is_written, entry_point(kind)));
}

void BoundOps::bind_addresses(const Op& op) {
  switch (op.kind) {
    case OpKind::kCopy:
      keep(op.destination, op.num_bytes, true, op.kind);
      return keep(op.source, op.num_bytes, false, op.kind);
    case OpKind::kCopy2d:
      keep(op.destination, pitched_bytes(op.rows, op.destination_pitch, op.num_bytes), true, op.kind);
      return keep(op.source, pitched_bytes(op.rows, op.source_pitch, op.num_bytes), false, op.kind);
    case OpKind::kFill:
      return keep(op.destination, op.num_bytes, true, op.kind);
    case OpKind::kWriteValue:
      memories_.push_back(find_word(driver_, op.destination, true, entry_point(op.kind)));
      return;
    case OpKind::kWaitValue:
      memories_.push_back(find_word(driver_, op.source, false, entry_point(op.kind)));
      return;
    case OpKind::kValues:
      for (const CUstreamBatchMemOpParams& value : *op.values) {
        const bool is_written = value.operation == CU_STREAM_MEM_OP_WRITE_VALUE_32;
        const CUdeviceptr address = is_written ? value.writeValue.address : value.waitValue.address;
        memories_.push_back(find_word(driver_, address, is_written, entry_point(op.kind)));
      }
      return;
    case OpKind::kAllGather: {
      size_t gathered_bytes = 0;
      const auto num_ranks = static_cast<size_t>(collective_of(op).world_size());
      if (__builtin_mul_overflow(op.num_bytes, num_ranks, &gathered_bytes)) gathered_bytes = SIZE_MAX;
      keep(op.destination, gathered_bytes, true, op.kind);
      return keep(op.source, op.num_bytes, false, op.kind);
    }
    case OpKind::kReduceScatter: {
      const auto type = static_cast<ElementType>(op.value);
      keep(op.destination, elements_bytes(op.num_elements, type, 1), true, op.kind);
      return keep(op.source, elements_bytes(op.num_elements, type, collective_of(op).world_size()), false, op.kind);
    }
    case OpKind::kRecord:
    case OpKind::kWait:
    case OpKind::kCall:
      return;
  }
}

std::vector<std::shared_ptr<const void>> BoundOps::hold_collectives() const {
  std::vector<std::shared_ptr<const void>> holds;
  for (const auto& collective : collectives_) holds.push_back(collective->hold());
  return holds;
}

void BoundOps::check_range(size_t begin, size_t end) const {
  if (begin <= end && end <= size()) return;
  throw std::invalid_argument("ops " + std::to_string(begin) + ".." + std::to_string(end) + " of " +
                              std::to_string(size()));
}

void BoundOps::check_calls(const Calls& calls, size_t begin, size_t end) const {
  if (calls.size() >= num_calls_) return;
  for (size_t i = begin; i < end; ++i) {
    if (ops_[i].kind != OpKind::kCall || ops_[i].index < calls.size()) continue;
    throw std::invalid_argument("the op list calls index " + std::to_string(ops_[i].index) + ", Calls has " +
                                std::to_string(calls.size()) + " functions");
  }
}

void BoundOps::check_joined(CaptureState& state, size_t begin, size_t end) const {
  for (size_t i = begin; i < end; ++i) {
    const Op& op = ops_[i];
    if (op.kind == OpKind::kWait && state.recorded[op.index]) state.joined[op.stream] = true;
    if (!state.joined[op.stream]) {
      throw DriverError(entry_point(op.kind), CUDA_ERROR_STREAM_CAPTURE_UNJOINED,
                        "capture refused: the stream of " + where(i) +
                            " has not joined it; let it wait for an event of the capture first");
    }
    if (op.kind == OpKind::kRecord) state.recorded[op.index] = true;
  }
}

size_t BoundOps::moved_bytes(size_t index) const {
  const Op& op = ops_[index];
  switch (op.kind) {
    case OpKind::kCopy:
    case OpKind::kFill:
      return op.num_bytes;
    case OpKind::kCopy2d:
      return op.rows * op.num_bytes;
    case OpKind::kAllGather:
      return op.num_bytes * static_cast<size_t>(collective_of(op).world_size());
    case OpKind::kReduceScatter:
      return elements_bytes(op.num_elements, static_cast<ElementType>(op.value), 1);
    default:
      return 0;
  }
}

void BoundOps::run(const Calls& calls, const CUevent* events, size_t begin, size_t end, OpObserver* observer) const {
  const Table& table = driver_.table();
  const OpTargets targets{events, calls.data(), collective_pointers_.data()};
  size_t i = begin;
  if (observer != nullptr) observer->begin();
  try {
    for (; i < end; ++i) {
      const Op& op = ops_[i];
      const CUresult result = enqueue(table, op, streams_[op.stream], targets);
      if (__builtin_expect(result != CUDA_SUCCESS, 0)) table.fail(result, entry_point(op.kind), where(i));
      if (__builtin_expect(observer != nullptr, 0)) observer->accepted(i, op);
    }
  } catch (const CollectiveError& error) {
    throw CollectiveError(error.entry_point(), error.code(), std::string(error.what()) + ", at " + where(i));
  }
}

}  // namespace graphshard
