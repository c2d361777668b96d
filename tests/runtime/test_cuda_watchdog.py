"""Steps that the host does not wait for, under nccl: who is stuck, dead or elsewhere is found with nobody waiting.

The CUDA device is played, see `test_cuda_runtime`.
"""

from __future__ import annotations

import gc
import logging
import threading
import weakref

import pytest
from cuda_rig import TIMEOUT_S, Rank
from fault_tools import Latch, until
from ranks import run_on_ranks

from graphshard.comm.group import Group
from graphshard.core.errors import CommError, ProgramError
from graphshard.core.specs import StepShape

LIMIT_S = 2.0
THREAD = "graphshard-watchdog"


def num_threads() -> int:
    return sum(thread.name == THREAD for thread in threading.enumerate())


class Logged(logging.Handler):
    """What was logged as `graphshard`."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []
        logging.getLogger("graphshard").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def stuck(group: Group, stalled: int, progress: bool) -> dict[str, object]:
    """Rank `stalled`'s replay stands still at its first gather, and no rank waits for anything.

    Its process must end: a captured gather that waits is not to be had back.
    """
    latch, logged = Latch(), Logged()
    rank = Rank(
        group,
        transport="nccl",
        timeout_s=LIMIT_S,
        progress=progress,
        stalls=latch.stalls(0) if group.rank == stalled else {},
    )
    with rank.runtime as runtime:
        graph = runtime.graph(1)
        group.barrier("captured")
        graph.replay()
        until(lambda: runtime._alignment.broken is not None, "the watchdog has found it")
        with pytest.raises(CommError) as caught:
            graph.synchronize()
        refused = []
        for call in (graph.replay, lambda: runtime.run(1), runtime.capture, lambda: runtime.prefetch(1)):
            with pytest.raises(CommError) as again:
                call()
            refused.append(str(again.value))
        group.barrier("all were told")
        latch.open()
    return {"error": str(caught.value), "refused": refused, "log": logged.lines, "threads": num_threads()}


@pytest.mark.parametrize("progress", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_stuck_replay_is_found_while_nobody_waits(progress: bool) -> None:
    told = run_on_ranks(stuck, 2, 1, progress, mode="processes")
    errors = {rank["error"] for rank in told}
    assert len(errors) == 1, "one failure is everybody's"
    error = errors.pop()
    assert f"waited {LIMIT_S:.1f} s for " in error and "step 1" in error
    for rank in told:
        assert all("is refused: rank" in text and error in text for text in rank["refused"])
        assert rank["log"] == [error]
        assert rank["threads"] == 0


def other_step(group: Group) -> str:
    """Rank 1 does not replay; it closes. Rank 0 learns of it without waiting."""
    rank = Rank(group, transport="nccl", timeout_s=TIMEOUT_S)
    with rank.runtime as runtime:
        graph = runtime.graph(1)
        group.barrier("captured")
        if group.rank == 1:
            return ""
        graph.replay()
        until(lambda: runtime._alignment.broken is not None, "the watchdog has found it")
        with pytest.raises(CommError) as caught:
            graph.replay()
        return str(caught.value)


@pytest.mark.slow
def test_a_peer_that_closed_is_found_at_once() -> None:
    assert "rank 1 (pid" in (text := run_on_ranks(other_step, 2, mode="processes")[0])
    assert "closed its runtime while rank 0 waited for step 1" in text


def captures(group: Group) -> tuple[list[str], int, int]:
    """100 captures, and replays that the host waits for and does not, with a look every millisecond."""
    rank = Rank(group, transport="nccl", look_s=0.001)
    shape = StepShape(1)
    with rank.runtime as runtime:
        wrong = []
        for number in range(100):
            runtime.graph(1).close()
            runtime.capture([shape])
            runtime.graph(1).replay()
            if number % 10 == 0:
                wrong += rank.wrong_after(runtime.graph(1).replay)
        runtime.synchronize()
        assert runtime._watchdog is not None
        seen = runtime._watchdog.num_looks
        until(lambda: runtime._watchdog.num_looks > seen, "it looks on")  # type: ignore[union-attr]
        assert runtime._alignment.broken is None
        return wrong, runtime.num_steps, len(rank.torch_cuda.pools)


def test_looks_disturb_no_capture() -> None:
    assert run_on_ranks(captures, 2) == [([], 110, 101)] * 2


def test_a_capture_of_the_strictest_mode_survives_looks() -> None:
    """A capture of the caller's own, global mode, on this thread, while another thread looks."""

    def look_on(group: Group) -> bool:
        rank = Rank(group, transport="nccl", look_s=0.001)
        with rank.runtime as runtime:
            runtime.graph(1).replay()
            watchdog = runtime._watchdog
            assert watchdog is not None
            group.barrier("replayed")
            if group.rank == 0:
                with rank.torch_cuda.strict_capture():
                    seen = watchdog.num_looks
                    until(lambda: watchdog.num_looks > seen + 20, "it has looked")
            group.barrier("captured")
            runtime.synchronize()
            return runtime._alignment.broken is None

    assert run_on_ranks(look_on, 2) == [True, True]


def paused(group: Group) -> bool:
    """A step stands still, and time passes in which nobody could look: a process that is stopped, a long capture."""
    latch = Latch()
    rank = Rank(group, transport="nccl", timeout_s=LIMIT_S, stalls=latch.stalls(0), look_s=0.001)
    with rank.runtime as runtime:
        group.barrier("captured")
        runtime.graph(1).replay()
        watchdog = runtime._watchdog
        assert watchdog is not None
        seen = watchdog.num_looks
        until(lambda: watchdog.num_looks > seen + 2, "it has looked at the step")
        watchdog._watch._looked_s -= 100 * LIMIT_S  # as if the last look had been long ago
        seen = watchdog.num_looks
        until(lambda: watchdog.num_looks > seen + 2, "it has looked again")
        group.barrier("looked")
        latch.open()
        runtime.synchronize()
        return runtime._alignment.broken is None


def test_a_pause_is_no_time_that_a_peer_was_waited_for() -> None:
    assert run_on_ranks(paused, 2) == [True, True]


def test_only_steps_that_need_peers_are_watched() -> None:
    def watched(group: Group) -> int:
        rank = Rank(group)
        with rank.runtime as runtime:
            runtime.graph(1).replay()
            runtime.synchronize()
            wrong = rank.model.wrong(runtime.buffers(StepShape(1), "output"))
            assert runtime._watchdog is None
        with pytest.raises(ProgramError, match="is closed"):
            runtime.synchronize()
        return len(wrong)

    assert run_on_ranks(watched, 2) == [0, 0]


def test_synchronize_is_bounded_and_may_be_asked_again() -> None:
    def late(group: Group) -> int:
        latch = Latch()
        rank = Rank(group, stalls=latch.stalls(0), timeout_s=0.5)
        with rank.runtime as runtime:
            graph = runtime.graph(1)
            graph.replay()
            with pytest.raises(CommError, match=r"rank 0 waited 0\.5 s for step 1 of shape 1x1 \(graph\)"):
                graph.synchronize()
            latch.open()
            graph.synchronize()
            return len(rank.model.wrong(graph.outputs))

    assert run_on_ranks(late, 1) == [0]


def test_a_dropped_runtime_is_watched_no_more() -> None:
    def drop(group: Group) -> None:
        rank = Rank(group, transport="nccl")
        rank.runtime.graph(1).replay()
        rank.runtime.synchronize()
        group.barrier("stepped")
        gone = weakref.ref(rank.runtime)
        del rank
        gc.collect()
        until(lambda: gone() is None, "the runtime is gone")

    run_on_ranks(drop, 1)
    until(lambda: num_threads() == 0, "its thread has ended")


_left: list[Rank] = []


def left_open(group: Group) -> int:
    """The process ends with its runtime open, and the watchdog on watch."""
    rank = Rank(group, transport="nccl", look_s=0.001)
    rank.runtime.graph(1).replay()
    rank.runtime.synchronize()
    group.barrier("stepped")
    _left.append(rank)
    return num_threads()


def test_a_process_ends_with_the_watchdog_on_watch() -> None:
    assert run_on_ranks(left_open, 2, mode="processes") == [1, 1]
