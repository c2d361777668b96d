// A 32-bit word that streams write and the host waits for.
#pragma once

#include <memory>

#include "runtime/memory.h"

namespace graphshard {

// Note [no event across a launch]: an event that a graph records on each launch still shows the previous launch's
// record until the node has run, so a host that waits for it may pass early. A word that the host clears before the
// launch, and that the graph writes, cannot be stale.
class Word {
 public:
  // The word at `offset` of `memory`, which the host must be able to read and write.
  Word(std::shared_ptr<Memory> memory, size_t offset);

  Driver& driver() const { return memory_->driver(); }
  CUdeviceptr address() const { return memory_->address() + offset_; }
  void store(uint32_t value);
  uint32_t load() const;
  // Until the word, as a signed difference, is >= `value`; false if `timeout_ns` passed first.
  bool wait(uint32_t value, int64_t timeout_ns) const;

 private:
  uint32_t* pointer() const { return reinterpret_cast<uint32_t*>(address()); }
  bool reached(uint32_t value) const { return static_cast<int32_t>(load() - value) >= 0; }

  std::shared_ptr<Memory> memory_;
  size_t offset_;
};

}  // namespace graphshard
