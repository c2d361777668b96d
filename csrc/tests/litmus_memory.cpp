// Virtual memory management: windows that are shared, protected, refused and released.
#include <cstring>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

#include "litmus.h"
#include "window.h"

using namespace graphshard::litmus;

LITMUS(a_window_is_one_memory_under_two_addresses) {
  const size_t bytes = granularity();
  const Stream stream;
  const Window window(bytes, true);
  const int fd = window.export_fd();
  const Window peer(fd, bytes, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
  close(fd);  // the import keeps a descriptor of its own
  const Pinned seen(bytes);
  TRUE(peer.address() != window.address());
  OK(cu.memset_8_async(window.address(), 0x42, bytes, stream));
  OK(cu.memcpy_async(seen.address(), peer.address(), bytes, stream));
  OK(cu.stream_synchronize(stream));
  TRUE(seen.is_all(0x42));
}

LITMUS(an_imported_window_outlives_its_exporter) {
  const size_t bytes = granularity();
  const Stream stream;
  const Pinned seen(bytes);
  int fd = -1;
  {
    const Window window(bytes, true);
    OK(cu.memset_8_async(window.address(), 0x43, bytes, stream));
    OK(cu.stream_synchronize(stream));
    fd = window.export_fd();
  }
  const Window peer(fd, bytes, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
  close(fd);
  OK(cu.memcpy_async(seen.address(), peer.address(), bytes, stream));
  OK(cu.stream_synchronize(stream));
  TRUE(seen.is_all(0x43));
}

LITMUS(a_read_only_mapping_says_so_and_can_be_read) {
  const size_t bytes = granularity();
  const Stream stream;
  const Window window(bytes, true);
  const int fd = window.export_fd();
  CUdeviceptr address = 0;
  try {
    const Window peer(fd, bytes, CU_MEM_ACCESS_FLAGS_PROT_READ);
    address = peer.address();
    CUmemLocation location{};
    location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    unsigned long long access = 0;
    OK(cu.mem_get_access(&access, &location, address));
    EQUAL(CU_MEM_ACCESS_FLAGS_PROT_READ, access);
    const Pinned seen(bytes);
    OK(cu.memcpy_async(seen.address(), address, bytes, stream));
    OK(cu.stream_synchronize(stream));
  } catch (const Failure& failure) {
    close(fd);
    if (!cu.is_host()) throw Skip(std::string("this driver maps no peer read-only: ") + failure.what());
    throw;
  }
  close(fd);
}

// Misaligned bases, sizes that are not whole, memory of another owner.
LITMUS(windows_keep_to_the_granularity) {
  const size_t bytes = granularity();
  const CUmemAllocationProp properties = window_properties(true);
  CUmemGenericAllocationHandle handle = 0;
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu.mem_create(&handle, bytes + 64, &properties, 0));
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu.mem_create(&handle, 0, &properties, 0));
  OK(cu.mem_create(&handle, bytes, &properties, 0));
  CUdeviceptr address = 0;
  OK(cu.mem_address_reserve(&address, 4 * bytes, 0, 0, 0));
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu.mem_map(address + 64, bytes, 0, handle, 0));
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu.mem_map(address, 2 * bytes, 0, handle, 0));
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu.mem_map(address, bytes, bytes, handle, 0));  // the offset is 0
  OK(cu.mem_map(address + bytes, bytes, 0, handle, 0));
  TRUE(cu.mem_map(address + bytes, bytes, 0, handle, 0) != CUDA_SUCCESS);
  TRUE(cu.mem_address_free(address, 4 * bytes) != CUDA_SUCCESS);  // still mapped
  OK(cu.mem_unmap(address + bytes, bytes));
  OK(cu.mem_address_free(address, 4 * bytes));
  OK(cu.mem_release(handle));
}

LITMUS(what_was_not_made_to_be_shared_is_not_exported) {
  const size_t bytes = granularity();
  const Window window(bytes, false);
  int fd = -1;
  TRUE(cu.mem_export(&fd, window.handle(), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) != CUDA_SUCCESS);
  std::vector<char> foreign(bytes);
  CUmemGenericAllocationHandle handle = 0;
  TRUE(cu.mem_retain_allocation_handle(&handle, foreign.data()) != CUDA_SUCCESS);
  CUdeviceptr base = 0;
  size_t size = 0;
  TRUE(cu.mem_get_address_range(&base, &size, reinterpret_cast<CUdeviceptr>(foreign.data())) != CUDA_SUCCESS);
  OK(cu.mem_retain_allocation_handle(&handle, reinterpret_cast<void*>(window.address())));
  EQUAL(window.handle(), handle);
  OK(cu.mem_release(handle));
}

LITMUS(something_that_is_no_window_is_not_imported) {
  int channel[2];
  TRUE(pipe(channel) == 0);
  CUmemGenericAllocationHandle handle = 0;
  for (int fd : {channel[0], -1}) {
    void* descriptor = reinterpret_cast<void*>(static_cast<intptr_t>(fd));
    TRUE(cu.mem_import(&handle, descriptor, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != CUDA_SUCCESS);
  }
  close(channel[0]);
  close(channel[1]);
}

LITMUS(too_much_memory_is_an_error_at_once) {
  const size_t bytes = granularity();
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  OK(cu.mem_get_info(&free_bytes, &total_bytes));
  TRUE(free_bytes <= total_bytes && free_bytes != 0);
  const CUmemAllocationProp properties = window_properties(true);
  CUmemGenericAllocationHandle handle = 0;
  const size_t too_much = (total_bytes / bytes + 1) * bytes * 2;
  EXPECT(CUDA_ERROR_OUT_OF_MEMORY, cu.mem_create(&handle, too_much, &properties, 0));
  CUdeviceptr address = 0;
  EXPECT(CUDA_ERROR_OUT_OF_MEMORY, cu.mem_alloc(&address, too_much));
}

LITMUS(an_allocation_knows_its_range) {
  CUdeviceptr address = 0;
  CUdeviceptr base = 0;
  size_t size = 0;
  OK(cu.mem_alloc(&address, 1000));
  OK(cu.mem_get_address_range(&base, &size, address + 999));
  EQUAL(address, base);
  EQUAL(1000, size);
  EQUAL(0, address % 256);
  OK(cu.mem_free(address));
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu.mem_free(address));
}

// Memory freed while a stream still reads it.
HOST_LITMUS(memory_freed_in_use_stays_until_it_is_not) {
  const Stream stream;
  const Latch latch;
  const Pinned seen(4096);
  CUdeviceptr address = 0;
  OK(cu.mem_alloc(&address, 4096));
  OK(cu.memset_8_async(address, 0x77, 4096, stream));
  latch.stall(stream);
  OK(cu.memcpy_async(seen.address(), address, 4096, stream));
  OK(cu.mem_free(address));
  std::vector<CUdeviceptr> others(8);
  for (CUdeviceptr& other : others) {
    OK(cu.mem_alloc(&other, 4096));
    TRUE(other != address);
    std::memset(reinterpret_cast<void*>(other), 0xFF, 4096);
  }
  latch.set(1);
  OK(cu.stream_synchronize(stream));
  TRUE(seen.is_all(0x77));
  for (CUdeviceptr other : others) OK(cu.mem_free(other));
}

HOST_LITMUS(windows_leave_no_descriptor_behind) {
  const auto num_descriptors = [] {
    int count = 0;
    for (int fd = 0; fd < 1024; ++fd) count += fcntl(fd, F_GETFD) >= 0 ? 1 : 0;
    return count;
  };
  const int before = num_descriptors();
  for (int i = 0; i < 20; ++i) {
    const Window window(granularity(), true);
    const int fd = window.export_fd();
    const Window peer(fd, granularity(), CU_MEM_ACCESS_FLAGS_PROT_READ);
    close(fd);
  }
  EQUAL(before, num_descriptors());
}
