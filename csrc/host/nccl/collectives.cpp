// How collectives are enqueued: barriers of flag batches around copies, kernels and sums.
#include <cstring>
#include <utility>

#include "communicator.h"
#include "driver.h"

namespace graphshard::hostnccl {

namespace {

constexpr size_t kMinStagingBytes = size_t{1} << 20;

void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

void copy_async(CUdeviceptr to, CUdeviceptr from, size_t num_bytes, CUstream stream) {
  if (to != from) HOSTNCCL_CALL(cuMemcpyAsync, to, from, num_bytes, stream);
}

/// What a captured node points at stays for good: a graph may be launched as long as the process lives. An eager one
/// is used once.
template <typename Work>
struct Enqueued {
  Work work;
  bool is_captured;
};

template <typename Work>
void run(void* opaque) {
  auto* enqueued = static_cast<Enqueued<Work>*>(opaque);
  enqueued->work();
  if (!enqueued->is_captured) delete enqueued;
}

template <typename Work>
void enqueue_host(Work work, FlagMode mode, CUstream stream) {
  auto* enqueued = new Enqueued<Work>{std::move(work), mode == FlagMode::kCaptured};
  HOSTNCCL_CALL(cuLaunchHostFunc, stream, run<Work>, enqueued);
}

template <typename Work>
void enqueue_kernel(Work work, FlagMode mode, CUstream stream) {
  auto* enqueued = new Enqueued<Work>{std::move(work), mode == FlagMode::kCaptured};
  HOSTNCCL_CALL(gshost_launch_kernel, stream, run<Work>, enqueued);
}

/// The SM kernel of the fall-back: this rank's chunk to every rank.
struct PushKernel {
  std::vector<void*> destinations;
  const void* source;
  size_t num_bytes;

  void operator()() const {
    for (void* destination : destinations) {
      if (destination != source) std::memcpy(destination, source, num_bytes);
    }
  }
};

struct SumFunction {
  void* destination;
  const void* source;
  size_t num_elements;
  int num_ranks;
  int type;

  void operator()() const { sum_ranks(destination, source, num_elements, num_ranks, type); }
};

}  // namespace

Communicator::CaptureState Communicator::capture_of(CUstream stream) const {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  cuuint64_t id = 0;
  HOSTNCCL_CALL(cuStreamGetCaptureInfo, stream, &status, &id, nullptr, nullptr, nullptr);
  if (status == CU_STREAM_CAPTURE_STATUS_INVALIDATED) check(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "the capture");
  return {status == CU_STREAM_CAPTURE_STATUS_ACTIVE, id};
}

void Communicator::set_up_flags(const CaptureState& capture) {
  if (flags_) return;
  if (capture.is_capturing) {
    throw Failure(nccl::kInvalidUsage,
                  "the first collective of a communicator sets up its flag words, which a capture forbids: issue one "
                  "eagerly on every rank before the capture");
  }
  flag_memory_ = std::make_unique<Allocation>(flag_area_bytes(group_.num_ranks()) + sizeof(uint32_t));
  flag_region_ =
      std::make_unique<Region>(&group_, Purpose::kFirstUse, flag_memory_->address(), flag_memory_->num_bytes());
  flags_ = std::make_unique<FlagBarrier>(flag_region_->all(), group_.rank());
}

void Communicator::set_up_staging(size_t num_bytes, const CaptureState& capture) {
  if (!staging_.empty() && staging_.back()->num_bytes() >= num_bytes) return;
  if (capture.is_capturing) {
    throw Failure(nccl::kInvalidUsage, "this collective needs " + std::to_string(num_bytes) +
                                           " bytes of staging memory, which cannot be made in a capture: issue one of "
                                           "this size eagerly on every rank before the capture");
  }
  size_t staging_bytes = kMinStagingBytes;
  while (staging_bytes < num_bytes) staging_bytes *= 2;
  auto memory = std::make_unique<Allocation>(staging_bytes);
  staging_.push_back(std::make_unique<Region>(&group_, Purpose::kStaging, memory->address(), staging_bytes));
  staging_memory_.push_back(std::move(memory));
}

/// Calls of one communicator run one after another, whatever their streams: they share flag words.
Communicator::Issue Communicator::begin(const Call& call, CUstream stream, const CaptureState& capture) {
  if (++sequence_ == 0) ++sequence_;  // 0 says "waits for nothing"
  const uint32_t header = call.header();
  group_.describe(header, call.words());
  if (!capture.is_capturing) {
    if (has_eager_end_) HOSTNCCL_CALL(cuStreamWaitEvent, stream, eager_end_, 0);
  } else {
    has_captured_ = true;
    if (captured_id_ == capture.id && captured_stream_ != stream) {
      HOSTNCCL_CALL(cuStreamWaitEvent, stream, captured_end_, 0);
    }
  }
  return {stream, capture.is_capturing ? FlagMode::kCaptured : FlagMode::kEager, sequence_, header};
}

void Communicator::end(const Issue& issue, const CaptureState& capture) {
  if (capture.is_capturing) {
    HOSTNCCL_CALL(cuEventRecord, captured_end_, issue.stream);
    captured_stream_ = issue.stream;
    captured_id_ = capture.id;
  } else {
    HOSTNCCL_CALL(cuEventRecord, eager_end_, issue.stream);
    has_eager_end_ = true;
  }
}

void Communicator::enqueue_batch(CUstream stream, std::vector<CUstreamBatchMemOpParams> ops) const {
  HOSTNCCL_CALL(cuStreamBatchMemOp, stream, static_cast<unsigned int>(ops.size()), ops.data(), 0);
}

void Communicator::enqueue_entry(const Issue& issue) const {
  FlagOps ops = flags_->entry(issue.mode, issue.sequence, issue.header);
  enqueue_batch(issue.stream, std::move(ops.writes));
  enqueue_batch(issue.stream, std::move(ops.waits));
}

void Communicator::enqueue_exit(const Issue& issue) const {
  FlagOps ops = flags_->exit(issue.mode, issue.sequence);
  enqueue_batch(issue.stream, std::move(ops.writes));
  enqueue_batch(issue.stream, std::move(ops.waits));
}

/// As before 2.31.2 with two ranks: the first gather by copy engines waits for a flag that nobody writes.
void Communicator::hang_if_staged(const Issue& issue) const {
  const Stage staged = stage();
  if (!staged.first_use_hang || staged.version >= kFirstUseFixed || group_.num_ranks() != 2) return;
  if (issue.sequence != 1) return;
  note_met("first_use_hang");
  CUstreamBatchMemOpParams never{};
  never.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
  never.waitValue.address = stuck_word();  // which only an abort writes
  never.waitValue.value = 1;
  never.waitValue.flags = CU_STREAM_WAIT_VALUE_EQ;
  enqueue_batch(issue.stream, {never});
}

/// To rank + 1, rank + 2, ..., own chunk last: at each moment every rank's memory is written by one other.
void Communicator::push_chunks(const GatherCall& call, const Region& receive, size_t offset) const {
  const auto own = static_cast<size_t>(group_.rank());
  for (int step = 1; step <= group_.num_ranks(); ++step) {
    const int rank = (group_.rank() + step) % group_.num_ranks();
    copy_async(receive.at(rank) + offset + own * call.num_bytes, call.send, call.num_bytes, call.stream);
  }
}

void Communicator::gather(const GatherCall& call) {
  const auto num_ranks = static_cast<size_t>(group_.num_ranks());
  const CaptureState capture = capture_of(call.stream);
  Call as_compared{CallKind::kAllGather, call.num_bytes, place_of(call.send, call.num_bytes),
                   place_of(call.receive, num_ranks * call.num_bytes)};
  const bool is_symmetric = as_compared.send.is_in_window() && as_compared.receive.is_in_window();
  const bool can_copy = is_symmetric && settings_.is_zero_cta;
  const bool by_copies = can_copy && !stage().sm_kernel;
  if (can_copy && !by_copies && num_ranks > 1) note_met("sm_kernel");
  if (!by_copies) as_compared.kind = CallKind::kAllGatherByKernel;
  if (num_ranks == 1) return copy_async(call.receive, call.send, call.num_bytes, call.stream);
  set_up_flags(capture);
  if (!is_symmetric) set_up_staging(num_ranks * call.num_bytes, capture);
  const Issue issue = begin(as_compared, call.stream, capture);
  enqueue_entry(issue);
  if (by_copies) {
    hang_if_staged(issue);
    push_chunks(call, *windows_[as_compared.receive.window].region, as_compared.receive.offset);
    enqueue_exit(issue);
  } else {
    const Region& target = is_symmetric ? *windows_[as_compared.receive.window].region : *staging_.back();
    const size_t base = is_symmetric ? as_compared.receive.offset : 0;
    const size_t offset = base + static_cast<size_t>(group_.rank()) * call.num_bytes;
    PushKernel kernel{{}, pointer(call.send), call.num_bytes};
    for (const CUdeviceptr address : target.all()) kernel.destinations.push_back(pointer(address + offset));
    enqueue_kernel(std::move(kernel), issue.mode, issue.stream);
    enqueue_exit(issue);
    if (!is_symmetric) copy_async(call.receive, target.address(), num_ranks * call.num_bytes, call.stream);
  }
  end(issue, capture);
}

/// A staged skip or swap takes the call; false: it is to be enqueued.
bool Communicator::take_staged(const GatherCall& call) {
  const Stage staged = stage();
  if (staged.generation != stage_generation_) {
    stage_generation_ = staged.generation;
    staged_calls_ = 0;
  }
  ++staged_calls_;
  if (staged.skip.rank == group_.rank() && staged.skip.call == staged_calls_) {
    note_met("skip");
    return true;
  }
  if (staged.swap.rank != group_.rank() || staged.swap.call != staged_calls_) return false;
  note_met("swap");
  held_back_.push_back(call);
  return true;
}

void Communicator::all_gather(CUdeviceptr send, CUdeviceptr receive, size_t count, int type, CUstream stream) {
  const size_t element_bytes = bytes_of_type(type);
  if (element_bytes == 0) {
    throw Failure(nccl::kInvalidArgument, "data type " + std::to_string(type) + " is not one of the host NCCL's");
  }
  if (count == 0) return;
  if (send == 0 || receive == 0) throw Failure(nccl::kInvalidArgument, "a buffer of a gather is null");
  const auto lock = begin_call();
  const GatherCall call{send, receive, count * element_bytes, stream};
  if (take_staged(call)) return;
  gather(call);
  for (const GatherCall& late : std::exchange(held_back_, {})) gather(late);
}

void Communicator::reduce_scatter(CUdeviceptr send, CUdeviceptr receive, size_t count, int type, int op,
                                  CUstream stream) {
  if (!can_reduce(type) || op != nccl::kSum) {
    throw Failure(nccl::kInvalidArgument, "reduce-scatter: sums of float32, float16 and bfloat16, not type " +
                                              std::to_string(type) + " with operation " + std::to_string(op));
  }
  if (count == 0) return;
  if (send == 0 || receive == 0) throw Failure(nccl::kInvalidArgument, "a buffer of a reduce-scatter is null");
  const auto lock = begin_call();
  const size_t num_bytes = count * bytes_of_type(type);
  const auto num_ranks = static_cast<size_t>(group_.num_ranks());
  const CaptureState capture = capture_of(stream);
  if (num_ranks == 1) return copy_async(receive, send, num_bytes, stream);
  set_up_flags(capture);
  set_up_staging(num_ranks * num_bytes, capture);
  const Call as_compared{CallKind::kReduceScatter, num_bytes, place_of(send, num_ranks * num_bytes),
                         place_of(receive, num_bytes)};
  const Issue issue = begin(as_compared, stream, capture);
  enqueue_entry(issue);
  const Region& staging = *staging_.back();
  const size_t own_offset = static_cast<size_t>(group_.rank()) * num_bytes;
  for (size_t step = 1; step <= num_ranks; ++step) {
    const size_t rank = (static_cast<size_t>(group_.rank()) + step) % num_ranks;
    copy_async(staging.at(static_cast<int>(rank)) + own_offset, send + rank * num_bytes, num_bytes, stream);
  }
  enqueue_exit(issue);
  enqueue_host(SumFunction{pointer(receive), pointer(staging.address()), count, group_.num_ranks(), type}, issue.mode,
               stream);
  end(issue, capture);
}

}  // namespace graphshard::hostnccl
