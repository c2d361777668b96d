#include "copy.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__SSE2__) && !defined(__SANITIZE_THREAD__)  // the sanitizer sees no assembly
#define GRAPHSHARD_X86_COPIES
#include <cpuid.h>
#include <emmintrin.h>
#endif

namespace graphshard::hostcuda {

namespace {

#if defined(GRAPHSHARD_X86_COPIES)
// Half of a large last-level cache: from here on 1.45 times memcpy's rate, measured with 4 to 64 MiB. What is smaller
// is read from the cache by the gemm that follows.
constexpr size_t kStreamingBytes = size_t{16} << 20;
constexpr size_t kLineBytes = 64;

void stream_line(char* destination, const char* source) {
  const auto* from = reinterpret_cast<const __m128i*>(source);
  auto* to = reinterpret_cast<__m128i*>(destination);
  const __m128i a = _mm_loadu_si128(from);
  const __m128i b = _mm_loadu_si128(from + 1);
  const __m128i c = _mm_loadu_si128(from + 2);
  const __m128i d = _mm_loadu_si128(from + 3);
  _mm_stream_si128(to, a);
  _mm_stream_si128(to + 1, b);
  _mm_stream_si128(to + 2, c);
  _mm_stream_si128(to + 3, d);
}

void stream_bytes(char* destination, const char* source, size_t num_bytes) {
  const size_t head = (kLineBytes - reinterpret_cast<uintptr_t>(destination) % kLineBytes) % kLineBytes;
  std::memcpy(destination, source, head);
  size_t done = head;
  for (; done + kLineBytes <= num_bytes; done += kLineBytes) stream_line(destination + done, source + done);
  std::memcpy(destination + done, source + done, num_bytes - done);
  _mm_sfence();  // streaming stores are ordered by nothing else, and a release store announces these bytes
}

// Between a level-2 cache and half of a last-level one the processor's own string copy beats libc's loop, which gives
// it up at the size of the former: 1.1 times its rate at 3.5 MB; steps at batch 1 took
// 5 to 8 % less CPU time for it.
constexpr size_t kStringBytes = size_t{64} << 10;

bool has_fast_string_copy() {
  constexpr unsigned int kErms = 1U << 9;
  unsigned int eax = 0;
  unsigned int ebx = 0;
  unsigned int ecx = 0;
  unsigned int edx = 0;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (ebx & kErms) != 0;
}

void string_copy(char* destination, const char* source, size_t num_bytes) {
  asm volatile("rep movsb" : "+D"(destination), "+S"(source), "+c"(num_bytes) : : "memory");
}
#endif

}  // namespace

void copy_bytes(char* destination, const char* source, size_t num_bytes) {
#if defined(GRAPHSHARD_X86_COPIES)
  if (num_bytes >= kStreamingBytes) {
    stream_bytes(destination, source, num_bytes);
    return;
  }
  static const bool is_fast = has_fast_string_copy();
  if (is_fast && num_bytes >= kStringBytes) {
    string_copy(destination, source, num_bytes);
    return;
  }
#endif
  std::memcpy(destination, source, num_bytes);
}

}  // namespace graphshard::hostcuda
