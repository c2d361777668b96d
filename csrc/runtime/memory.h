// Memory: one allocation, reserved and mapped, exportable as a file descriptor if asked for.
#pragma once

#include "runtime/driver.h"

namespace graphshard {

class Memory : public std::enable_shared_from_this<Memory> {
 public:
  // Zeroed. Refused before anything is reserved if the device has less free memory.
  static std::shared_ptr<Memory> allocate(Driver& driver, size_t num_bytes, bool is_exportable);
  // The descriptor stays the caller's. `num_bytes` as the exporter asked for.
  static std::shared_ptr<Memory> import_fd(Driver& driver, int fd, size_t num_bytes, bool is_read_only);
  // Memory that a library has allocated on this driver's device, zeroed here; `lender` frees it when it dies, and does
  // not die before the last op list, graph and window is done with it.
  static std::shared_ptr<Memory> adopt(Driver& driver, CUdeviceptr address, size_t num_bytes, size_t reserved_bytes,
                                       std::shared_ptr<void> lender);
  // What an allocation of `num_bytes` takes: whole granules. DriverError for `entry_point` if it is none at all.
  static size_t reserved_bytes(const Driver& driver, size_t num_bytes, const char* entry_point);
  ~Memory();

  Driver& driver() const { return mapping_->driver; }
  CUdeviceptr address() const { return mapping_->address; }
  size_t num_bytes() const { return mapping_->num_bytes; }
  uint64_t generation() const { return mapping_->generation; }
  bool is_read_only() const { return mapping_->is_read_only; }
  const std::shared_ptr<Mapping>& mapping() const { return mapping_; }
  int export_fd() const;

 private:
  explicit Memory(std::shared_ptr<Mapping> mapping, bool is_exportable);

  std::shared_ptr<Mapping> mapping_;
  const bool is_exportable_;
};

}  // namespace graphshard
