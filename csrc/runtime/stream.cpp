#include "runtime/stream.h"

#include "runtime/allowed_in_captures.h"
#include "runtime/capture_lock.h"
#include "runtime/stream_capture.h"

namespace graphshard {

StreamHandle::StreamHandle(Driver& driver_in) : driver(driver_in), is_foreign(false), capture_mark(CaptureMark::kNone) {
  driver.enter();
  const AllowedInCaptures allowed(driver.table());
  GRAPHSHARD_CALL(driver.table(), cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
  driver.add_stream(this);
}

StreamHandle::StreamHandle(Driver& driver_in, CUstream foreign)
    : driver(driver_in), stream(foreign), is_foreign(true), capture_mark(CaptureMark::kAsk) {
  driver.enter();
  const auto number = reinterpret_cast<uintptr_t>(foreign);
  if (number <= reinterpret_cast<uintptr_t>(CU_STREAM_PER_THREAD)) {
    throw DriverError("Stream.from_handle", CUDA_ERROR_INVALID_HANDLE,
                      "stream " + std::to_string(number) +
                          " is refused: the null, legacy and per-thread default streams wait for all others, which "
                          "deadlocks with collectives, and cannot be captured; use a stream of its own, as "
                          "torch.cuda.Stream() makes them");
  }
  CUstreamCaptureStatus status{};
  GRAPHSHARD_CALL(driver.table(), cuStreamIsCapturing, stream, &status);  // fails if it is no stream
  driver.add_stream(this);
}

StreamHandle::~StreamHandle() {
  if (!driver.is_usable()) return;
  driver.remove_stream(this);
  if (!is_foreign && stream != nullptr) driver.table().cuStreamDestroy(stream);
}

bool StreamHandle::is_capturing() const {
  const CaptureMark mark = capture_mark.load(std::memory_order_acquire);
  if (mark != CaptureMark::kAsk) return mark == CaptureMark::kHeld;
  CUstreamCaptureStatus status{};
  GRAPHSHARD_CALL(driver.table(), cuStreamIsCapturing, stream, &status);
  return status != CU_STREAM_CAPTURE_STATUS_NONE;
}

void check_not_capturing(const StreamHandle& stream, const char* entry_point) {
  if (!stream.is_capturing()) return;
  throw DriverError(entry_point, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                    std::string(entry_point) +
                        " refused: the stream is being captured, and this would end up in that "
                        "graph; end the capture first");
}

std::shared_ptr<Mapping> find_word(const Driver& driver, CUdeviceptr address, bool is_written,
                                   const char* entry_point) {
  if (address % sizeof(uint32_t) != 0) {
    throw DriverError(entry_point, CUDA_ERROR_MISALIGNED_ADDRESS,
                      std::string(entry_point) + " refused: " + hex(address) + " is not a multiple of 4 bytes");
  }
  return driver.find_memory(address, sizeof(uint32_t), is_written, entry_point);
}

Stream::Stream(Driver& driver) : handle_(std::make_shared<StreamHandle>(driver)) {}

std::shared_ptr<Stream> Stream::from_handle(Driver& driver, CUstream handle) {
  return std::shared_ptr<Stream>(new Stream(std::make_shared<StreamHandle>(driver, handle)));
}

std::shared_ptr<Stream> Stream::share(Driver& driver, CUstream handle) {
  auto own = driver.find_own_stream(handle);
  if (own == nullptr) return from_handle(driver, handle);
  auto stream = std::shared_ptr<Stream>(new Stream(std::move(own)));
  stream->is_shared_ = true;
  return stream;
}

Stream::~Stream() {
  Driver& driver = handle_->driver;
  if (!is_shared_) abandon_capture(*handle_);
  driver.retire(std::move(handle_));
}

bool Stream::wait_idle(int64_t timeout_ns) const {
  driver().enter();
  check_not_capturing(*handle_, "cuStreamSynchronize");
  const bool is_over = driver().wait_stream(handle_->stream, timeout_ns);
  if (is_over) driver().reap();
  return is_over;
}

bool Stream::is_idle() const {
  driver().enter();
  const NoCapture no_capture;  // else a capture of this stream might begin before the query, which would end it
  check_not_capturing(*handle_, "cuStreamQuery");
  if (!no_capture.is_granted()) return false;
  const AllowedInCaptures allowed(driver().table());
  const CUresult result = driver().table().cuStreamQuery(handle_->stream);
  if (result != CUDA_ERROR_NOT_READY) driver().table().check(result, "cuStreamQuery");
  return result == CUDA_SUCCESS;
}

void Stream::copy(CUdeviceptr destination, CUdeviceptr source, size_t num_bytes) {
  driver().enter();
  check_not_capturing(*handle_, "cuMemcpyAsync");
  const auto written = driver().find_memory(destination, num_bytes, true, "cuMemcpyAsync");
  const auto read = driver().find_memory(source, num_bytes, false, "cuMemcpyAsync");
  GRAPHSHARD_CALL(driver().table(), cuMemcpyAsync, destination, source, num_bytes, handle_->stream);
}

void Stream::fill(CUdeviceptr destination, uint8_t value, size_t num_bytes) {
  driver().enter();
  check_not_capturing(*handle_, "cuMemsetD8Async");
  const auto written = driver().find_memory(destination, num_bytes, true, "cuMemsetD8Async");
  GRAPHSHARD_CALL(driver().table(), cuMemsetD8Async, destination, value, num_bytes, handle_->stream);
}

void Stream::write_value(CUdeviceptr address, uint32_t value) {
  driver().enter();
  check_not_capturing(*handle_, "cuStreamWriteValue32");
  const auto written = find_word(driver(), address, true, "cuStreamWriteValue32");
  GRAPHSHARD_CALL(driver().table(), cuStreamWriteValue32, handle_->stream, address, value,
                  CU_STREAM_WRITE_VALUE_DEFAULT);
}

void Stream::wait_value(CUdeviceptr address, uint32_t value) {
  driver().enter();
  check_not_capturing(*handle_, "cuStreamWaitValue32");
  const auto read = find_word(driver(), address, false, "cuStreamWaitValue32");
  GRAPHSHARD_CALL(driver().table(), cuStreamWaitValue32, handle_->stream, address, value, CU_STREAM_WAIT_VALUE_GEQ);
}

void Stream::call(Calls::Function function, void* argument) {
  driver().enter();
  check_not_capturing(*handle_, "cuLaunchHostFunc");
  GRAPHSHARD_CALL(driver().table(), cuLaunchHostFunc, handle_->stream, function, argument);
}

void Stream::record(const Event& event) {
  driver().enter();
  check_not_capturing(*handle_, "cuEventRecord");
  GRAPHSHARD_CALL(driver().table(), cuEventRecord, event.handle(), handle_->stream);
}

void Stream::wait(const Event& event) {
  driver().enter();
  check_not_capturing(*handle_, "cuStreamWaitEvent");
  GRAPHSHARD_CALL(driver().table(), cuStreamWaitEvent, handle_->stream, event.handle(), CU_EVENT_WAIT_DEFAULT);
}

}  // namespace graphshard
