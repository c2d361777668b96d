#include "work.h"

#include <algorithm>
#include <cstring>

#include "copy.h"

namespace graphshard::hostcuda {

namespace {

thread_local bool inside_host_function = false;

template <typename... Visitors>
struct Overloaded : Visitors... {
  using Visitors::operator()...;
};
template <typename... Visitors>
Overloaded(Visitors...) -> Overloaded<Visitors...>;

void copy_row_range(const CopyWork& copy, size_t row, size_t begin, size_t end) {
  const size_t plane = row / copy.rows;
  const size_t line = row % copy.rows;
  char* destination = copy.destination + plane * copy.destination_slice + line * copy.destination_pitch;
  const char* source = copy.source + plane * copy.source_slice + line * copy.source_pitch;
  copy_bytes(destination + begin, source + begin, end - begin);
}

Step advance_copy(const CopyWork& copy, uint64_t* progress, size_t piece_bytes) {
  const size_t total = copy.num_bytes();
  if (piece_bytes == 0 && copy.rows * copy.planes == 1) {
    copy_bytes(copy.destination, copy.source, total);
    return Step::kDone;
  }
  const size_t stop = piece_bytes == 0 ? total : std::min<size_t>(total, *progress + piece_bytes);
  while (*progress < stop) {
    const size_t row = *progress / copy.row_bytes;
    const size_t begin = *progress % copy.row_bytes;
    const size_t end = std::min<size_t>(copy.row_bytes, begin + (stop - *progress));
    copy_row_range(copy, row, begin, end);
    *progress += end - begin;
  }
  return *progress == total ? Step::kDone : Step::kAgain;
}

void fill_row(const FillWork& fill, char* row) {
  if (fill.element_bytes == 1) {
    std::memset(row, static_cast<int>(fill.value & 0xFF), fill.width);
    return;
  }
  if (fill.element_bytes == 2) {
    std::fill_n(reinterpret_cast<uint16_t*>(row), fill.width, static_cast<uint16_t>(fill.value));
    return;
  }
  std::fill_n(reinterpret_cast<uint32_t*>(row), fill.width, fill.value);
}

Step run_fill(const FillWork& fill) {
  for (size_t row = 0; row < fill.rows; ++row) fill_row(fill, fill.destination + row * fill.pitch);
  return Step::kDone;
}

Step run_host(CUhostFn function, void* argument) {
  inside_host_function = true;
  function(argument);
  inside_host_function = false;
  return Step::kDone;
}

Step advance_batch(const BatchWork& batch, uint64_t* progress) {
  while (*progress < batch.ops->size()) {
    if (!try_value_op((*batch.ops)[*progress])) return Step::kBlocked;
    ++*progress;
  }
  return Step::kDone;
}

Step signal(const SignalWork& work) {
  if (work.timed) {
    work.completion->finish_at(now_ns());
  } else {
    work.completion->finish();
  }
  return Step::kDone;
}

Step record_event(const EventRecordWork& record) {
  record.event->record_now();
  return Step::kDone;
}

Step run_task(const TaskWork& work) {
  work.task->run();
  return Step::kDone;
}

}  // namespace

bool in_host_function() { return inside_host_function; }

Step advance(const Work& work, uint64_t* progress, size_t piece_bytes) {
  return std::visit(Overloaded{
                        [&](const CopyWork& copy) { return advance_copy(copy, progress, piece_bytes); },
                        [](const FillWork& fill) { return run_fill(fill); },
                        [](const HostWork& host) { return run_host(host.function, host.argument); },
                        [](const KernelWork& kernel) { return run_host(kernel.function, kernel.argument); },
                        [](const ValueWork& value) { return try_value_op(value.op) ? Step::kDone : Step::kBlocked; },
                        [&](const BatchWork& batch) { return advance_batch(batch, progress); },
                        [](const SignalWork& work) { return signal(work); },
                        [](const AwaitWork& work) { return work.completion->done() ? Step::kDone : Step::kBlocked; },
                        [](const EventRecordWork& record) { return record_event(record); },
                        [](const TaskWork& work) { return run_task(work); },
                        [](const auto&) { return Step::kDone; },
                    },
                    work);
}

void run_to_end(const Work& work) {
  uint64_t progress = 0;
  while (advance(work, &progress, 0) == Step::kBlocked) sleep_on(work, progress, kForever);
}

void sleep_on(const Work& work, uint64_t progress, int64_t timeout_ns) {
  const auto sleep_on_op = [timeout_ns](const ValueOp& op) {
    timeout_ns == kForever ? wait_for_value(op) : sleep_on_value(op, timeout_ns);
  };
  if (const auto* await = std::get_if<AwaitWork>(&work)) {
    await->completion->wait(timeout_ns);
  } else if (const auto* value = std::get_if<ValueWork>(&work)) {
    sleep_on_op(value->op);
  } else if (const auto* batch = std::get_if<BatchWork>(&work)) {
    sleep_on_op((*batch->ops)[progress]);
  }
}

bool may_block(const Work& work) {
  if (const auto* value = std::get_if<ValueWork>(&work)) return value->op.is_wait();
  return std::holds_alternative<BatchWork>(work) || std::holds_alternative<AwaitWork>(work) ||
         std::holds_alternative<EventWaitWork>(work);
}

bool moves_bytes(const Work& work) {
  return std::holds_alternative<CopyWork>(work) || std::holds_alternative<FillWork>(work);
}

}  // namespace graphshard::hostcuda
