// Memory::allocate_host: pinned memory of the host at an address that the device uses too.
#include "runtime/allowed_in_captures.h"
#include "runtime/memory.h"

namespace graphshard {

namespace {

struct PinnedBytes {
  PinnedBytes(Driver& driver_in, size_t num_bytes) : driver(driver_in) {
    GRAPHSHARD_CALL(driver.table(), cuMemHostAlloc, &bytes, num_bytes,
                    CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP);
  }
  ~PinnedBytes() {
    if (!driver.is_usable()) return;
    const AllowedInCaptures allowed(driver.table());
    driver.table().cuMemFreeHost(bytes);
  }
  PinnedBytes(const PinnedBytes&) = delete;
  PinnedBytes& operator=(const PinnedBytes&) = delete;

  Driver& driver;
  void* bytes = nullptr;
};

}  // namespace

std::shared_ptr<Memory> Memory::allocate_host(Driver& driver, size_t num_bytes, bool is_exportable) {
  if (is_exportable) return create(driver, num_bytes, true, true, false);
  driver.enter();
  driver.reap();
  const AllowedInCaptures allowed(driver.table());
  reserved_bytes(driver, num_bytes, "cuMemHostAlloc");  // refuses what is no size
  auto pinned = std::make_shared<PinnedBytes>(driver, num_bytes);
  CUdeviceptr address = 0;
  GRAPHSHARD_CALL(driver.table(), cuMemHostGetDevicePointer, &address, pinned->bytes, 0);
  if (address != reinterpret_cast<CUdeviceptr>(pinned->bytes)) {
    throw DriverError("cuMemHostGetDevicePointer", CUDA_ERROR_NOT_SUPPORTED,
                      "pinned memory at " + hex(reinterpret_cast<CUdeviceptr>(pinned->bytes)) +
                          " has another address, " + hex(address) + ", on " + driver.device_name() +
                          ": unified addressing is needed");
  }
  auto memory = adopt(driver, address, num_bytes, num_bytes, std::move(pinned));
  memory->mapping_->is_on_host = true;
  return memory;
}

}  // namespace graphshard
