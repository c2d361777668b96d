"""Captured steps as on CUDA: their shared pool, what a closed one leaves, memory over hundreds of captures."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from census import no_growth
from cuda_rig import Rig, nth, open_rig, raiser

from graphshard.core.errors import DeviceError
from graphshard.runtime.cuda.compute import NUM_WARM_UPS

FIRST = "layers.0.s0"


@pytest.fixture
def rig() -> Iterator[Rig]:
    with open_rig() as rig:
        yield rig


def resident_mib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 20


def test_graphs_share_one_pool_while_one_of_them_lives() -> None:
    with open_rig(batch_sizes=(1, 2, 4)) as rig:
        steps = [rig.capture(shape) for shape in rig.shapes]
        assert [shape.batch_size for shape in rig.shapes] == [4, 2, 1]  # largest first: smaller ones fit in
        assert len(set(rig.torch_cuda.pools)) == 1
        for shape, step in zip(rig.shapes, steps, strict=True):
            assert rig.wrong_after(step.launch) == [], shape
        for step in steps[:2]:
            step.close()
        assert rig.wrong_after(steps[2].launch) == []
        rig.capture(rig.shapes[0])
        assert rig.torch_cuda.num_pools == 1
        rig.compute.close()
        rig.capture()
        assert rig.torch_cuda.num_pools == 2  # torch refuses to share a pool that went with its last graph


def test_a_failed_first_capture_keeps_its_pool(rig: Rig) -> None:
    rig.plot.before[FIRST] = nth(NUM_WARM_UPS + 1, raiser(RuntimeError("no")))
    with pytest.raises(DeviceError):
        rig.capture()
    rig.capture()
    assert rig.torch_cuda.num_pools == 1


def test_a_closed_step_refuses_and_closing_twice_is_nothing(rig: Rig) -> None:
    step = rig.capture()
    assert step.handle != 0
    step.close()
    step.close()
    assert step.is_closed
    for use in (step.launch, lambda: step.handle):
        with pytest.raises(DeviceError, match="captured step is closed"):
            use()
    assert rig.torch_cuda.log.count("reset") == 1


def test_memory_follows_the_graphs_that_live(rig: Rig) -> None:
    def counts() -> tuple[int, int]:
        rig.synchronize()
        rig.torch_cuda.kernels.clear()
        return rig.runtime.driver.num_retired, resident_mib()

    alive = [rig.capture() for _ in range(35)]
    for step in alive:
        assert rig.wrong_after(step.launch) == []
        step.close()
    del alive, step
    num_retired, mib = counts()
    with no_growth():
        for _ in range(20):
            for _ in range(10):
                step = rig.capture()
                step.launch()
                step.close()  # with its replay in flight
            assert counts()[0] == num_retired
        assert counts()[1] < mib + 4  # 200 graphs that stayed would take 40
