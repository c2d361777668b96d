#include "segment.h"

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "process.h"

namespace graphshard::hostnccl {

namespace {

constexpr char kMagic[] = "graphshard nccl";
constexpr const char* kUsedBefore = "the unique id was used before: its communicator is complete";

/// What a unique id's bytes hold.
struct Name {
  char magic[16];
  int64_t pid;
  uint64_t start_time;
  uint64_t nonce;
  int32_t fd;
};
static_assert(sizeof(Name) <= sizeof(ncclUniqueId), "fits");

/// Descriptors that peers still have to open, by nonce.
struct OpenDescriptors {
  std::mutex mutex;
  std::map<uint64_t, int> fds;
};

OpenDescriptors& open_descriptors() {
  static auto* const all = new OpenDescriptors;
  return *all;
}

SegmentLayout* map_layout(int fd) {
  void* mapped = mmap(nullptr, sizeof(SegmentLayout), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (mapped == MAP_FAILED) {
    throw Failure(nccl::kSystemError, std::string("the shared segment could not be mapped: ") + std::strerror(errno));
  }
  return static_cast<SegmentLayout*>(mapped);
}

bool is_whole(int fd) {
  struct stat status{};
  return fstat(fd, &status) == 0 && S_ISREG(status.st_mode) &&
         static_cast<size_t>(status.st_size) == sizeof(SegmentLayout);
}

}  // namespace

ncclUniqueId Segment::create() {
  Name name{};
  std::memcpy(name.magic, kMagic, sizeof(kMagic));
  const ProcessId self = ProcessId::self();
  name.pid = self.pid;
  name.start_time = self.start_time;
  if (getrandom(&name.nonce, sizeof(name.nonce), 0) != sizeof(name.nonce)) {
    throw Failure(nccl::kSystemError, "no random bytes for a unique id");
  }
  const int fd = memfd_create("graphshard-nccl", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, sizeof(SegmentLayout)) != 0) {
    const std::string reason = std::strerror(errno);
    if (fd >= 0) close(fd);
    throw Failure(nccl::kSystemError, "the shared segment could not be made: " + reason);
  }
  name.fd = fd;
  SegmentLayout* layout = map_layout(fd);
  layout->nonce.store(name.nonce);
  munmap(layout, sizeof(SegmentLayout));
  {
    const std::lock_guard lock(open_descriptors().mutex);
    open_descriptors().fds[name.nonce] = fd;
  }
  ncclUniqueId id{};
  std::memcpy(&id, &name, sizeof(name));
  return id;
}

Segment::Segment(const ncclUniqueId& id) {
  Name name{};
  std::memcpy(&name, &id, sizeof(name));
  if (std::memcmp(name.magic, kMagic, sizeof(kMagic)) != 0) {
    throw Failure(nccl::kInvalidArgument, "the unique id is not one of the host NCCL's ncclGetUniqueId");
  }
  const std::string maker = "process " + std::to_string(name.pid) + ", which made the unique id,";
  if (!ProcessId{name.pid, name.start_time}.is_alive()) throw Failure(nccl::kSystemError, maker + " is gone");
  const std::string path = "/proc/" + std::to_string(name.pid) + "/fd/" + std::to_string(name.fd);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0 && errno == ENOENT) throw Failure(nccl::kInvalidArgument, kUsedBefore);
  if (fd < 0) {
    throw Failure(nccl::kSystemError, maker + " does not show its segment (" + path + "): " + std::strerror(errno));
  }
  const bool whole = is_whole(fd);
  SegmentLayout* layout = nullptr;
  try {
    if (whole) layout = map_layout(fd);
  } catch (...) {
    close(fd);
    throw;
  }
  close(fd);
  if (layout != nullptr && layout->nonce.load() != name.nonce) {
    munmap(layout, sizeof(SegmentLayout));
    layout = nullptr;
  }
  if (layout == nullptr) {
    throw Failure(nccl::kInvalidArgument, kUsedBefore);
  }
  layout_ = layout;
  nonce_ = name.nonce;
}

Segment::~Segment() {
  if (layout_ != nullptr) munmap(layout_, sizeof(SegmentLayout));
}

void Segment::close_descriptor() const {
  const std::lock_guard lock(open_descriptors().mutex);
  const auto found = open_descriptors().fds.find(nonce_);
  if (found == open_descriptors().fds.end()) return;
  close(found->second);
  open_descriptors().fds.erase(found);
}

}  // namespace graphshard::hostnccl
