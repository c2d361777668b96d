#include "memory.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <vector>

#include <sys/mman.h>

#include "capture.h"
#include "guard.h"
#include "stream.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace graphshard::hostcuda {

namespace {

struct Retired {
  Range range;
  std::vector<Ref<Completion>> uses;  // work that was in flight when it was freed
};

struct Allocations {
  std::mutex mutex;
  std::map<CUdeviceptr, Range> ranges;      // by begin
  std::map<CUdeviceptr, Range> registered;  // host memory of other owners
  std::vector<Retired> retired;
  uint64_t next_id = 1;
};

Allocations& allocations() {
  static auto* all = new Allocations;
  return *all;
}

size_t round_up(size_t num_bytes) {
  return (num_bytes + kGranularityBytes - 1) / kGranularityBytes * kGranularityBytes;
}

bool find_in(const std::map<CUdeviceptr, Range>& ranges, CUdeviceptr address, Range* range) {
  auto after = ranges.upper_bound(address);
  if (after == ranges.begin()) return false;
  const Range& candidate = std::prev(after)->second;
  if (!candidate.contains(address)) return false;
  *range = candidate;
  return true;
}

void unmap(const Range& range) { munmap(reinterpret_cast<void*>(range.begin), round_up(range.num_bytes)); }

/// Give back what was freed while in use and is no longer. Called with the mutex held.
void sweep(Allocations* all) {
  auto& retired = all->retired;
  const auto is_used = [](const Retired& entry) {
    return std::any_of(entry.uses.begin(), entry.uses.end(), [](const auto& use) { return !use->done(); });
  };
  const auto unused = std::partition(retired.begin(), retired.end(), is_used);
  for (auto entry = unused; entry != retired.end(); ++entry) unmap(entry->range);
  retired.erase(unused, retired.end());
}

CUresult allocate(CUdeviceptr* address, size_t num_bytes, CUmemorytype type) {
  if (address == nullptr || num_bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  GS_RETURN_IF_ERROR(refuse_if_unsafe());
  auto& all = allocations();
  const std::lock_guard lock(all.mutex);
  sweep(&all);
  if (num_bytes > available_bytes()) return CUDA_ERROR_OUT_OF_MEMORY;
  void* mapped = mmap(nullptr, round_up(num_bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  madvise(mapped, round_up(num_bytes), MADV_POPULATE_WRITE);  // best effort: a step should meet no page fault
  const Range range{reinterpret_cast<CUdeviceptr>(mapped), num_bytes, type, all.next_id++};
  all.ranges[range.begin] = range;
  *address = range.begin;
  return CUDA_SUCCESS;
}

/// Free now, or when the work that is in flight has ended: never under a copy that still reads it.
CUresult release(CUdeviceptr address, CUmemorytype type) {
  if (address == 0) return CUDA_SUCCESS;
  GS_RETURN_IF_ERROR(refuse_if_unsafe());
  std::vector<Ref<Completion>> uses;
  GS_RETURN_IF_ERROR(mark_work_in_flight(&uses));
  auto& all = allocations();
  const std::lock_guard lock(all.mutex);
  const auto found = all.ranges.find(address);
  if (found == all.ranges.end() || found->second.type != type) return CUDA_ERROR_INVALID_VALUE;
  all.retired.push_back({found->second, std::move(uses)});
  all.ranges.erase(found);
  sweep(&all);
  return CUDA_SUCCESS;
}

CUresult answer(void* data, CUpointer_attribute attribute, const Range& range, CUdeviceptr address) {
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      *static_cast<CUcontext*>(data) = &process().primary;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<unsigned int*>(data) = range.type;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      *static_cast<CUdeviceptr*>(data) = address;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      *static_cast<unsigned long long*>(data) = range.id;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      *static_cast<unsigned int*>(data) = 0;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *static_cast<int*>(data) = kDevice;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      *static_cast<CUdeviceptr*>(data) = range.begin;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      *static_cast<size_t*>(data) = range.num_bytes;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MAPPED:
      *static_cast<int*>(data) = 1;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}

}  // namespace

bool find_range(CUdeviceptr address, Range* range) {
  auto& all = allocations();
  {
    const std::lock_guard lock(all.mutex);
    if (find_in(all.ranges, address, range) || find_in(all.registered, address, range)) return true;
  }
  return find_mapping(address, range);
}

CUresult mem_get_info(size_t* free_bytes, size_t* total) {
  GS_RETURN_IF_ERROR(enter_context());
  if (free_bytes == nullptr || total == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *free_bytes = available_bytes();
  *total = total_bytes();
  return CUDA_SUCCESS;
}

CUresult mem_alloc(CUdeviceptr* address, size_t num_bytes) {
  GS_RETURN_IF_ERROR(enter_context());
  return allocate(address, num_bytes, CU_MEMORYTYPE_DEVICE);
}

CUresult mem_free(CUdeviceptr address) {
  GS_RETURN_IF_ERROR(enter_context());
  return release(address, CU_MEMORYTYPE_DEVICE);
}

CUresult mem_host_alloc(void** address, size_t num_bytes, unsigned int flags) {
  GS_RETURN_IF_ERROR(enter_context());
  constexpr unsigned int kKnown = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED;
  if (address == nullptr || (flags & ~kKnown) != 0) return CUDA_ERROR_INVALID_VALUE;
  CUdeviceptr begin = 0;
  GS_RETURN_IF_ERROR(allocate(&begin, num_bytes, CU_MEMORYTYPE_HOST));
  *address = reinterpret_cast<void*>(begin);
  return CUDA_SUCCESS;
}

CUresult mem_alloc_host(void** address, size_t num_bytes) { return mem_host_alloc(address, num_bytes, 0); }

CUresult mem_free_host(void* address) {
  GS_RETURN_IF_ERROR(enter_context());
  return release(reinterpret_cast<CUdeviceptr>(address), CU_MEMORYTYPE_HOST);
}

CUresult mem_host_register(void* address, size_t num_bytes, unsigned int /*flags*/) {
  GS_RETURN_IF_ERROR(enter_context());
  if (address == nullptr || num_bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  GS_RETURN_IF_ERROR(refuse_if_unsafe());
  const auto begin = reinterpret_cast<CUdeviceptr>(address);
  auto& all = allocations();
  const std::lock_guard lock(all.mutex);
  Range other;
  if (find_in(all.registered, begin, &other)) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  all.registered[begin] = {begin, num_bytes, CU_MEMORYTYPE_HOST, all.next_id++};
  return CUDA_SUCCESS;
}

CUresult mem_host_unregister(void* address) {
  GS_RETURN_IF_ERROR(enter_context());
  if (address == nullptr) return CUDA_ERROR_INVALID_VALUE;
  GS_RETURN_IF_ERROR(refuse_if_unsafe());
  auto& all = allocations();
  const std::lock_guard lock(all.mutex);
  const bool erased = all.registered.erase(reinterpret_cast<CUdeviceptr>(address)) == 1;
  return erased ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

CUresult mem_host_get_device_pointer(CUdeviceptr* device, void* host, unsigned int flags) {
  GS_RETURN_IF_ERROR(enter_context());
  Range range;
  if (device == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (!find_range(reinterpret_cast<CUdeviceptr>(host), &range)) return CUDA_ERROR_INVALID_VALUE;
  *device = reinterpret_cast<CUdeviceptr>(host);
  return CUDA_SUCCESS;
}

CUresult mem_get_address_range(CUdeviceptr* base, size_t* num_bytes, CUdeviceptr address) {
  GS_RETURN_IF_ERROR(enter_context());
  Range range;
  if (!find_range(address, &range)) return CUDA_ERROR_NOT_FOUND;
  if (base != nullptr) *base = range.begin;
  if (num_bytes != nullptr) *num_bytes = range.num_bytes;
  return CUDA_SUCCESS;
}

CUresult pointer_get_attribute(void* data, CUpointer_attribute attribute, CUdeviceptr address) {
  GS_RETURN_IF_ERROR(enter());
  Range range;
  if (data == nullptr || !find_range(address, &range)) return CUDA_ERROR_INVALID_VALUE;
  return answer(data, attribute, range, address);
}

}  // namespace graphshard::hostcuda
