// A VMM allocation, or an imported one, mapped at an address of its own.
#pragma once

#include "litmus.h"

namespace graphshard::litmus {

inline CUmemAllocationProp window_properties(bool exportable) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.requestedHandleTypes = exportable ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_NONE;
  return properties;
}

inline size_t granularity() {
  const CUmemAllocationProp properties = window_properties(true);
  size_t bytes = 0;
  OK(cu.mem_get_allocation_granularity(&bytes, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  return bytes;
}

class Window {
 public:
  Window(size_t num_bytes, bool exportable) : num_bytes_(num_bytes) {
    const CUmemAllocationProp properties = window_properties(exportable);
    OK(cu.mem_create(&handle_, num_bytes, &properties, 0));
    map(CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
  }
  Window(int fd, size_t num_bytes, CUmemAccess_flags access) : num_bytes_(num_bytes) {
    void* descriptor = reinterpret_cast<void*>(static_cast<intptr_t>(fd));
    OK(cu.mem_import(&handle_, descriptor, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    map(access);
  }
  ~Window() {
    cu.mem_unmap(address_, num_bytes_);
    cu.mem_address_free(address_, num_bytes_);
    cu.mem_release(handle_);
  }
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;
  CUdeviceptr address() const { return address_; }
  CUmemGenericAllocationHandle handle() const { return handle_; }
  int export_fd() const {
    int fd = -1;
    OK(cu.mem_export(&fd, handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    return fd;
  }

 private:
  void map(CUmemAccess_flags access) {
    OK(cu.mem_address_reserve(&address_, num_bytes_, 0, 0, 0));
    OK(cu.mem_map(address_, num_bytes_, 0, handle_, 0));
    CUmemAccessDesc descriptor{};
    descriptor.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    descriptor.flags = access;
    OK(cu.mem_set_access(address_, num_bytes_, &descriptor, 1));
  }

  size_t num_bytes_;
  CUmemGenericAllocationHandle handle_ = 0;
  CUdeviceptr address_ = 0;
};

}  // namespace graphshard::litmus
