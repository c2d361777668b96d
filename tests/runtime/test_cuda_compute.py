"""Compute as on CUDA: segments enqueue kernels between the list's ops, eagerly or into one capture of somebody else's.

Kernels are host functions of the host driver here, see `fake_torch_cuda`; `tests/gpu` runs the same on a card.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch
from census import no_growth
from cuda_rig import TIMEOUT_S, Rig, nth, open_rig, raiser
from fault_tools import InThread, Latch

from graphshard._core import CaptureLock
from graphshard.core.errors import CommError, DeviceError, ProgramError, SpecError
from graphshard.core.specs import StepShape
from graphshard.runtime.cuda.compute import NUM_WARM_UPS, pieces_of

FIRST, LAST = "layers.0.s0", "layers.2.s2"


@pytest.fixture
def rig() -> Iterator[Rig]:
    with open_rig() as rig:
        yield rig


# --- the list and the kernels, eager and captured ---


def test_a_list_is_cut_at_its_compute_ops(rig: Rig) -> None:
    bound = rig.bound()
    pieces = pieces_of(bound)
    assert [op for _, _, op in pieces[:-1]] == list(bound.computes) and pieces[-1][2] is None
    issued = [index for begin, end, _ in pieces for index in range(begin, end)]
    left_out = set(range(len(bound.sources))) - set(issued)
    assert len(issued) + len(left_out) == len(bound.op_list) and len(left_out) == len(bound.computes)


@pytest.mark.parametrize("choices", [{"prefetch_depth": 0}, {"prefetch_depth": 1}, {"units": "weight", "num_slots": 3}])
def test_eager_steps_and_replays_see_the_right_bytes(choices: dict[str, object]) -> None:
    with open_rig(**choices) as rig:
        eager = lambda: rig.compute.issue(rig.shape, rig.bound())  # noqa: E731
        assert rig.wrong_after(eager) == []
        step = rig.capture()
        for act in (step.launch, step.launch, eager, step.launch, eager, eager, step.launch):
            assert rig.wrong_after(act) == []


def test_capture_runs_nothing_of_the_step_and_warms_up_before(rig: Rig) -> None:
    segments = len(rig.model.segments)
    rig.torch_cuda.log.clear()
    rig.plot.before[FIRST] = lambda: rig.torch_cuda.note("first segment")
    step = rig.capture()
    assert rig.torch_cuda.log == [
        *["first segment"] * NUM_WARM_UPS, "capture begins", "first segment", "capture ends", "instantiate",
    ]  # fmt: skip
    assert len(rig.plot.runs) == (NUM_WARM_UPS + 1) * segments
    rig.plot.runs.clear()
    assert rig.wrong_after(step.launch) == []
    assert rig.plot.runs == []  # Python is not run again


def test_warm_ups_are_made_where_the_capture_is(rig: Rig) -> None:
    """On one thread and one stream: torch keys GEMM workspaces by both, and must have this one before the capture."""
    places: list[tuple[int, int]] = []
    rig.plot.before[FIRST] = lambda: places.append((threading.get_ident(), rig.torch_cuda.current_stream()))
    InThread(rig.capture).result()
    rig.capture()
    first, second = places[: NUM_WARM_UPS + 1], places[NUM_WARM_UPS + 1 :]
    assert len(set(first)) == len(set(second)) == 1 and len(first) == len(second)
    assert first[0][0] != second[0][0] == threading.get_ident()
    assert first[0][1] == second[0][1] == rig.streams[0].handle


def test_warm_up_needs_no_gather(rig: Rig) -> None:  # it comes before the first collective
    primes = rig.runtime.num_primes
    rig.compute.warm_up(rig.shape, rig.bound().computes)
    assert rig.runtime.num_primes == primes and len(rig.plot.runs) == NUM_WARM_UPS * len(rig.model.segments)


@pytest.mark.parametrize("is_default", [False, True])
def test_a_replay_is_ordered_on_the_callers_current_stream(rig: Rig, is_default: bool) -> None:
    """What was enqueued there comes first, what is enqueued later sees the outputs; the host waits for nothing."""
    step, torch_cuda = rig.capture(), rig.torch_cuda
    stream = 0 if is_default else torch_cuda.new_stream()
    outputs = rig.runtime.buffers(rig.shape, "output")
    order: list[str] = []
    latch = Latch()
    for tensor in outputs.values():
        tensor.zero_()
    try:
        with torch_cuda.on_stream(stream):
            torch_cuda.kernel(lambda: order.append(f"before: {latch.word.wait(1, TIMEOUT_S)}"))
            step.launch()
            torch_cuda.kernel(lambda: order.append(f"after, wrong: {rig.model.wrong(outputs)}"))
        assert order == []
        assert any(rig.model.wrong(outputs))
    finally:
        latch.open()
    torch_cuda.synchronize(stream)
    assert order == ["before: True", "after, wrong: []"]


def test_steps_after_one_another_are_ordered_from_any_stream(rig: Rig) -> None:
    step, torch_cuda = rig.capture(), rig.torch_cuda
    for _ in range(20):
        for stream in (0, torch_cuda.new_stream()):
            with torch_cuda.on_stream(stream):
                step.launch()
    assert rig.wrong_after(step.launch) == []


# --- the capture's window ---


@pytest.mark.parametrize("is_enabled", [True, False])
@pytest.mark.parametrize("error", [None, RuntimeError("lost"), KeyboardInterrupt(), ProgramError("ours")])
def test_gc_is_off_in_the_window_and_then_as_it_was(rig: Rig, is_enabled: bool, error: BaseException | None) -> None:
    """After a capture that succeeds, and after one that fails."""
    if error is not None:
        rig.plot.before[LAST] = nth(NUM_WARM_UPS + 1, raiser(error))
    was_enabled = gc.isenabled()
    (gc.enable if is_enabled else gc.disable)()
    try:
        if error is None:
            rig.capture()
        else:
            with pytest.raises((type(error), DeviceError)):
                rig.capture()
        assert gc.isenabled() is is_enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
    assert rig.torch_cuda.gc_in_captures == [False]
    assert rig.torch_cuda.was_locked == [True]
    with CaptureLock(0.0):
        pass  # given back


def test_finalisers_of_garbage_run_outside_the_window(rig: Rig) -> None:
    class Old:
        """An old graph in a reference cycle, whose finaliser would make driver calls."""

    finalised: list[int] = []
    is_open: list[bool] = []

    def finalise() -> None:
        finalised.append(len(rig.torch_cuda.gc_in_captures))
        is_open.append(rig.torch_cuda.log[-1:] == ["capture begins"])

    def leave_garbage() -> None:
        old = Old()
        old.itself = old  # type: ignore[attr-defined]
        weakref.finalize(old, finalise)

    rig.plot.before[FIRST] = leave_garbage
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(50):
            rig.capture().close()
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert len(finalised) == 50 * (NUM_WARM_UPS + 1)
    assert not any(is_open)


def test_capture_waits_for_all_streams_first(rig: Rig) -> None:
    latch = Latch()
    prefetch = rig.streams[-1]
    prefetch.wait_value(latch.word.address, 1)  # stalled side work of an eager step
    rig.torch_cuda.log.clear()
    warm = threading.Event()
    rig.plot.before[LAST] = nth(NUM_WARM_UPS, warm.set)
    capture = InThread(rig.capture)
    try:
        assert warm.wait(TIMEOUT_S)
        assert rig.torch_cuda.log == []
    finally:
        latch.open()
    assert not capture.result().is_closed
    assert rig.torch_cuda.log[0] == "capture begins"


def test_a_stalled_stream_ends_the_capture_in_a_named_error(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    latch = Latch()
    rig.streams[-1].wait_value(latch.word.address, 1)
    monkeypatch.setattr(rig.compute, "_timeout_s", 0.2)
    try:
        with pytest.raises(CommError, match=r"before the capture of step shape 1x1 did not end within 0\.2 s"):
            rig.capture()
    finally:
        latch.open()
    assert "capture begins" not in rig.torch_cuda.log


def test_events_of_eager_steps_are_not_waited_for_inside(rig: Rig) -> None:
    for _ in range(3):
        rig.compute.issue(rig.shape, rig.bound())  # leaves every gate recorded
    step = rig.capture()
    assert rig.wrong_after(step.launch) == []


def test_captures_exclude_each_other_and_a_replay_may_run_beside_one(rig: Rig) -> None:
    step = rig.capture()
    in_capture, go_on = threading.Event(), threading.Event()

    def pause() -> None:
        in_capture.set()
        assert go_on.wait(TIMEOUT_S)

    with open_rig() as other:
        other.plot.before[FIRST] = nth(NUM_WARM_UPS + 1, pause)
        capture = InThread(other.capture)
        try:
            assert in_capture.wait(TIMEOUT_S)
            assert rig.wrong_after(step.launch) == []  # thread-local mode: this thread may do what it likes
            rig.compute._timeout_s = 0.1
            with pytest.raises(DeviceError, match="step shape 1x1 cannot be captured"):
                rig.capture()
        finally:
            go_on.set()
            rig.compute._timeout_s = TIMEOUT_S
        assert other.wrong_after(capture.result().launch) == []
    assert rig.wrong_after(rig.capture().launch) == []


# --- what no capture permits ---


@pytest.mark.parametrize("path", [FIRST, "layers.1.s0", LAST])
def test_a_failed_capture_leaves_nothing(rig: Rig, path: str) -> None:
    good = rig.capture()
    assert rig.wrong_after(good.launch) == []
    num_pools, num_retired = rig.torch_cuda.num_pools, rig.runtime.driver.num_retired
    with no_growth():
        for _ in range(5):
            rig.plot.before[path] = nth(NUM_WARM_UPS + 1, raiser(RuntimeError("operation not permitted")))
            with pytest.raises(DeviceError, match=rf"segment {path} cannot be captured: operation not") as caught:
                rig.capture()
            assert isinstance(caught.value.__cause__, RuntimeError)
            del caught
    assert rig.torch_cuda.current_stream() == 0
    assert rig.wrong_after(good.launch) == []
    assert rig.wrong_after(lambda: rig.compute.issue(rig.shape, rig.bound())) == []
    gc.collect()
    assert rig.torch_cuda.num_pools == num_pools
    assert rig.runtime.driver.num_retired <= num_retired  # other tests' may go meanwhile
    assert rig.wrong_after(rig.capture().launch) == []


def test_the_first_error_is_raised_not_the_lost_captures(rig: Rig) -> None:
    def spoil() -> None:
        rig.torch_cuda.calls("cuStreamSynchronize", rig.torch_cuda.stream(rig.torch_cuda.current_stream()))

    rig.plot.before[LAST] = nth(NUM_WARM_UPS + 1, spoil)
    with pytest.raises(DeviceError, match=rf"segment {LAST} cannot be captured: CUDA error 900 in cuStreamSynchronize"):
        rig.capture()
    assert rig.wrong_after(rig.capture().launch) == []


def test_a_segment_that_swallows_the_refusal_is_found_at_the_end(rig: Rig) -> None:
    def spoil() -> None:
        with pytest.raises(RuntimeError):
            rig.torch_cuda.calls("cuStreamSynchronize", rig.torch_cuda.stream(rig.torch_cuda.current_stream()))

    rig.plot.before["layers.2.s2"] = nth(NUM_WARM_UPS + 1, spoil)
    with pytest.raises(DeviceError, match=r"cannot be captured: .*CUDA error 901"):
        rig.capture()
    assert rig.wrong_after(rig.capture().launch) == []


def test_errors_of_eager_segments_are_their_own(rig: Rig) -> None:
    rig.plot.before[FIRST] = nth(1, raiser(RuntimeError("shapes do not fit")))
    with pytest.raises(RuntimeError, match=r"^shapes do not fit$"):
        rig.compute.issue(rig.shape, rig.bound())
    rig.synchronize()
    assert rig.wrong_after(lambda: rig.compute.issue(rig.shape, rig.bound())) == []


def test_work_on_the_default_stream_is_refused_with_the_ops_name(rig: Rig) -> None:
    def add_there() -> None:
        with rig.torch_cuda.on_stream(0):
            torch.zeros(2).add_(1)

    rig.plot.before[FIRST] = add_there
    with pytest.raises(DeviceError, match=rf"segment {FIRST} cannot be warmed up: aten\S+: .*runs on a default stream"):
        rig.capture()
    assert "capture begins" not in rig.torch_cuda.log


def test_a_swallowed_refusal_is_raised_all_the_same(rig: Rig) -> None:
    def add_there() -> None:
        with rig.torch_cuda.on_stream(0), pytest.raises(DeviceError):
            torch.zeros(2).add_(1)

    rig.plot.before[FIRST] = add_there
    with pytest.raises(DeviceError, match="runs on a default stream"):
        rig.capture()


def test_random_numbers_are_refused_before_the_capture(rig: Rig) -> None:
    rig.plot.before[LAST] = lambda: torch.rand(3)
    with pytest.raises(DeviceError, match=rf"segment {LAST} cannot be warmed up: aten.rand.default: .*random numbers"):
        rig.capture()


def test_a_segment_may_not_leave_another_stream_the_current_one(rig: Rig) -> None:
    other = rig.torch_cuda.new_stream()
    rig.plot.before[LAST] = lambda: rig.torch_cuda.set_stream(other)
    with pytest.raises(ProgramError, match=rf"segment {LAST} left stream {other:#x} the current one"):
        rig.compute.issue(rig.shape, rig.bound())
    assert rig.torch_cuda.current_stream() == 0


def test_unknown_shapes_are_the_callers_mistake(rig: Rig) -> None:
    with pytest.raises((KeyError, SpecError)):
        rig.compute.issue(StepShape(9), rig.bound())
