// Memory: one allocation, reserved and mapped, exportable as a file descriptor if asked for.
#pragma once

#include "runtime/driver.h"

namespace graphshard {

class Memory : public std::enable_shared_from_this<Memory> {
 public:
  // Zeroed. Refused before anything is reserved if the device has less free memory.
  // `has_fabric`: exportable as a fabric handle too, which reaches processes that no descriptor reaches.
  static std::shared_ptr<Memory> allocate(Driver& driver, size_t num_bytes, bool is_exportable,
                                          bool has_fabric = false);
  // Pinned memory of the host that host and device use at one address, zeroed: for words. Windows in it are exportable.
  static std::shared_ptr<Memory> allocate_host(Driver& driver, size_t num_bytes, bool is_exportable);
  // The descriptor stays the caller's. `num_bytes` as the exporter asked for.
  static std::shared_ptr<Memory> import_fd(Driver& driver, int fd, size_t num_bytes, bool is_read_only);
  // `handle` is what export_fabric gave in a process of the same NVLink domain.
  static std::shared_ptr<Memory> import_fabric(Driver& driver, const std::string& handle, size_t num_bytes,
                                               bool is_read_only);
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
  bool is_host_readable() const { return mapping_->is_on_host || driver().is_host(); }
  const std::shared_ptr<Mapping>& mapping() const { return mapping_; }
  int export_fd() const;
  std::string export_fabric() const;

 private:
  explicit Memory(std::shared_ptr<Mapping> mapping, bool is_exportable, bool has_fabric = false);
  static std::shared_ptr<Memory> create(Driver& driver, size_t num_bytes, bool is_exportable, bool is_on_host,
                                        bool has_fabric);
  static std::shared_ptr<Memory> import(std::shared_ptr<Mapping> mapping, void* handle, CUmemAllocationHandleType type,
                                        bool is_read_only);

  std::shared_ptr<Mapping> mapping_;
  const bool is_exportable_;
  const bool has_fabric_;
};

}  // namespace graphshard
