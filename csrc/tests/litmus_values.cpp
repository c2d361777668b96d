// Value writes and waits: comparison, order against payloads, batches.
#include <atomic>
#include <vector>

#include "litmus.h"

using namespace graphshard::litmus;

namespace {

struct Passage {
  std::atomic<bool> is_released{false};
  std::atomic<bool> was_released{true};  // when the stream went on
};

void go_on(void* opaque) {
  auto* passage = static_cast<Passage*>(opaque);
  passage->was_released.store(passage->is_released.load());
}

/// Hangs (and is ended by the test's limit) unless a wait passes while the word is `word`.
void expect_passes(uint32_t word, uint32_t value, unsigned int flags) {
  const Stream stream;
  const Latch latch;
  latch.set(word);
  OK(cu.stream_wait_value_32(stream, latch.address(), value, flags));
  OK(cu.stream_synchronize(stream));
}

/// Fails if the stream goes on while the word is `word`, before it is set to `release`.
void expect_stalls(uint32_t word, uint32_t value, unsigned int flags, uint32_t release) {
  const Stream stream;
  const Latch latch;
  Passage passage;
  latch.set(word);
  OK(cu.memset_8_async(latch.address() + 32, 1, 1, stream));
  OK(cu.stream_synchronize(stream));  // the stream is up and running
  OK(cu.stream_wait_value_32(stream, latch.address(), value, flags));
  OK(cu.launch_host_func(stream, go_on, &passage));
  for (int i = 0; i < 500; ++i) EXPECT(CUDA_ERROR_NOT_READY, cu.stream_query(stream));
  passage.is_released.store(true);
  latch.set(release);
  OK(cu.stream_synchronize(stream));
  TRUE(passage.was_released.load());
}

}  // namespace

// Greater-or-equal is a signed difference, so sequence numbers may wrap.
LITMUS(a_wait_compares_by_signed_difference) {
  expect_passes(5, 5, CU_STREAM_WAIT_VALUE_GEQ);
  expect_passes(6, 5, CU_STREAM_WAIT_VALUE_GEQ);
  expect_stalls(4, 5, CU_STREAM_WAIT_VALUE_GEQ, 5);
  expect_passes(3, 0xFFFFFFF0U, CU_STREAM_WAIT_VALUE_GEQ);
  expect_stalls(0xFFFFFFF0U, 3, CU_STREAM_WAIT_VALUE_GEQ, 3);
}

LITMUS(a_wait_compares_by_equality_and_mask) {
  expect_passes(5, 5, CU_STREAM_WAIT_VALUE_EQ);
  expect_stalls(6, 5, CU_STREAM_WAIT_VALUE_EQ, 5);
  expect_passes(6, 4, CU_STREAM_WAIT_VALUE_AND);
  expect_stalls(3, 4, CU_STREAM_WAIT_VALUE_AND, 7);
}

// A plain store by the host wakes nobody, and must still be seen.
LITMUS(a_plain_store_ends_a_wait) {
  const Stream stream;
  const Latch latch;
  const Pinned bytes(64);
  latch.stall(stream, 3);
  OK(cu.memset_8_async(bytes.address(), 1, 64, stream));
  latch.set(2);
  EXPECT(CUDA_ERROR_NOT_READY, cu.stream_query(stream));
  latch.set(3);
  OK(cu.stream_synchronize(stream));
  TRUE(bytes.is_all(1));
}

LITMUS(a_write_is_seen_after_what_precedes_it) {
  const Stream writing;
  const Stream waiting;
  const Latch start;
  const Latch flag;
  const Pinned payload(4096);
  const Pinned seen(4096);
  OK(cu.stream_wait_value_32(waiting, flag.address(), 1, CU_STREAM_WAIT_VALUE_GEQ));
  OK(cu.memcpy_async(seen.address(), payload.address(), 4096, waiting));
  start.stall(writing);
  OK(cu.memset_8_async(payload.address(), 0x5A, 4096, writing));
  OK(cu.stream_write_value_32(writing, flag.address(), 1, CU_STREAM_WRITE_VALUE_DEFAULT));
  EXPECT(CUDA_ERROR_NOT_READY, cu.stream_query(waiting));
  start.set(1);
  OK(cu.stream_synchronize(waiting));
  TRUE(seen.is_all(0x5A));
  OK(cu.stream_synchronize(writing));
  EQUAL(1, flag.value());
}

LITMUS(words_of_64_bits_are_compared_whole) {
  const Stream waiting;
  const Stream writing;
  const Pinned word(64);
  const uint64_t large = uint64_t{1} << 40;
  OK(cu.stream_wait_value_64(waiting, word.address(), large, CU_STREAM_WAIT_VALUE_GEQ));
  EXPECT(CUDA_ERROR_NOT_READY, cu.stream_query(waiting));
  OK(cu.stream_write_value_64(writing, word.address(), large + 1, CU_STREAM_WRITE_VALUE_DEFAULT));
  OK(cu.stream_synchronize(writing));
  OK(cu.stream_synchronize(waiting));
}

LITMUS(a_batch_runs_in_its_order) {
  const Stream stream;
  const Latch latch;
  const Latch first;
  const Latch second;
  std::vector<CUstreamBatchMemOpParams> ops(3);
  ops[0].writeValue = {CU_STREAM_MEM_OP_WRITE_VALUE_32, first.address(), {7}, CU_STREAM_WRITE_VALUE_DEFAULT, 0};
  ops[1].waitValue = {CU_STREAM_MEM_OP_WAIT_VALUE_32, latch.address(), {1}, CU_STREAM_WAIT_VALUE_GEQ, 0};
  ops[2].writeValue = {CU_STREAM_MEM_OP_WRITE_VALUE_32, second.address(), {8}, CU_STREAM_WRITE_VALUE_DEFAULT, 0};
  OK(cu.stream_batch_mem_op(stream, 3, ops.data(), 0));
  EXPECT(CUDA_ERROR_NOT_READY, cu.stream_query(stream));
  EQUAL(0, second.value());
  latch.set(1);
  OK(cu.stream_synchronize(stream));
  EQUAL(7, first.value());
  EQUAL(8, second.value());
}

LITMUS(a_misaligned_word_is_refused) {
  const Stream stream;
  const Pinned bytes(64);
  EXPECT(CUDA_ERROR_INVALID_VALUE,
         cu.stream_write_value_32(stream, bytes.address(2), 1, CU_STREAM_WRITE_VALUE_DEFAULT));
  EXPECT(CUDA_ERROR_INVALID_VALUE, cu.stream_wait_value_32(stream, bytes.address(1), 1, CU_STREAM_WAIT_VALUE_GEQ));
  OK(cu.stream_synchronize(stream));
}
