// Flags and payloads between two threads, two graphs and two processes; --handoffs says how many.
#include <cstring>
#include <thread>

#include <unistd.h>

#include "litmus.h"
#include "window.h"

using namespace graphshard::litmus;

namespace {

constexpr uint32_t kBurst = 256;  // how many hand-offs are enqueued before the host waits for them

/// FNV-1a over the payload's words.
uint64_t checksum(const uint32_t* words, size_t count) {
  uint64_t hash = 1469598103934665603U;
  for (size_t i = 0; i < count; ++i) hash = (hash ^ words[i]) * 1099511628211U;
  return hash;
}

/// A producer writes payload and checksum, then the flag; a consumer reads after the flag, then gives it back.
class HandOff {
 public:
  explicit HandOff(size_t payload_bytes)
      : num_words_(payload_bytes / 4), payload_(payload_bytes + 8), seen_(payload_bytes + 8) {}

  void run(long count) {
    for (long begin = 0; begin < count; begin += kBurst) {
      const long end = begin + kBurst < count ? begin + kBurst : count;
      for (long i = begin; i < end; ++i) {
        const auto sequence = static_cast<uint32_t>(i + 1);
        OK(cu.stream_wait_value_32(producer_, taken_.address(), sequence - 1, CU_STREAM_WAIT_VALUE_GEQ));
        OK(cu.launch_host_func(producer_, produce, this));
        OK(cu.stream_write_value_32(producer_, given_.address(), sequence, CU_STREAM_WRITE_VALUE_DEFAULT));
        OK(cu.stream_wait_value_32(consumer_, given_.address(), sequence, CU_STREAM_WAIT_VALUE_GEQ));
        OK(cu.memcpy_async(seen_.address(), payload_.address(), seen_.size(), consumer_));
        OK(cu.launch_host_func(consumer_, consume, this));
        OK(cu.stream_write_value_32(consumer_, taken_.address(), sequence, CU_STREAM_WRITE_VALUE_DEFAULT));
      }
      OK(cu.stream_synchronize(consumer_));
      OK(cu.stream_synchronize(producer_));
    }
    EQUAL(count, num_consumed_);
    EQUAL(0, num_wrong_);
  }

 private:
  static void produce(void* opaque) {
    auto* self = static_cast<HandOff*>(opaque);
    auto* words = reinterpret_cast<uint32_t*>(self->payload_.bytes());
    const uint32_t sequence = self->num_produced_++;
    for (size_t i = 0; i < self->num_words_; ++i) words[i] = sequence * 2654435761U + static_cast<uint32_t>(i);
    const uint64_t sum = checksum(words, self->num_words_);
    std::memcpy(words + self->num_words_, &sum, sizeof(sum));
  }

  static void consume(void* opaque) {
    auto* self = static_cast<HandOff*>(opaque);
    const auto* words = reinterpret_cast<const uint32_t*>(self->seen_.bytes());
    uint64_t sum = 0;
    std::memcpy(&sum, words + self->num_words_, sizeof(sum));
    const bool is_right = words[0] == static_cast<uint32_t>(self->num_consumed_) * 2654435761U &&
                          sum == checksum(words, self->num_words_);
    if (!is_right) ++self->num_wrong_;
    ++self->num_consumed_;
  }

  const size_t num_words_;
  const Stream producer_;
  const Stream consumer_;
  const Latch given_;
  const Latch taken_;
  const Pinned payload_;
  const Pinned seen_;
  uint32_t num_produced_ = 0;
  long num_consumed_ = 0;
  long num_wrong_ = 0;
};

}  // namespace

LITMUS(handoffs_of_64_bytes_are_whole) { HandOff(64).run(num_handoffs); }

LITMUS(handoffs_of_4_kib_are_whole) { HandOff(4096).run(num_handoffs); }

// A graph in each of two threads; words are reset after each wait, so one graph serves every hand-off.
LITMUS(handoffs_between_two_graphs_are_whole) {
  const Stream producer;
  const Stream consumer;
  const Latch full;
  const Latch empty;
  const Pinned counter(64);
  const Pinned payload(4096);
  struct State {
    const Pinned& payload;
    uint32_t produced = 0;
    long consumed = 0;
    long wrong = 0;
  } state{payload};
  const auto produce = [](void* opaque) {
    auto* self = static_cast<State*>(opaque);
    ++self->produced;
    auto* words = reinterpret_cast<uint32_t*>(self->payload.bytes());
    for (size_t i = 0; i < 1024; ++i) words[i] = self->produced;
  };
  const auto consume = [](void* opaque) {
    auto* self = static_cast<State*>(opaque);
    ++self->consumed;
    const auto* words = reinterpret_cast<const uint32_t*>(self->payload.bytes());
    for (size_t i = 0; i < 1024; ++i) self->wrong += words[i] == static_cast<uint32_t>(self->consumed) ? 0 : 1;
  };
  const auto wait_and_reset = [](CUstream stream, const Latch& word) {
    OK(cu.stream_wait_value_32(stream, word.address(), 1, CU_STREAM_WAIT_VALUE_EQ));
    OK(cu.stream_write_value_32(stream, word.address(), 0, CU_STREAM_WRITE_VALUE_DEFAULT));
  };
  const Captured producing(producer, [&] {
    wait_and_reset(producer, empty);
    OK(cu.launch_host_func(producer, produce, &state));
    OK(cu.stream_write_value_32(producer, full.address(), 1, CU_STREAM_WRITE_VALUE_DEFAULT));
  });
  const Captured consuming(consumer, [&] {
    wait_and_reset(consumer, full);
    OK(cu.launch_host_func(consumer, consume, &state));
    OK(cu.stream_write_value_32(consumer, empty.address(), 1, CU_STREAM_WRITE_VALUE_DEFAULT));
  });
  empty.set(1);
  for (long i = 0; i < num_handoffs; ++i) {
    producing.launch(producer);
    consuming.launch(consumer);
    if (i % kBurst == 0) OK(cu.stream_synchronize(consumer));
  }
  OK(cu.stream_synchronize(consumer));
  OK(cu.stream_synchronize(producer));
  EQUAL(num_handoffs, state.consumed);
  EQUAL(0, state.wrong);
}

namespace {

constexpr size_t kSharedBytes = 2 << 20;  // whole on every driver's granularity
constexpr size_t kTakenOffset = 64;
constexpr size_t kPayloadOffset = 4096;
constexpr size_t kPayloadWords = 1024;

void give_to_peer(CUdeviceptr shared) {
  const Stream stream;
  for (long i = 1; i <= num_handoffs; ++i) {
    const auto sequence = static_cast<uint32_t>(i);
    OK(cu.stream_wait_value_32(stream, shared + kTakenOffset, sequence - 1, CU_STREAM_WAIT_VALUE_GEQ));
    OK(cu.memset_32_async(shared + kPayloadOffset, sequence, kPayloadWords, stream));
    OK(cu.stream_write_value_32(stream, shared, sequence, CU_STREAM_WRITE_VALUE_DEFAULT));
    if (i % kBurst == 0) OK(cu.stream_synchronize(stream));
  }
  OK(cu.stream_synchronize(stream));
}

struct Taker {
  const Pinned& seen;
  uint32_t num_taken = 0;
  long num_wrong = 0;
};

void check_taken(void* opaque) {
  auto* taker = static_cast<Taker*>(opaque);
  const auto* words = reinterpret_cast<const uint32_t*>(taker->seen.bytes());
  ++taker->num_taken;
  for (size_t i = 0; i < kPayloadWords; ++i) taker->num_wrong += words[i] == taker->num_taken ? 0 : 1;
}

}  // namespace

// The other process of the next test.
LITMUS(_take_from_peer) {
  const Window window(kInheritedFd, kSharedBytes, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
  const CUdeviceptr shared = window.address();
  const Stream stream;
  const Pinned seen(4 * kPayloadWords);
  Taker taker{seen};
  for (long i = 1; i <= num_handoffs; ++i) {
    const auto sequence = static_cast<uint32_t>(i);
    OK(cu.stream_wait_value_32(stream, shared, sequence, CU_STREAM_WAIT_VALUE_GEQ));
    OK(cu.memcpy_async(seen.address(), shared + kPayloadOffset, seen.size(), stream));
    OK(cu.launch_host_func(stream, check_taken, &taker));
    OK(cu.stream_write_value_32(stream, shared + kTakenOffset, sequence, CU_STREAM_WRITE_VALUE_DEFAULT));
    if (i % kBurst == 0) OK(cu.stream_synchronize(stream));
  }
  OK(cu.stream_synchronize(stream));
  EQUAL(0, taker.num_wrong);
}

LITMUS(handoffs_between_two_processes_are_whole) {
  const Window window(kSharedBytes, true);
  const Stream stream;
  OK(cu.memset_8_async(window.address(), 0, kSharedBytes, stream));
  OK(cu.stream_synchronize(stream));
  const int fd = window.export_fd();
  std::string output;
  int status = 0;
  std::thread peer([&] { status = run_in_fresh_process("_take_from_peer", &output, fd); });
  try {
    give_to_peer(window.address());
  } catch (const Failure&) {
    peer.join();  // its limit ends it
    throw;
  }
  peer.join();
  close(fd);
  if (status != 0) fail(__FILE__, __LINE__, output);
}
