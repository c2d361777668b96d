"""What a gemm loses while copies run beside it: engines that need no SM still share memory and power with it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from graphshard._core import Calls, GraphExec, OpList, Stream
from graphshard.bench.stats import summarize
from graphshard.core.errors import CommError
from graphshard.gpu_check.recorder import Row
from graphshard.gpu_check.setup import TIMEOUT_S, Setup

NUM_GEMMS = 10
NUM_SAMPLES = 4
MAX_LAUNCHES = 400
NUM_PASSES = 4
"""Over the same memory, in one launch: few launches keep the copies going while gemms run."""


def check_slow_down(row: Row, setup: Setup, is_pinned: bool) -> None:
    """A large gemm in bfloat16 alone, then beside copies that outlast it."""
    reason = setup.why_no_pinned_windows() if is_pinned else None
    if reason is not None:
        row.skip(reason)
    n = setup.pick(8192, 256)
    a, b = (torch.randn(n, n, device=setup.torch_device(), dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)

    def gemms() -> None:
        for _ in range(NUM_GEMMS):
            torch.mm(a, b, out=out)

    copies = _Copies(setup, is_pinned)
    alone_us = _gemm_us(setup, gemms)
    copies_alone_us = copies.alone_us()
    launches = min(MAX_LAUNCHES, 2 + int(3 * NUM_SAMPLES * NUM_GEMMS * alone_us / copies_alone_us))
    copies.launch(launches)
    beside_us = _gemm_us(setup, gemms)
    outlasted = not copies.stream.is_idle()
    copies.wait()
    tflops = 2 * n**3 / 1e6
    row.add(
        gemm=[n, n, n],
        alone_us=alone_us,
        alone_tflops=tflops / alone_us,
        beside_us=beside_us,
        beside_tflops=tflops / beside_us,
        slow_down=beside_us / alone_us,
        copies_GBps_alone=copies.num_bytes / copies_alone_us / 1e3,
        copies_outlasted_gemms=outlasted,
    )
    row.require(outlasted or not setup.is_card, "the copies ended before the gemms: the slow-down is of a part only")


def _gemm_us(setup: Setup, gemms: Callable[[], None]) -> float:
    gemms()
    setup.synchronize()
    samples = []
    for _ in range(NUM_SAMPLES):
        begin = time.perf_counter()
        gemms()
        setup.synchronize()
        samples.append((time.perf_counter() - begin) * 1e6 / NUM_GEMMS)
    return summarize(samples).median


class _Copies:
    """A captured list of copies, as gathers make them, on a stream of its own."""

    def __init__(self, setup: Setup, is_pinned: bool) -> None:
        device = setup.device(pinned_windows=is_pinned)
        piece, count = setup.pick((64 << 20, 16), (1 << 20, 4))
        self.num_bytes = piece * count * NUM_PASSES
        source = device.allocate(piece * count, exportable=True)
        destination = device.allocate(piece * count)
        self.stream = Stream(device.driver)
        one_pass = [(destination.address + at, source.address + at, piece) for at in range(0, piece * count, piece)]
        ops = [("copy", 0, *copy) for copy in NUM_PASSES * one_pass]
        self._launcher: GraphExec = OpList(device.driver, [self.stream], 0, ops).capture(Calls([])).instantiate()

    def launch(self, count: int) -> None:
        """Enqueue all copies `count` times."""
        for _ in range(count):
            self._launcher.launch(self.stream)

    def wait(self) -> None:
        """Until the copies are done."""
        if not self.stream.synchronize(TIMEOUT_S):
            raise CommError(f"copies did not end within {TIMEOUT_S:.0f} s")

    def alone_us(self) -> float:
        """One launch, with nothing beside it."""
        self.launch(1)
        self.wait()
        begin = time.perf_counter()
        self.launch(4)
        self.wait()
        return (time.perf_counter() - begin) * 1e6 / 4
