#include "stream.h"

#include <algorithm>

#include <pthread.h>
#include <signal.h>

#include "capture.h"
#include "guard.h"

using graphshard::hostcuda::Completion;
using graphshard::hostcuda::futex_wait;
using graphshard::hostcuda::futex_wake;
using graphshard::hostcuda::kForever;
using graphshard::hostcuda::MarkerWork;
using graphshard::hostcuda::Ref;
using graphshard::hostcuda::run_to_end;
using graphshard::hostcuda::spin_until;
using graphshard::hostcuda::start_detached;
using graphshard::hostcuda::StopWork;
using graphshard::hostcuda::Work;

namespace {
constexpr int64_t kIdleSpinNs = 5000;
}

CUresult CUstream_st::push(Work work) {
  {
    const std::lock_guard lock(mutex_);
    if (!started_ && !start()) return CUDA_ERROR_OUT_OF_MEMORY;
    append(std::move(work));
  }
  wake();
  return CUDA_SUCCESS;
}

void CUstream_st::append(Work work) {
  queue_.push_back(std::move(work));
  submitted_.store(submitted_.load(std::memory_order_relaxed) + 1, std::memory_order_seq_cst);
}

void CUstream_st::wake() {
  // Sequentially consistent with the worker's: it sees the new count, or this sees it asleep.
  if (asleep_.load(std::memory_order_seq_cst) == 0) return;
  if (asleep_.exchange(0, std::memory_order_seq_cst) == 1) futex_wake(&asleep_, 1);
}

bool CUstream_st::is_idle() const {
  const uint64_t completed = completed_.load(std::memory_order_acquire);
  return completed == submitted_.load(std::memory_order_acquire);
}

bool CUstream_st::start() {
  started_ = start_detached([](void* stream) { static_cast<CUstream_st*>(stream)->run(); }, this, "gs-stream");
  return started_;
}

void CUstream_st::stop() {
  Ref<Completion> stopped = Ref<Completion>::adopt(new Completion);
  {
    const std::lock_guard lock(graphshard::hostcuda::process().mutex);
    auto& ending = graphshard::hostcuda::process().ending_streams;
    ending.erase(std::remove_if(ending.begin(), ending.end(), [](const auto& ref) { return ref->done(); }),
                 ending.end());
    ending.push_back(stopped);
  }
  {
    const std::lock_guard lock(mutex_);
    if (started_) {
      append(StopWork{stopped});
      wake();  // under the mutex, which the worker takes once more before it deletes the stream
      return;
    }
  }
  stopped->finish();
  delete this;
}

void CUstream_st::take(std::vector<Work>* batch, uint64_t taken) {
  const auto has_work = [this, taken] { return submitted_.load(std::memory_order_acquire) != taken; };
  spin_until(has_work, kIdleSpinNs);
  while (!has_work()) {
    asleep_.store(1, std::memory_order_seq_cst);
    if (submitted_.load(std::memory_order_seq_cst) != taken) {
      asleep_.store(0, std::memory_order_relaxed);
      break;
    }
    futex_wait(&asleep_, 1, kForever);
  }
  const std::lock_guard lock(mutex_);
  batch->swap(queue_);
}

bool CUstream_st::run_batch(std::vector<Work>* batch) {
  for (Work& item : *batch) {
    const Work work = std::move(item);
    if (const auto* last = std::get_if<StopWork>(&work)) {
      last->completion->finish();
      return false;
    }
    run_to_end(work);
    completed_.store(completed_.load(std::memory_order_relaxed) + 1, std::memory_order_release);
    if (const auto* marker = std::get_if<MarkerWork>(&work)) marker->completion->finish();
  }
  batch->clear();
  return true;
}

void CUstream_st::run() {
  std::vector<Work> batch;
  uint64_t taken = 0;
  bool more = true;
  while (more) {
    take(&batch, taken);
    taken += batch.size();
    more = run_batch(&batch);
  }
  {
    const std::lock_guard lock(mutex_);  // whoever pushed the last item has let go
  }
  delete this;
}

namespace graphshard::hostcuda {

bool start_detached(void (*function)(void*), void* argument, const char* name) {
  struct Start {
    void (*function)(void*);
    void* argument;
    const char* name;
  };
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  auto* start = new Start{function, argument, name};
  pthread_t thread{};
  const int error = pthread_create(
      &thread, nullptr,
      [](void* opaque) -> void* {
        const Start begin = *static_cast<Start*>(opaque);
        delete static_cast<Start*>(opaque);
        pthread_setname_np(pthread_self(), begin.name);
        begin.function(begin.argument);
        return nullptr;
      },
      start);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (error != 0) {
    delete start;
    return false;
  }
  pthread_detach(thread);
  return true;
}

CUresult check_stream(CUstream stream) {
  if (stream == nullptr || stream == CU_STREAM_LEGACY) {
    return any_blocking_stream_captured() ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT : CUDA_ERROR_NOT_SUPPORTED;
  }
  return stream == CU_STREAM_PER_THREAD ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
}

CUresult submit(CUstream stream, Work work) {
  if (stream->capture.load(std::memory_order_acquire) != nullptr) {
    bool captured = false;
    const CUresult result = capture_work(stream, work, &captured);
    if (captured) return result;
  }
  return stream->push(std::move(work));
}

CUresult stream_create_with_priority(CUstream* stream, unsigned int flags, int priority) {
  GS_RETURN_IF_ERROR(enter_context());
  if (stream == nullptr || flags > CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
  *stream = new CUstream_st(flags, std::clamp(priority, -5, 0));
  const std::lock_guard lock(process().mutex);
  process().streams.push_back(*stream);
  return CUDA_SUCCESS;
}

CUresult stream_create(CUstream* stream, unsigned int flags) { return stream_create_with_priority(stream, flags, 0); }

CUresult stream_destroy(CUstream stream) {
  GS_RETURN_IF_ERROR(enter());
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  GS_RETURN_IF_ERROR(check_stream(stream));
  {
    const std::lock_guard lock(process().mutex);
    auto& streams = process().streams;
    const auto found = std::find(streams.begin(), streams.end(), stream);
    if (found == streams.end()) return CUDA_ERROR_INVALID_HANDLE;
    streams.erase(found);
  }
  leave_capture(stream);
  stream->stop();
  return CUDA_SUCCESS;
}

CUresult stream_query(CUstream stream) {
  GS_RETURN_IF_ERROR(enter_context());
  GS_RETURN_IF_ERROR(check_stream(stream));
  GS_RETURN_IF_ERROR(refuse_in_capture(stream));
  GS_RETURN_IF_ERROR(refuse_if_unsafe());
  return stream->is_idle() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult stream_wait(CUstream stream, int64_t timeout_ns) {
  GS_RETURN_IF_ERROR(enter_context());
  GS_RETURN_IF_ERROR(check_stream(stream));
  GS_RETURN_IF_ERROR(refuse_in_capture(stream));
  GS_RETURN_IF_ERROR(refuse_if_unsafe());
  if (stream->is_idle()) return CUDA_SUCCESS;
  if (timeout_ns == 0) return CUDA_ERROR_NOT_READY;
  Ref<Completion> reached = Ref<Completion>::adopt(new Completion);
  GS_RETURN_IF_ERROR(stream->push(MarkerWork{reached}));
  return reached->wait(timeout_ns) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult stream_synchronize(CUstream stream) { return stream_wait(stream, kForever); }

CUresult mark_work_in_flight(std::vector<Ref<Completion>>* reached) {
  const std::lock_guard lock(process().mutex);
  for (const auto& ending : process().ending_streams) {
    if (!ending->done()) reached->push_back(ending);
  }
  for (CUstream stream : process().streams) {
    if (stream->is_idle()) continue;
    reached->push_back(Ref<Completion>::adopt(new Completion));
    GS_RETURN_IF_ERROR(stream->push(MarkerWork{reached->back()}));
  }
  return CUDA_SUCCESS;
}

CUresult context_synchronize() {
  GS_RETURN_IF_ERROR(enter_context());
  GS_RETURN_IF_ERROR(refuse_if_any_capture());
  std::vector<Ref<Completion>> reached;
  GS_RETURN_IF_ERROR(mark_work_in_flight(&reached));
  for (const auto& completion : reached) completion->wait(kForever);
  return CUDA_SUCCESS;
}

CUresult stream_get_flags(CUstream stream, unsigned int* flags) {
  GS_RETURN_IF_ERROR(enter_context());
  GS_RETURN_IF_ERROR(check_stream(stream));
  if (flags == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *flags = stream->flags;
  return CUDA_SUCCESS;
}

CUresult stream_get_priority(CUstream stream, int* priority) {
  GS_RETURN_IF_ERROR(enter_context());
  GS_RETURN_IF_ERROR(check_stream(stream));
  if (priority == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *priority = stream->priority;
  return CUDA_SUCCESS;
}

CUresult stream_get_context_v1(CUstream stream, CUcontext* context) {
  GS_RETURN_IF_ERROR(enter());
  GS_RETURN_IF_ERROR(check_stream(stream));
  if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *context = &process().primary;
  return CUDA_SUCCESS;
}

CUresult stream_get_context_v2(CUstream stream, CUcontext* context, CUgreenCtx* green) {
  if (green == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *green = nullptr;
  return stream_get_context_v1(stream, context);
}

}  // namespace graphshard::hostcuda
