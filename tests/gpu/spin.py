"""A kernel that takes every warp slot of every SM and keeps it until the host says so, for as long as it is allowed."""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any

from graphshard._core import Driver, Memory

BLOCK_THREADS = 512
"""Divides the 1024, 1536 or 2048 threads that an SM of any generation holds."""
_MAX_SMS = 1024
SOURCE = r"""
extern "C" __global__ void __launch_bounds__(512, 4)
spin(volatile unsigned* release, unsigned* arrived, unsigned* late, unsigned* blocks_by_sm, unsigned long long max_ns) {
  if (threadIdx.x == 0) {
    unsigned sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    atomicAdd_system(blocks_by_sm + sm, 1u);
    __threadfence_system();
    atomicAdd_system(arrived, 1u);
  }
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    if (now - begin > max_ns) {
      *late = 1;
      return;
    }
  } while (*release == 0);
}
extern "C" __global__ void touch(unsigned* word) { *word = 1; }
"""


class Spin:
    """The kernel on a stream of its own. A context manager: leaving it lets the kernel end, and waits, bounded.

    Words in pinned host memory: release, arrived, late, touched, then how many blocks came to each SM.
    """

    def __init__(self, driver: Driver, cupy: ModuleType | Any, index: int, max_s: float) -> None:
        self._cupy, self.max_s = cupy, max_s
        device = cupy.cuda.Device(index)
        device.use()
        self.num_sms: int = device.attributes["MultiProcessorCount"]
        threads: int = device.attributes["MaxThreadsPerMultiProcessor"]
        assert threads % BLOCK_THREADS == 0 and self.num_sms <= _MAX_SMS, (threads, self.num_sms)
        self.blocks_per_sm = threads // BLOCK_THREADS
        self._memory = Memory.allocate_host(driver, 4 * (4 + _MAX_SMS))
        self._words = memoryview(self._memory).cast("I")
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._other = cupy.cuda.Stream(non_blocking=True)
        module = cupy.RawModule(code=SOURCE, options=("--std=c++14",))
        self._spin, self._touch = module.get_function("spin"), module.get_function("touch")
        self._warm_up()

    def start(self) -> None:
        """Launch it, and return when all of its blocks are on SMs at the same time; AssertionError if they are not."""
        self._clear(release=0)
        self._launch()
        wanted = self.num_sms * self.blocks_per_sm
        deadline = time.monotonic() + self.max_s
        while self._words[1] < wanted and time.monotonic() < deadline:
            time.sleep(0.001)
        by_sm = [count for count in self._words[4:] if count]
        assert self._words[1] == wanted, f"{self._words[1]} of {wanted} blocks came to an SM"
        assert by_sm == [self.blocks_per_sm] * self.num_sms, f"blocks by SM: {by_sm}"
        assert self.is_running

    def start_another_kernel(self) -> None:
        """Launch one thread on another stream: it needs a warp slot, and there is none."""
        self._touch((1,), (1,), (self._address(3),), stream=self._other)

    @property
    def is_running(self) -> bool:
        """Whether it still holds all SMs: it was not let go, and its time is not over."""
        return not self._stream.done and self._words[2] == 0

    @property
    def other_kernel_is_done(self) -> bool:
        """Whether the one-thread kernel has run."""
        return bool(self._words[3])

    def __enter__(self) -> Spin:
        return self

    def __exit__(self, *error: object) -> None:
        self._words[0] = 1
        self._stream.synchronize()  # bounded: the kernel ends by itself after max_s
        self._other.synchronize()

    def _warm_up(self) -> None:
        """Load both kernels now: the first launch of one may wait for the device."""
        self._clear(release=1)
        self._launch()
        self.start_another_kernel()
        self._stream.synchronize()
        self._other.synchronize()
        assert self._words[3] == 1

    def _clear(self, release: int) -> None:
        self._words[:] = memoryview(bytearray(self._words.nbytes)).cast("I")
        self._words[0] = release

    def _launch(self) -> None:
        arguments = (*(self._address(word) for word in (0, 1, 2, 4)), self._cupy.uint64(int(self.max_s * 1e9)))
        self._spin((self.num_sms * self.blocks_per_sm,), (BLOCK_THREADS,), arguments, stream=self._stream)

    def _address(self, word: int) -> Any:
        return self._cupy.uint64(self._memory.address + 4 * word)
