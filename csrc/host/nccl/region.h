// Memory: allocations that peers can map, and one rank's region as all ranks address it.
#pragma once

#include <cuda.h>

#include <memory>
#include <string>
#include <vector>

#include "group.h"

namespace graphshard::hostnccl {

/// A VMM allocation that can be exported, mapped read-write; whole pages of zeros.
class Allocation {
 public:
  explicit Allocation(size_t num_bytes);
  ~Allocation();
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;
  CUdeviceptr address() const { return address_; }
  size_t num_bytes() const { return num_bytes_; }

 private:
  size_t num_bytes_;
  CUdeviceptr address_ = 0;
};

/// Another rank's allocation, mapped here from its descriptor.
class PeerMapping {
 public:
  PeerMapping(const ProcessId& owner, int fd);
  ~PeerMapping();
  PeerMapping(const PeerMapping&) = delete;
  PeerMapping& operator=(const PeerMapping&) = delete;
  CUdeviceptr address() const { return address_; }

 private:
  size_t num_bytes_ = 0;
  CUdeviceptr address_ = 0;
};

/// What ranks agree on before they map each other's memory: the calls that exchange regions.
enum class Purpose : uint64_t { kInit = 1, kFirstUse, kStaging, kRegister, kConfirm };

/// The same number of bytes on every rank, each mapped by all.
class Region {
 public:
  /// Collective, blocking the host. `problem` is why this rank cannot, or empty: then every rank fails with it.
  /// kInvalidUsage if ranks are in different calls, kInvalidArgument if their sizes differ.
  Region(Group* group, Purpose purpose, CUdeviceptr address, size_t num_bytes, std::string problem = "");

  CUdeviceptr at(int rank) const { return bases_[static_cast<size_t>(rank)]; }
  std::vector<CUdeviceptr> all() const { return bases_; }
  CUdeviceptr address() const { return address_; }
  size_t num_bytes() const { return num_bytes_; }
  bool contains(CUdeviceptr address, size_t num_bytes) const {
    return address >= address_ && address - address_ <= num_bytes_ && num_bytes <= num_bytes_ - (address - address_);
  }
  bool overlaps(CUdeviceptr address, size_t num_bytes) const {
    return address < address_ + num_bytes_ && address_ < address + num_bytes;
  }

 private:
  void map_peers(const Group& group, const std::vector<Message>& offers);

  CUdeviceptr address_;
  size_t num_bytes_;
  std::vector<CUdeviceptr> bases_;
  std::vector<std::unique_ptr<PeerMapping>> mappings_;
};

}  // namespace graphshard::hostnccl
