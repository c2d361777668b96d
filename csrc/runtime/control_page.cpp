#include "runtime/control_page.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

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

uint64_t ControlPage::post_issue(uint64_t hash, uint64_t what) {
  const uint64_t number = num_issues() + 1;
  ControlWords::Entry& entry = words_->issues[number % words_->issues.size()];
  entry.number.store(0, std::memory_order_relaxed);
  entry.hash.store(hash, std::memory_order_release);  // a reader that sees the new hash sees no old number
  entry.what.store(what, std::memory_order_release);
  entry.number.store(number, std::memory_order_release);
  words_->num_issues.store(number, std::memory_order_release);
  return number;
}

std::optional<Issue> ControlPage::issue(uint64_t number) const {
  const ControlWords::Entry& entry = words_->issues[number % words_->issues.size()];
  if (number == 0 || entry.number.load(std::memory_order_acquire) != number) return std::nullopt;
  const Issue issue{number, entry.hash.load(std::memory_order_acquire), entry.what.load(std::memory_order_acquire)};
  if (entry.number.load(std::memory_order_relaxed) != number) return std::nullopt;  // overwritten meanwhile
  return issue;
}

void ControlPage::post_failure(const Failure& failure) {
  if (has_failed()) return;
  const int64_t numbers[] = {failure.kind, failure.unit, failure.op, failure.step, failure.culprit};
  for (size_t i = 0; i < words_->failure.size(); ++i) {
    words_->failure[i].store(static_cast<uint64_t>(numbers[i]), std::memory_order_relaxed);
  }
  const size_t num_bytes = std::min(failure.text.size(), words_->text.size() * sizeof(uint64_t));
  for (size_t begin = 0; begin < num_bytes; begin += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, failure.text.data() + begin, std::min(sizeof(word), num_bytes - begin));
    words_->text[begin / sizeof(word)].store(word, std::memory_order_relaxed);
  }
  words_->num_text_bytes.store(num_bytes, std::memory_order_relaxed);
  words_->has_failed.store(1, std::memory_order_release);
}

uint64_t ControlPage::claim_first(uint64_t rank) {
  uint64_t found = 0;
  // release: what `rank` posted on its own page is seen by whoever reads the claim
  words_->first.compare_exchange_strong(found, rank + 1, std::memory_order_acq_rel, std::memory_order_acquire);
  return found == 0 ? rank : found - 1;
}

std::optional<uint64_t> ControlPage::first_failed() const {
  const uint64_t found = words_->first.load(std::memory_order_acquire);
  if (found == 0) return std::nullopt;
  return found - 1;
}

std::optional<Failure> ControlPage::failure() const {
  if (!has_failed()) return std::nullopt;
  int64_t numbers[5] = {};
  for (size_t i = 0; i < words_->failure.size(); ++i) {
    numbers[i] = static_cast<int64_t>(words_->failure[i].load(std::memory_order_relaxed));
  }
  const size_t capacity = words_->text.size() * sizeof(uint64_t);
  std::string text(std::min<size_t>(words_->num_text_bytes.load(std::memory_order_relaxed), capacity), '\0');
  for (size_t begin = 0; begin < text.size(); begin += sizeof(uint64_t)) {
    const uint64_t word = words_->text[begin / sizeof(uint64_t)].load(std::memory_order_relaxed);
    std::memcpy(text.data() + begin, &word, std::min(sizeof(word), text.size() - begin));
  }
  return Failure{numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], std::move(text)};
}

}  // namespace graphshard
