#include "region.h"

#include <cerrno>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "driver.h"

namespace graphshard::hostnccl {

namespace {

constexpr CUmemAllocationHandleType kHandleType = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// Reserves and maps all of `handle`, which is released: the mapping keeps the memory.
CUdeviceptr map_whole(CUmemGenericAllocationHandle handle, size_t num_bytes) {
  CUdeviceptr address = 0;
  CUresult result = driver().cuMemAddressReserve(&address, num_bytes, 0, 0, 0);
  const char* call = "cuMemAddressReserve";
  if (result == CUDA_SUCCESS) {
    call = "cuMemMap";
    result = driver().cuMemMap(address, num_bytes, 0, handle, 0);
    if (result != CUDA_SUCCESS) driver().cuMemAddressFree(address, num_bytes);
  }
  driver().cuMemRelease(handle);
  check(result, call);
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  HOSTNCCL_CALL(cuMemSetAccess, address, num_bytes, &access, 1);
  return address;
}

void unmap_whole(CUdeviceptr address, size_t num_bytes) {
  if (address == 0) return;
  driver().cuMemUnmap(address, num_bytes);
  driver().cuMemAddressFree(address, num_bytes);
}

/// A descriptor of the allocation behind a pointer, closed at the end of the scope: peers have opened it by then.
class Export {
 public:
  explicit Export(CUdeviceptr address) {
    size_t num_bytes = 0;
    HOSTNCCL_CALL(cuMemGetAddressRange, &base_, &num_bytes, address);
    CUmemGenericAllocationHandle handle = 0;
    HOSTNCCL_CALL(cuMemRetainAllocationHandle, &handle, reinterpret_cast<void*>(address));
    const CUresult result = driver().cuMemExportToShareableHandle(&fd_, handle, kHandleType, 0);
    driver().cuMemRelease(handle);
    check(result, "cuMemExportToShareableHandle");
  }
  ~Export() { close(fd_); }
  Export(const Export&) = delete;
  Export& operator=(const Export&) = delete;
  int fd() const { return fd_; }
  CUdeviceptr base() const { return base_; }

 private:
  int fd_ = -1;
  CUdeviceptr base_ = 0;
};

const char* name_of(uint64_t purpose) {
  switch (static_cast<Purpose>(purpose)) {
    case Purpose::kInit:
      return "ncclCommInitRankConfig";
    case Purpose::kFirstUse:
      return "its first collective";
    case Purpose::kStaging:
      return "a collective that needs more staging memory";
    case Purpose::kRegister:
      return "ncclCommWindowRegister";
    case Purpose::kConfirm:
      return "the end of a registration";
  }
  return "another call";
}

// The words of an offer.
enum : size_t { kPurposeWord, kBytesWord, kOffsetWord, kFdWord, kProblemWord };

/// Ranks that are in one call with one size and no problem.
void check_offers(const std::vector<Message>& offers, int rank, const std::string& problem) {
  const Message& mine = offers[static_cast<size_t>(rank)];
  for (size_t peer = 0; peer < offers.size(); ++peer) {
    if (offers[peer][kPurposeWord] == mine[kPurposeWord]) continue;
    throw Failure(nccl::kInvalidUsage, "rank " + std::to_string(peer) + " is in " +
                                           name_of(offers[peer][kPurposeWord]) + ", this rank (" +
                                           std::to_string(rank) + ") in " + name_of(mine[kPurposeWord]));
  }
  if (!problem.empty()) throw Failure(nccl::kInvalidArgument, problem);
  for (size_t peer = 0; peer < offers.size(); ++peer) {
    const std::string who = "rank " + std::to_string(peer);
    if (offers[peer][kProblemWord] != 0) {
      throw Failure(nccl::kInvalidArgument, who + " cannot take part in " + name_of(mine[kPurposeWord]));
    }
    if (offers[peer][kBytesWord] != mine[kBytesWord]) {
      throw Failure(nccl::kInvalidArgument, who + " brings " + std::to_string(offers[peer][kBytesWord]) + " bytes to " +
                                                name_of(mine[kPurposeWord]) + ", this rank (" + std::to_string(rank) +
                                                ") " + std::to_string(mine[kBytesWord]));
    }
  }
}

}  // namespace

Allocation::Allocation(size_t num_bytes) : num_bytes_((num_bytes + 4095) / 4096 * 4096) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = kHandleType;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  CUmemGenericAllocationHandle handle = 0;
  HOSTNCCL_CALL(cuMemCreate, &handle, num_bytes_, &properties, 0);
  address_ = map_whole(handle, num_bytes_);
}

Allocation::~Allocation() { unmap_whole(address_, num_bytes_); }

PeerMapping::PeerMapping(const ProcessId& owner, int fd) {
  const std::string path = "/proc/" + std::to_string(owner.pid) + "/fd/" + std::to_string(fd);
  const int opened = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (opened < 0) throw Failure(nccl::kSystemError, path + " could not be opened: " + std::strerror(errno));
  struct stat status{};
  CUmemGenericAllocationHandle handle = 0;
  const bool is_sized = fstat(opened, &status) == 0;
  void* shareable = reinterpret_cast<void*>(static_cast<intptr_t>(opened));
  const CUresult result = driver().cuMemImportFromShareableHandle(&handle, shareable, kHandleType);
  close(opened);
  if (!is_sized) throw Failure(nccl::kSystemError, path + " has no size");
  check(result, "cuMemImportFromShareableHandle");
  num_bytes_ = static_cast<size_t>(status.st_size);
  address_ = map_whole(handle, num_bytes_);
}

PeerMapping::~PeerMapping() { unmap_whole(address_, num_bytes_); }

void Region::map_peers(const Group& group, const std::vector<Message>& offers) {
  for (int rank = 0; rank < group.num_ranks(); ++rank) {
    if (rank == group.rank()) {
      bases_.push_back(address_);
      continue;
    }
    const Message& offer = offers[static_cast<size_t>(rank)];
    mappings_.push_back(std::make_unique<PeerMapping>(group.process_of(rank), static_cast<int>(offer[kFdWord])));
    bases_.push_back(mappings_.back()->address() + offer[kOffsetWord]);
  }
}

Region::Region(Group* group, Purpose purpose, CUdeviceptr address, size_t num_bytes, std::string problem)
    : address_(address), num_bytes_(num_bytes) {
  std::unique_ptr<Export> exported;
  try {
    if (problem.empty()) exported = std::make_unique<Export>(address);
  } catch (const Failure& failure) {
    problem = std::string("memory that peers cannot map (use ncclMemAlloc): ") + failure.what();
  }
  Message offer{};
  offer[kPurposeWord] = static_cast<uint64_t>(purpose);
  offer[kBytesWord] = num_bytes;
  offer[kProblemWord] = problem.empty() ? 0 : 1;
  if (exported) {
    offer[kOffsetWord] = address - exported->base();
    offer[kFdWord] = static_cast<uint64_t>(exported->fd());
  }
  const std::vector<Message> offers = group->exchange(offer);
  check_offers(offers, group->rank(), problem);
  try {
    map_peers(*group, offers);
  } catch (const Failure& failure) {
    problem = failure.what();
  }
  // A second exchange: descriptors stay open until all have opened them, and either all ranks have the region or none.
  const Message outcome{static_cast<uint64_t>(Purpose::kConfirm), num_bytes, 0, 0, problem.empty() ? 0U : 1U};
  check_offers(group->exchange(outcome), group->rank(), problem);
}

}  // namespace graphshard::hostnccl
