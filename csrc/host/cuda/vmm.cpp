// Virtual memory management: an allocation is a memfd, a reservation PROT_NONE pages, a mapping mmap over them.
#include <algorithm>
#include <cerrno>
#include <map>
#include <mutex>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "completion.h"
#include "guard.h"
#include "memory.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

namespace graphshard::hostcuda {

namespace {

struct Allocation : RefCounted {
  Allocation(int memfd, size_t bytes, const CUmemAllocationProp& wanted)
      : fd(memfd), num_bytes(bytes), properties(wanted) {}
  ~Allocation() { close(fd); }

  const int fd;
  const size_t num_bytes;
  const CUmemAllocationProp properties;
};

struct Handle {
  Ref<Allocation> allocation;
  int references = 1;
};

struct Mapping {
  Range range;
  Ref<Allocation> allocation;
  CUmemGenericAllocationHandle handle = 0;
  CUmemAccess_flags access = CU_MEM_ACCESS_FLAGS_PROT_NONE;
};

struct Vmm {
  std::mutex mutex;
  std::map<CUmemGenericAllocationHandle, Handle> handles;
  std::map<CUdeviceptr, size_t> reservations;  // begin -> bytes
  std::map<CUdeviceptr, Mapping> mappings;     // by begin
  CUmemGenericAllocationHandle next_handle = 1;
};

Vmm& vmm() {
  static auto* all = new Vmm;
  return *all;
}

bool is_whole(size_t num_bytes) { return num_bytes != 0 && num_bytes % kGranularityBytes == 0; }

CUresult check_properties(const CUmemAllocationProp* properties) {
  if (properties == nullptr || properties->type != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
  const int handle_types = properties->requestedHandleTypes;
  if ((handle_types & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != 0) return CUDA_ERROR_NOT_SUPPORTED;
  switch (properties->location.type) {
    case CU_MEM_LOCATION_TYPE_DEVICE:
      return properties->location.id == kDevice ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
    case CU_MEM_LOCATION_TYPE_HOST:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT:
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

/// A memfd whose pages are all there: a lack of memory is an error now and not a SIGBUS later.
CUresult make_memfd(size_t num_bytes, int* fd) {
  if (num_bytes > available_bytes()) return CUDA_ERROR_OUT_OF_MEMORY;
  *fd = memfd_create("graphshard", MFD_CLOEXEC);
  if (*fd < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  int result = -1;
  do {
    result = fallocate(*fd, 0, 0, static_cast<off_t>(num_bytes));
  } while (result != 0 && errno == EINTR);
  if (result == 0) return CUDA_SUCCESS;
  close(*fd);
  return CUDA_ERROR_OUT_OF_MEMORY;
}

CUmemGenericAllocationHandle add_handle(Ref<Allocation> allocation) {
  const std::lock_guard lock(vmm().mutex);
  const CUmemGenericAllocationHandle handle = vmm().next_handle++;
  vmm().handles[handle] = {std::move(allocation), 1};
  return handle;
}

bool find_handle(CUmemGenericAllocationHandle handle, Ref<Allocation>* allocation) {
  const std::lock_guard lock(vmm().mutex);
  const auto found = vmm().handles.find(handle);
  if (found == vmm().handles.end()) return false;
  *allocation = found->second.allocation;
  return true;
}

/// Called with the mutex held, as what follows.
bool is_reserved(CUdeviceptr address, size_t num_bytes) {
  auto after = vmm().reservations.upper_bound(address);
  if (after == vmm().reservations.begin()) return false;
  const auto& [begin, bytes] = *std::prev(after);
  return address - begin <= bytes && num_bytes <= bytes - (address - begin);
}

bool overlaps_mapping(CUdeviceptr address, size_t num_bytes) {
  const auto after = vmm().mappings.lower_bound(address);
  if (after != vmm().mappings.end() && after->first - address < num_bytes) return true;
  return after != vmm().mappings.begin() && std::prev(after)->second.range.contains(address);
}

/// The mappings that make up exactly the range; none if it is not whole mappings.
std::vector<Mapping*> whole_mappings(CUdeviceptr address, size_t num_bytes) {
  std::vector<Mapping*> found;
  const CUdeviceptr end = address + num_bytes;
  while (address < end) {
    const auto mapping = vmm().mappings.find(address);
    if (mapping == vmm().mappings.end()) return {};
    found.push_back(&mapping->second);
    address += mapping->second.range.num_bytes;
  }
  return address == end ? found : std::vector<Mapping*>{};
}

CUresult protect(Mapping* mapping, CUmemAccess_flags access) {
  void* address = reinterpret_cast<void*>(mapping->range.begin);
  int protection = PROT_NONE;
  if (access == CU_MEM_ACCESS_FLAGS_PROT_READ) protection = PROT_READ;
  if (access == CU_MEM_ACCESS_FLAGS_PROT_READWRITE) protection = PROT_READ | PROT_WRITE;
  if (mprotect(address, mapping->range.num_bytes, protection) != 0) return CUDA_ERROR_INVALID_VALUE;
  mapping->access = access;
  // Best effort: a step should meet no page fault.
  if (protection != PROT_NONE) {
    const bool writes = (protection & PROT_WRITE) != 0;
    madvise(address, mapping->range.num_bytes, writes ? MADV_POPULATE_WRITE : MADV_POPULATE_READ);
  }
  return CUDA_SUCCESS;
}

}  // namespace

bool find_mapping(CUdeviceptr address, Range* range) {
  const std::lock_guard lock(vmm().mutex);
  const auto after = vmm().mappings.upper_bound(address);
  if (after == vmm().mappings.begin() || !std::prev(after)->second.range.contains(address)) return false;
  *range = std::prev(after)->second.range;
  return true;
}

CUresult mem_get_allocation_granularity(size_t* granularity, const CUmemAllocationProp* properties,
                                        CUmemAllocationGranularity_flags /*option*/) {
  GS_RETURN_IF_ERROR(enter());
  GS_RETURN_IF_ERROR(check_properties(properties));
  if (granularity == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *granularity = kGranularityBytes;
  return CUDA_SUCCESS;
}

CUresult mem_create(CUmemGenericAllocationHandle* handle, size_t num_bytes, const CUmemAllocationProp* properties,
                    unsigned long long flags) {
  GS_RETURN_IF_ERROR(enter());
  GS_RETURN_IF_ERROR(check_properties(properties));
  if (handle == nullptr || !is_whole(num_bytes) || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  int fd = -1;
  GS_RETURN_IF_ERROR(make_memfd(num_bytes, &fd));
  *handle = add_handle(Ref<Allocation>::adopt(new Allocation(fd, num_bytes, *properties)));
  return CUDA_SUCCESS;
}

CUresult mem_release(CUmemGenericAllocationHandle handle) {
  GS_RETURN_IF_ERROR(enter());
  const std::lock_guard lock(vmm().mutex);
  const auto found = vmm().handles.find(handle);
  if (found == vmm().handles.end()) return CUDA_ERROR_INVALID_VALUE;
  if (--found->second.references == 0) vmm().handles.erase(found);
  return CUDA_SUCCESS;
}

CUresult mem_address_reserve(CUdeviceptr* address, size_t num_bytes, size_t alignment, CUdeviceptr hint,
                             unsigned long long flags) {
  GS_RETURN_IF_ERROR(enter());
  if (address == nullptr || !is_whole(num_bytes) || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if ((alignment & (alignment - 1)) != 0) return CUDA_ERROR_INVALID_VALUE;
  const size_t spare = std::max(alignment, kGranularityBytes) - kGranularityBytes;
  if (num_bytes > SIZE_MAX - spare) return CUDA_ERROR_OUT_OF_MEMORY;
  void* mapped = mmap(reinterpret_cast<void*>(hint), num_bytes + spare, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  const auto begin = reinterpret_cast<CUdeviceptr>(mapped);
  const CUdeviceptr aligned = spare == 0 ? begin : (begin + alignment - 1) / alignment * alignment;
  const size_t before = aligned - begin;
  if (before != 0) munmap(mapped, before);
  if (before != spare) munmap(reinterpret_cast<void*>(aligned + num_bytes), spare - before);
  const std::lock_guard lock(vmm().mutex);
  vmm().reservations[aligned] = num_bytes;
  *address = aligned;
  return CUDA_SUCCESS;
}

CUresult mem_address_free(CUdeviceptr address, size_t num_bytes) {
  GS_RETURN_IF_ERROR(enter());
  const std::lock_guard lock(vmm().mutex);
  const auto found = vmm().reservations.find(address);
  if (found == vmm().reservations.end() || found->second != num_bytes) return CUDA_ERROR_INVALID_VALUE;
  if (overlaps_mapping(address, num_bytes)) return CUDA_ERROR_INVALID_VALUE;
  munmap(reinterpret_cast<void*>(address), num_bytes);
  vmm().reservations.erase(found);
  return CUDA_SUCCESS;
}

CUresult mem_map(CUdeviceptr address, size_t num_bytes, size_t offset, CUmemGenericAllocationHandle handle,
                 unsigned long long flags) {
  GS_RETURN_IF_ERROR(enter());
  Ref<Allocation> allocation;
  if (!find_handle(handle, &allocation)) return CUDA_ERROR_INVALID_VALUE;
  if (offset != 0 || flags != 0 || !is_whole(num_bytes)) return CUDA_ERROR_INVALID_VALUE;
  if (address % kGranularityBytes != 0 || num_bytes > allocation->num_bytes) return CUDA_ERROR_INVALID_VALUE;
  const std::lock_guard lock(vmm().mutex);
  if (!is_reserved(address, num_bytes)) return CUDA_ERROR_INVALID_VALUE;
  if (overlaps_mapping(address, num_bytes)) return CUDA_ERROR_ALREADY_MAPPED;
  void* mapped =
      mmap(reinterpret_cast<void*>(address), num_bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, allocation->fd, 0);
  if (mapped == MAP_FAILED) return CUDA_ERROR_MAP_FAILED;
  const bool on_device = allocation->properties.location.type == CU_MEM_LOCATION_TYPE_DEVICE;
  const Range range{address, num_bytes, on_device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST, handle};
  vmm().mappings[address] = {range, std::move(allocation), handle, CU_MEM_ACCESS_FLAGS_PROT_NONE};
  return CUDA_SUCCESS;
}

CUresult mem_unmap(CUdeviceptr address, size_t num_bytes) {
  GS_RETURN_IF_ERROR(enter());
  const std::lock_guard lock(vmm().mutex);
  if (whole_mappings(address, num_bytes).empty()) return CUDA_ERROR_INVALID_VALUE;
  void* reserved = mmap(reinterpret_cast<void*>(address), num_bytes, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  if (reserved == MAP_FAILED) return CUDA_ERROR_UNMAP_FAILED;
  const auto begin = vmm().mappings.lower_bound(address);
  vmm().mappings.erase(begin, vmm().mappings.lower_bound(address + num_bytes));
  return CUDA_SUCCESS;
}

CUresult mem_set_access(CUdeviceptr address, size_t num_bytes, const CUmemAccessDesc* descriptors, size_t count) {
  GS_RETURN_IF_ERROR(enter());
  if (descriptors == nullptr || count == 0) return CUDA_ERROR_INVALID_VALUE;
  const std::lock_guard lock(vmm().mutex);
  const std::vector<Mapping*> mappings = whole_mappings(address, num_bytes);
  if (mappings.empty()) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < count; ++i) {
    const CUmemLocation& location = descriptors[i].location;
    if (location.type == CU_MEM_LOCATION_TYPE_DEVICE && location.id != kDevice) return CUDA_ERROR_INVALID_DEVICE;
    for (Mapping* mapping : mappings) GS_RETURN_IF_ERROR(protect(mapping, descriptors[i].flags));
  }
  return CUDA_SUCCESS;
}

CUresult mem_get_access(unsigned long long* flags, const CUmemLocation* location, CUdeviceptr address) {
  GS_RETURN_IF_ERROR(enter());
  if (flags == nullptr || location == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const std::lock_guard lock(vmm().mutex);
  const auto after = vmm().mappings.upper_bound(address);
  if (after == vmm().mappings.begin() || !std::prev(after)->second.range.contains(address)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *flags = std::prev(after)->second.access;
  return CUDA_SUCCESS;
}

CUresult mem_export_to_shareable_handle(void* shareable, CUmemGenericAllocationHandle handle,
                                        CUmemAllocationHandleType type, unsigned long long flags) {
  GS_RETURN_IF_ERROR(enter());
  Ref<Allocation> allocation;
  if (shareable == nullptr || flags != 0 || !find_handle(handle, &allocation)) return CUDA_ERROR_INVALID_VALUE;
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
  if (allocation->properties.requestedHandleTypes != type) return CUDA_ERROR_INVALID_VALUE;
  const int fd = fcntl(allocation->fd, F_DUPFD_CLOEXEC, 0);
  if (fd < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  *static_cast<int*>(shareable) = fd;
  return CUDA_SUCCESS;
}

CUresult mem_import_from_shareable_handle(CUmemGenericAllocationHandle* handle, void* shareable,
                                          CUmemAllocationHandleType type) {
  GS_RETURN_IF_ERROR(enter());
  if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
  const auto source = static_cast<int>(reinterpret_cast<intptr_t>(shareable));
  struct stat status{};
  if (fstat(source, &status) != 0 || !is_whole(static_cast<size_t>(status.st_size))) return CUDA_ERROR_INVALID_VALUE;
  // A peer's file of another kind could shrink under the mapping.
  if (!S_ISREG(status.st_mode)) return CUDA_ERROR_INVALID_VALUE;
  const int fd = fcntl(source, F_DUPFD_CLOEXEC, 0);
  if (fd < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, {kDevice}};
  const auto num_bytes = static_cast<size_t>(status.st_size);
  *handle = add_handle(Ref<Allocation>::adopt(new Allocation(fd, num_bytes, properties)));
  return CUDA_SUCCESS;
}

CUresult mem_get_allocation_properties_from_handle(CUmemAllocationProp* properties,
                                                   CUmemGenericAllocationHandle handle) {
  GS_RETURN_IF_ERROR(enter());
  Ref<Allocation> allocation;
  if (properties == nullptr || !find_handle(handle, &allocation)) return CUDA_ERROR_INVALID_VALUE;
  *properties = allocation->properties;
  return CUDA_SUCCESS;
}

CUresult mem_retain_allocation_handle(CUmemGenericAllocationHandle* handle, void* address) {
  GS_RETURN_IF_ERROR(enter());
  if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const auto wanted = reinterpret_cast<CUdeviceptr>(address);
  const std::lock_guard lock(vmm().mutex);
  const auto after = vmm().mappings.upper_bound(wanted);
  if (after == vmm().mappings.begin() || !std::prev(after)->second.range.contains(wanted)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const Mapping& mapping = std::prev(after)->second;
  const auto [entry, is_new] = vmm().handles.try_emplace(mapping.handle, Handle{mapping.allocation, 0});
  ++entry->second.references;
  *handle = mapping.handle;
  return CUDA_SUCCESS;
}

}  // namespace graphshard::hostcuda
