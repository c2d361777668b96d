#include "runtime/flags.h"

#include <stdexcept>
#include <string>

namespace graphshard {

namespace {

constexpr uint32_t kCapturedValue = 1;

CUstreamBatchMemOpParams write_op(CUdeviceptr address, uint32_t value) {
  CUstreamBatchMemOpParams op{};
  op.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
  op.writeValue.address = address;
  op.writeValue.value = value;
  op.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
  return op;
}

CUstreamBatchMemOpParams wait_op(CUdeviceptr address, uint32_t value, unsigned int condition) {
  CUstreamBatchMemOpParams op{};
  op.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
  op.waitValue.address = address;
  op.waitValue.value = value;
  op.waitValue.flags = condition;
  return op;
}

uint32_t flag_value(FlagMode mode, uint32_t sequence) { return mode == FlagMode::kEager ? sequence : kCapturedValue; }

unsigned int condition_of(FlagMode mode) {
  return mode == FlagMode::kEager ? CU_STREAM_WAIT_VALUE_GEQ : CU_STREAM_WAIT_VALUE_EQ;
}

}  // namespace

FlagBarrier::FlagBarrier(std::vector<CUdeviceptr> areas, int rank) : areas_(std::move(areas)), rank_(rank) {
  if (rank < 0 || rank >= world_size()) {
    throw std::invalid_argument("rank " + std::to_string(rank) + " is none of " + std::to_string(areas_.size()));
  }
}

CUdeviceptr FlagBarrier::address(int owner, int writer, FlagWord word) const {
  return areas_[static_cast<size_t>(owner)] + kFlagCellBytes * static_cast<size_t>(writer) +
         sizeof(uint32_t) * static_cast<size_t>(word);
}

std::vector<int> FlagBarrier::peers() const {
  std::vector<int> peers;
  for (int step = 1; step < world_size(); ++step) peers.push_back((rank_ + step) % world_size());
  return peers;
}

void FlagBarrier::add_resets(FlagWord word, std::vector<CUstreamBatchMemOpParams>* ops) const {
  for (int peer : peers()) ops->push_back(write_op(address(rank_, peer, word), 0));
}

FlagOps FlagBarrier::entry(FlagMode mode, uint32_t sequence, uint32_t header) const {
  const uint32_t value = flag_value(mode, sequence);
  FlagOps ops;
  // What this rank waits for is known to its own host before any peer can see that it waits.
  if (mode == FlagMode::kCaptured) ops.writes.push_back(write_op(address(rank_, rank_, FlagWord::kBusyCaptured), 1));
  ops.writes.push_back(write_op(address(rank_, rank_, header_word(mode)), header));
  ops.writes.push_back(write_op(address(rank_, rank_, entry_word(mode)), value));
  for (int peer : peers()) {
    ops.writes.push_back(write_op(address(peer, rank_, header_word(mode)), header));
    ops.writes.push_back(write_op(address(peer, rank_, entry_word(mode)), value));
  }
  for (int peer : peers()) {
    ops.waits.push_back(wait_op(address(rank_, peer, entry_word(mode)), value, condition_of(mode)));
    ops.waits.push_back(wait_op(address(rank_, peer, header_word(mode)), header, CU_STREAM_WAIT_VALUE_EQ));
  }
  if (mode == FlagMode::kCaptured) add_resets(entry_word(mode), &ops.waits);
  if (mode == FlagMode::kEager) ops.waits.push_back(write_op(address(rank_, rank_, FlagWord::kEnteredEager), sequence));
  ops.waits.push_back(write_op(address(rank_, rank_, entry_word(mode)), 0));
  return ops;
}

FlagOps FlagBarrier::exit(FlagMode mode, uint32_t sequence) const {
  const uint32_t value = flag_value(mode, sequence);
  FlagOps ops;
  for (int peer : peers()) ops.writes.push_back(write_op(address(peer, rank_, exit_word(mode)), value));
  for (int peer : peers()) {
    ops.waits.push_back(wait_op(address(rank_, peer, exit_word(mode)), value, condition_of(mode)));
  }
  if (mode == FlagMode::kCaptured) {
    add_resets(exit_word(mode), &ops.waits);
    ops.waits.push_back(write_op(address(rank_, rank_, FlagWord::kBusyCaptured), 0));
  }
  return ops;
}

}  // namespace graphshard
