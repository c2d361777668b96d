#include "progress.h"

#include <chrono>
#include <climits>
#include <thread>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "call.h"

namespace graphshard::hostnccl {

namespace {

constexpr FlagMode kModes[] = {FlagMode::kEager, FlagMode::kCaptured};

std::string text_of(const Group& group, int rank, uint32_t header) {
  Message words;
  if (group.find_description(rank, header, &words)) return Call::from_words(words).text();
  return "a collective with header " + std::to_string(header);
}

std::string text_of(FlagMode mode) { return mode == FlagMode::kEager ? " (eager)" : " (captured)"; }

}  // namespace

void set_word(CUdeviceptr address, uint32_t value) {
  auto* pointer = reinterpret_cast<uint32_t*>(address);
  __atomic_store_n(pointer, value, __ATOMIC_RELEASE);
  syscall(SYS_futex, pointer, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

uint32_t Progress::load(int writer, FlagWord word) const {
  return __atomic_load_n(reinterpret_cast<const uint32_t*>(flags_.address(flags_.rank(), writer, word)),
                         __ATOMIC_ACQUIRE);
}

void Progress::store(int writer, FlagWord word, uint32_t value) const {
  set_word(flags_.address(flags_.rank(), writer, word), value);
}

bool Progress::is_captured_busy() const { return load(flags_.rank(), FlagWord::kBusyCaptured) != 0; }

bool Progress::Waiting::operator==(const Waiting& other) const {
  return flag == other.flag && header == other.header && peer == other.peer && peer_header == other.peer_header &&
         peer_mode == other.peer_mode;
}

/// Whether `peer` has come to an entry in `mode` while this rank waits at one in `own_mode`.
bool Progress::is_in(int peer, FlagMode mode, FlagMode own_mode, uint32_t own_flag) const {
  const uint32_t reached = load(peer, entry_word(mode));
  if (mode == FlagMode::kCaptured) return reached != 0;  // it is reset where it was waited for
  if (own_mode == FlagMode::kEager) return reached != 0 && static_cast<int32_t>(reached - own_flag) >= 0;
  return static_cast<int32_t>(reached - load(flags_.rank(), FlagWord::kEnteredEager)) > 0;
}

bool Progress::find_unlike(FlagMode mode, Waiting* found) const {
  const int self = flags_.rank();
  const uint32_t flag = load(self, entry_word(mode));
  if (flag == 0) return false;  // in no entry
  const uint32_t header = load(self, header_word(mode));
  for (int peer : flags_.peers()) {
    for (const FlagMode peer_mode : kModes) {
      if (!is_in(peer, peer_mode, mode, flag)) continue;
      const uint32_t peer_header = load(peer, header_word(peer_mode));
      if (peer_mode == mode && peer_header == header) continue;
      // Read again: this rank may have gone on while the words above were read.
      if (load(self, entry_word(mode)) != flag || load(self, header_word(mode)) != header) return false;
      *found = {flag, header, peer, peer_header, peer_mode};
      return true;
    }
  }
  return false;
}

std::string Progress::unlike_peer(const Group& group) const {
  for (const FlagMode mode : kModes) {
    Waiting first;
    Waiting second;
    if (!find_unlike(mode, &first)) continue;
    // A captured call's flag is always 1, so words of two calls may have been taken for one. Ranks in unlike calls
    // wait for ever: what is still so later is true.
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (!find_unlike(mode, &second) || !(first == second)) continue;
    const bool is_mixed = first.peer_mode != mode;
    return "rank " + std::to_string(first.peer) + " waits in " + text_of(group, first.peer, first.peer_header) +
           (is_mixed ? text_of(first.peer_mode) : "") + ", this rank (" + std::to_string(flags_.rank()) + ") in " +
           text_of(group, flags_.rank(), first.header) + (is_mixed ? text_of(mode) : "");
  }
  return "";
}

void Progress::release_eager(uint32_t sequence) const {
  const uint32_t header = load(flags_.rank(), FlagWord::kHeaderEager);
  for (int peer : flags_.peers()) {
    store(peer, FlagWord::kHeaderEager, header);
    store(peer, FlagWord::kEntryEager, sequence);
    store(peer, FlagWord::kExitEager, sequence);
  }
}

}  // namespace graphshard::hostnccl
