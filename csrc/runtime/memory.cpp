#include "runtime/memory.h"

#include <sys/stat.h>

#include <cstring>

#include "runtime/allowed_in_captures.h"

namespace graphshard {

namespace {

std::atomic<uint64_t> next_generation{1};
constexpr const char* kImport = "cuMemImportFromShareableHandle";

std::shared_ptr<Mapping> new_mapping(Driver& driver, size_t num_bytes, const char* entry_point) {
  auto mapping = std::make_shared<Mapping>(driver);
  mapping->num_bytes = num_bytes;
  mapping->reserved_bytes = Memory::reserved_bytes(driver, num_bytes, entry_point);
  mapping->generation = next_generation.fetch_add(1);
  return mapping;
}

void check_free(const Driver& driver, size_t needed_bytes) {
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  GRAPHSHARD_CALL(driver.table(), cuMemGetInfo, &free_bytes, &total_bytes);
  if (needed_bytes <= free_bytes) return;
  throw DriverError("cuMemCreate", CUDA_ERROR_OUT_OF_MEMORY,
                    "not enough memory: need " + std::to_string(needed_bytes) + " bytes, have " +
                        std::to_string(free_bytes) + " free of " + std::to_string(total_bytes) + " on " +
                        driver.device_name() + "; free some or ask for less");
}

// Note [one handle per window]: cuMemMap takes offset 0 and whole handles only, so a window is one allocation.
void map(Mapping& mapping) {
  const Table& table = mapping.driver.table();
  GRAPHSHARD_CALL(table, cuMemAddressReserve, &mapping.address, mapping.reserved_bytes, 0, 0, 0);
  GRAPHSHARD_CALL(table, cuMemMap, mapping.address, mapping.reserved_bytes, 0, mapping.handle, 0);
  mapping.is_mapped = true;
  CUmemAccessDesc access{};
  if (mapping.is_on_host) {
    access.location = mapping.driver.allocation_prop(false, true).location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    GRAPHSHARD_CALL(table, cuMemSetAccess, mapping.address, mapping.reserved_bytes, &access, 1);
  }
  access.location = mapping.driver.allocation_prop(false, false).location;
  access.flags = mapping.is_read_only ? CU_MEM_ACCESS_FLAGS_PROT_READ : CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  CUresult result = table.cuMemSetAccess(mapping.address, mapping.reserved_bytes, &access, 1);
  if (result != CUDA_SUCCESS && mapping.is_read_only && !mapping.driver.is_host()) {
    // Some drivers map for reading only not at all; `is_read_only` still keeps this library's ops from writing.
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    result = table.cuMemSetAccess(mapping.address, mapping.reserved_bytes, &access, 1);
  }
  table.check(result, "cuMemSetAccess");
}

void zero(Mapping& mapping) {
  if (mapping.driver.is_host() && mapping.lender == nullptr) return;  // memfd pages are zero
  const Table& table = mapping.driver.table();
  StreamHandle stream(mapping.driver);
  GRAPHSHARD_CALL(table, cuMemsetD8Async, mapping.address, 0, mapping.reserved_bytes, stream.stream);
  constexpr int64_t kTimeoutNs = 60'000'000'000;
  if (!mapping.driver.wait_stream(stream.stream, kTimeoutNs)) {
    table.fail(CUDA_ERROR_TIMEOUT, "cuMemsetD8Async", "zeroing of new memory, not done after 60 s");
  }
}

}  // namespace

Mapping::~Mapping() {
  if (!driver.is_usable()) {
    if (lender != nullptr) new std::shared_ptr<void>(std::move(lender));  // leaked, as the rest
    return;
  }
  if (lender != nullptr) return;
  const Table& table = driver.table();
  const AllowedInCaptures allowed(table);
  if (is_mapped) table.cuMemUnmap(address, reserved_bytes);
  if (address != 0) table.cuMemAddressFree(address, reserved_bytes);
  if (has_handle) table.cuMemRelease(handle);
}

Memory::Memory(std::shared_ptr<Mapping> mapping, bool is_exportable, bool has_fabric)
    : mapping_(std::move(mapping)), is_exportable_(is_exportable), has_fabric_(has_fabric) {
  mapping_->driver.add_memory(mapping_);
}

Memory::~Memory() {
  if (!mapping_->driver.is_usable()) {
    mapping_->driver.retire(std::move(mapping_));
    return;
  }
  Driver& driver = mapping_->driver;
  driver.remove_memory(*mapping_);
  driver.retire(std::move(mapping_));
}

std::shared_ptr<Memory> Memory::allocate(Driver& driver, size_t num_bytes, bool is_exportable, bool has_fabric) {
  return create(driver, num_bytes, is_exportable || has_fabric, false, has_fabric);
}

std::shared_ptr<Memory> Memory::create(Driver& driver, size_t num_bytes, bool is_exportable, bool is_on_host,
                                       bool has_fabric) {
  driver.enter();
  driver.reap();
  const AllowedInCaptures allowed(driver.table());
  auto mapping = new_mapping(driver, num_bytes, "cuMemCreate");
  mapping->is_on_host = is_on_host;
  if (!is_on_host) check_free(driver, mapping->reserved_bytes);
  CUmemAllocationProp prop = driver.allocation_prop(is_exportable, is_on_host);
  if (has_fabric) {
    prop.requestedHandleTypes =
        static_cast<CUmemAllocationHandleType>(prop.requestedHandleTypes | CU_MEM_HANDLE_TYPE_FABRIC);
  }
  const CUresult result = driver.table().cuMemCreate(&mapping->handle, mapping->reserved_bytes, &prop, 0);
  driver.table().check(
      result, "cuMemCreate",
      has_fabric ? "memory with a fabric handle, which needs an NVLink fabric and an IMEX channel" : "");
  mapping->has_handle = true;
  map(*mapping);
  zero(*mapping);
  return std::shared_ptr<Memory>(new Memory(std::move(mapping), is_exportable, has_fabric));
}

std::shared_ptr<Memory> Memory::adopt(Driver& driver, CUdeviceptr address, size_t num_bytes, size_t reserved_bytes,
                                      std::shared_ptr<void> lender) {
  driver.enter();
  const AllowedInCaptures allowed(driver.table());
  auto mapping = std::make_shared<Mapping>(driver);
  mapping->address = address;
  mapping->num_bytes = num_bytes;
  mapping->reserved_bytes = reserved_bytes;
  mapping->generation = next_generation.fetch_add(1);
  mapping->lender = std::move(lender);
  zero(*mapping);
  return std::shared_ptr<Memory>(new Memory(std::move(mapping), false));
}

size_t Memory::reserved_bytes(const Driver& driver, size_t num_bytes, const char* entry_point) {
  const size_t granularity = driver.granularity_bytes();
  if (num_bytes == 0 || num_bytes > SIZE_MAX - granularity) {
    throw DriverError(entry_point, CUDA_ERROR_INVALID_VALUE,
                      "memory of " + std::to_string(num_bytes) + " bytes is refused: ask for 1 byte or more");
  }
  return (num_bytes + granularity - 1) / granularity * granularity;
}

std::shared_ptr<Memory> Memory::import_fd(Driver& driver, int fd, size_t num_bytes, bool is_read_only) {
  driver.enter();
  driver.reap();
  auto mapping = new_mapping(driver, num_bytes, kImport);
  if (driver.is_host()) {
    struct stat status{};
    if (fstat(fd, &status) != 0 || static_cast<size_t>(status.st_size) < mapping->reserved_bytes) {
      throw DriverError(kImport, CUDA_ERROR_INVALID_VALUE,
                        "descriptor " + std::to_string(fd) + " holds " + std::to_string(status.st_size) +
                            " bytes, a window of " + std::to_string(num_bytes) + " needs " +
                            std::to_string(mapping->reserved_bytes) + "; import what a rank exported");
    }
  }
  auto* os_handle = reinterpret_cast<void*>(static_cast<intptr_t>(fd));
  return import(std::move(mapping), os_handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, is_read_only);
}

std::shared_ptr<Memory> Memory::import_fabric(Driver& driver, const std::string& handle, size_t num_bytes,
                                              bool is_read_only) {
  driver.enter();
  driver.reap();
  auto mapping = new_mapping(driver, num_bytes, kImport);
  CUmemFabricHandle fabric{};
  if (handle.size() != sizeof(fabric.data)) {
    throw DriverError(
        kImport, CUDA_ERROR_INVALID_VALUE,
        "a fabric handle has " + std::to_string(sizeof(fabric.data)) + " bytes, not " + std::to_string(handle.size()));
  }
  std::memcpy(fabric.data, handle.data(), handle.size());
  return import(std::move(mapping), &fabric, CU_MEM_HANDLE_TYPE_FABRIC, is_read_only);
}

std::shared_ptr<Memory> Memory::import(std::shared_ptr<Mapping> mapping, void* handle, CUmemAllocationHandleType type,
                                       bool is_read_only) {
  const AllowedInCaptures allowed(mapping->driver.table());
  GRAPHSHARD_CALL(mapping->driver.table(), cuMemImportFromShareableHandle, &mapping->handle, handle, type);
  mapping->has_handle = true;
  mapping->is_read_only = is_read_only;
  map(*mapping);
  return std::shared_ptr<Memory>(new Memory(std::move(mapping), false));
}

int Memory::export_fd() const {
  Driver& driver = mapping_->driver;
  driver.enter();
  if (!is_exportable_) {
    throw DriverError("cuMemExportToShareableHandle", CUDA_ERROR_INVALID_VALUE,
                      "memory of " + std::to_string(num_bytes()) +
                          " bytes is not exportable: allocate it with exportable=True, imported windows stay their "
                          "exporter's");
  }
  int fd = -1;
  GRAPHSHARD_CALL(driver.table(), cuMemExportToShareableHandle, &fd, mapping_->handle,
                  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  return fd;
}

std::string Memory::export_fabric() const {
  Driver& driver = mapping_->driver;
  driver.enter();
  if (!has_fabric_) {
    throw DriverError("cuMemExportToShareableHandle", CUDA_ERROR_INVALID_VALUE,
                      "memory of " + std::to_string(num_bytes()) +
                          " bytes has no fabric handle: allocate it with fabric=True, imported windows stay their "
                          "exporter's");
  }
  CUmemFabricHandle fabric{};
  GRAPHSHARD_CALL(driver.table(), cuMemExportToShareableHandle, &fabric, mapping_->handle, CU_MEM_HANDLE_TYPE_FABRIC,
                  0);
  return {reinterpret_cast<const char*>(fabric.data), sizeof(fabric.data)};
}

}  // namespace graphshard
