// A stream and the single ops that may be enqueued on it outside of any list.
#pragma once

#include "runtime/calls.h"
#include "runtime/event.h"

namespace graphshard {

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  explicit Stream(Driver& driver);
  // Somebody else's stream, as StreamHandle says: it outlives also every list, graph and step that used it, which ask
  // it when they are dropped, and later, whether their work has ended (Note [retired owners]).
  static std::shared_ptr<Stream> from_handle(Driver& driver, CUstream handle);
  // As from_handle; one that this driver made is shared instead, and lives as long as this.
  static std::shared_ptr<Stream> share(Driver& driver, CUstream handle);
  ~Stream();

  Driver& driver() const { return handle_->driver; }
  const std::shared_ptr<StreamHandle>& handle() const { return handle_; }
  const std::shared_ptr<CallErrors>& errors() const { return errors_; }

  bool wait_idle(int64_t timeout_ns) const;
  // Also false while a capture is open in this process: a query of a stream that is being captured ends the capture.
  bool is_idle() const;
  void copy(CUdeviceptr destination, CUdeviceptr source, size_t num_bytes);
  void fill(CUdeviceptr destination, uint8_t value, size_t num_bytes);
  void write_value(CUdeviceptr address, uint32_t value);
  void wait_value(CUdeviceptr address, uint32_t value);
  // `function(argument)` on the stream's own thread; it must not call the driver.
  void call(Calls::Function function, void* argument);
  void record(const Event& event);
  void wait(const Event& event);

 private:
  explicit Stream(std::shared_ptr<StreamHandle> handle) : handle_(std::move(handle)) {}

  std::shared_ptr<StreamHandle> handle_;
  bool is_shared_ = false;  // another Stream made it, and ends captures that it has opened
  std::shared_ptr<CallErrors> errors_ = std::make_shared<CallErrors>();
};

// Refuses work on a stream that is being captured, which would end up in that graph.
void check_not_capturing(const StreamHandle& stream, const char* entry_point);
// Value words are 32 bits wide and aligned; DriverError for `entry_point` if `address` is not one of this driver's.
std::shared_ptr<Mapping> find_word(const Driver& driver, CUdeviceptr address, bool is_written, const char* entry_point);

}  // namespace graphshard
