#include "call.h"

namespace graphshard::hostnccl {

namespace {

/// The finaliser of splitmix64: every input bit moves every output bit.
uint64_t mix(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9U;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBU;
  return value ^ (value >> 31);
}

}  // namespace

std::string Place::text() const {
  return is_in_window() ? "window " + std::to_string(window) + " + " + std::to_string(offset) : "no window";
}

Message Call::words() const {
  return {static_cast<uint64_t>(kind), num_bytes, send.window, send.offset, receive.window, receive.offset};
}

Call Call::from_words(const Message& words) {
  return {static_cast<CallKind>(words[0]), words[1], {words[2], words[3]}, {words[4], words[5]}};
}

uint32_t Call::header() const {
  uint64_t hash = 0;
  for (const uint64_t word : words()) hash = mix(hash + word + 0x9E3779B97F4A7C15U);
  return static_cast<uint32_t>(hash >> 32);
}

std::string Call::text() const {
  const char* name = kind == CallKind::kReduceScatter       ? "a reduce-scatter"
                     : kind == CallKind::kAllGatherByKernel ? "a gather by an SM kernel"
                                                            : "a gather";
  return std::string(name) + " of " + std::to_string(num_bytes) + " bytes from " + send.text() + " to " +
         receive.text();
}

}  // namespace graphshard::hostnccl
