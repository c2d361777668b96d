#include "runtime/control_page.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "driver/error.h"

namespace graphshard {

namespace {

[[noreturn]] void fail(const char* call, const std::string& what, CUresult code = CUDA_ERROR_OPERATING_SYSTEM) {
  throw DriverError(call, code, "control page: " + std::string(call) + " failed: " + what);
}

}  // namespace

ControlWords* ControlPage::map(int fd) {
  void* page = mmap(nullptr, kNumBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (page == MAP_FAILED) fail("mmap", std::strerror(errno));
  return static_cast<ControlWords*>(page);
}

std::shared_ptr<ControlPage> ControlPage::create() {
  const int fd = memfd_create("graphshard-control", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) fail("memfd_create", std::strerror(errno));
  ControlWords* words = nullptr;
  try {
    if (ftruncate(fd, kNumBytes) != 0) fail("ftruncate", std::strerror(errno));
    // A peer that could shrink the page would kill its readers with SIGBUS.
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) fail("fcntl", std::strerror(errno));
    words = map(fd);
  } catch (...) {
    close(fd);
    throw;
  }
  auto page = std::shared_ptr<ControlPage>(new ControlPage(fd, words));
  words->version.store(kVersion, std::memory_order_release);
  page->set_pid(static_cast<uint64_t>(getpid()));
  page->set_state(1);
  words->magic.store(kMagic, std::memory_order_release);
  return page;
}

std::shared_ptr<ControlPage> ControlPage::open_fd(int fd) {
  struct stat status{};
  if (fstat(fd, &status) != 0) fail("fstat", std::strerror(errno));
  if (status.st_size < static_cast<off_t>(kNumBytes)) {
    fail("open_fd",
         "descriptor " + std::to_string(fd) + " holds " + std::to_string(status.st_size) + " bytes, not " +
             std::to_string(kNumBytes),
         CUDA_ERROR_INVALID_VALUE);
  }
  const int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (own < 0) fail("fcntl", std::strerror(errno));
  ControlWords* words = nullptr;
  try {
    words = map(own);
  } catch (...) {
    close(own);
    throw;
  }
  auto page = std::shared_ptr<ControlPage>(new ControlPage(own, words));
  if (words->magic.load(std::memory_order_acquire) != kMagic) {
    fail("open_fd", "descriptor " + std::to_string(fd) + " is no control page: its magic differs",
         CUDA_ERROR_INVALID_VALUE);
  }
  const uint64_t version = words->version.load(std::memory_order_acquire);
  if (version != kVersion) {
    fail("open_fd", "version " + std::to_string(version) + ", this build reads " + std::to_string(kVersion),
         CUDA_ERROR_INVALID_VALUE);
  }
  return page;
}

ControlPage::~ControlPage() {
  munmap(words_, kNumBytes);
  close(fd_);
}

int ControlPage::duplicate_fd() const {
  const int fd = fcntl(fd_, F_DUPFD_CLOEXEC, 0);
  if (fd < 0) fail("fcntl", std::strerror(errno));
  return fd;
}

void ControlPage::set_digest(const Digest& digest) {
  for (size_t i = 0; i < words_->digest.size(); ++i) {
    uint64_t word = 0;
    std::memcpy(&word, digest.data() + i * sizeof(word), sizeof(word));
    words_->digest[i].store(word, std::memory_order_release);
  }
}

ControlPage::Digest ControlPage::digest() const {
  Digest digest{};
  for (size_t i = 0; i < words_->digest.size(); ++i) {
    const uint64_t word = words_->digest[i].load(std::memory_order_acquire);
    std::memcpy(digest.data() + i * sizeof(word), &word, sizeof(word));
  }
  return digest;
}

}  // namespace graphshard
