// Memory: plain allocations, host memory, and VMM allocations on memfds that other processes can map.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda.h>

namespace graphshard::hostcuda {

constexpr size_t kGranularityBytes = 4096;

/// A range of addresses that this driver knows.
struct Range {
  CUdeviceptr begin = 0;
  size_t num_bytes = 0;
  CUmemorytype type = CU_MEMORYTYPE_DEVICE;
  uint64_t id = 0;

  bool contains(CUdeviceptr address) const { return address >= begin && address - begin < num_bytes; }
};

/// The known range around `address`; false if there is none: memory of another owner.
bool find_range(CUdeviceptr address, Range* range);
bool find_mapping(CUdeviceptr address, Range* range);

/// What can still be had without the kernel killing somebody: the machine's and the control group's limits.
size_t available_bytes();
size_t total_bytes();

CUresult mem_get_info(size_t* free_bytes, size_t* total);
CUresult mem_alloc(CUdeviceptr* address, size_t num_bytes);
CUresult mem_free(CUdeviceptr address);
CUresult mem_host_alloc(void** address, size_t num_bytes, unsigned int flags);
CUresult mem_alloc_host(void** address, size_t num_bytes);
CUresult mem_free_host(void* address);
CUresult mem_host_register(void* address, size_t num_bytes, unsigned int flags);
CUresult mem_host_unregister(void* address);
CUresult mem_host_get_device_pointer(CUdeviceptr* device, void* host, unsigned int flags);
CUresult mem_get_address_range(CUdeviceptr* base, size_t* num_bytes, CUdeviceptr address);
CUresult pointer_get_attribute(void* data, CUpointer_attribute attribute, CUdeviceptr address);

CUresult mem_get_allocation_granularity(size_t* granularity, const CUmemAllocationProp* properties,
                                        CUmemAllocationGranularity_flags option);
CUresult mem_create(CUmemGenericAllocationHandle* handle, size_t num_bytes, const CUmemAllocationProp* properties,
                    unsigned long long flags);
CUresult mem_release(CUmemGenericAllocationHandle handle);
CUresult mem_address_reserve(CUdeviceptr* address, size_t num_bytes, size_t alignment, CUdeviceptr hint,
                             unsigned long long flags);
CUresult mem_address_free(CUdeviceptr address, size_t num_bytes);
CUresult mem_map(CUdeviceptr address, size_t num_bytes, size_t offset, CUmemGenericAllocationHandle handle,
                 unsigned long long flags);
CUresult mem_unmap(CUdeviceptr address, size_t num_bytes);
CUresult mem_set_access(CUdeviceptr address, size_t num_bytes, const CUmemAccessDesc* descriptors, size_t count);
CUresult mem_get_access(unsigned long long* flags, const CUmemLocation* location, CUdeviceptr address);
CUresult mem_export_to_shareable_handle(void* shareable, CUmemGenericAllocationHandle handle,
                                        CUmemAllocationHandleType type, unsigned long long flags);
CUresult mem_import_from_shareable_handle(CUmemGenericAllocationHandle* handle, void* shareable,
                                          CUmemAllocationHandleType type);
CUresult mem_get_allocation_properties_from_handle(CUmemAllocationProp* properties,
                                                   CUmemGenericAllocationHandle handle);
CUresult mem_retain_allocation_handle(CUmemGenericAllocationHandle* handle, void* address);

}  // namespace graphshard::hostcuda
