"""Ranks that are elsewhere when an update comes: behind, idle, absent, slow, in a step, or given other bytes."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from byte_model import ByteModel
from byte_steps import compile_bytes
from fault_tools import InThread, Latch, gemms_of, until
from ranks import run_on_ranks
from torch import Tensor
from update_programs import LAYERS, Stage, fail, in_a_loop, raised, try_update, updating, version_of, version_seen

from graphshard.comm.group import Group
from graphshard.core.errors import CommError
from graphshard.core.specs import StepShape
from graphshard.runtime.bind import Hooks
from graphshard.runtime.runtime import Runtime

LIMIT_S = 60.0
HEADS = ("inside", "outside", "tail")


class Meeting:
    """What ranks that are threads tell each other: events by name."""

    def __init__(self) -> None:
        self._events: dict[str, threading.Event] = {}
        self._lock = threading.Lock()

    def _event(self, name: str) -> threading.Event:
        with self._lock:
            return self._events.setdefault(name, threading.Event())

    def tell(self, name: str) -> None:
        self._event(name).set()

    def wait(self, name: str) -> None:
        assert self._event(name).wait(LIMIT_S), f"nobody told {name!r}"


def stalled(group: Group, model: ByteModel, latch: Latch, **choices: Any) -> tuple[Runtime, Stage]:
    """A runtime whose steps wait in their first compute op until `latch` is open."""
    stage = Stage()
    with compile_bytes(group, model, units="layer", prefetch_depth=1, capture_sizes=[], **choices) as plain:
        first = gemms_of(plain.programs[StepShape(1)])[0]
    hooks = Hooks(poison=True, update=stage, stalls=latch.stalls(first))
    return compile_bytes(group, model, units="layer", prefetch_depth=1, hooks=hooks, **choices), stage


@pytest.mark.parametrize("head", HEADS)
def test_a_rank_three_steps_behind(head: str) -> None:
    """It is still in the step in which it was when the others began to update: that step sees the old version."""
    meeting = Meeting()

    def go(group: Group) -> list[int]:
        model, latch = ByteModel(LAYERS), Latch(is_open=True)
        runtime, stage = stalled(group, model, latch, head=head)
        with runtime:
            seen = []
            if group.rank == 1:
                latch.close()
                step = InThread(lambda: version_seen(runtime, model, runtime.graph(1).replay, (0, 1)))
                until(lambda: runtime._control.mine.state == 1 and not runtime._streams["compute"].is_idle(), "it runs")
                meeting.tell("rank 1 is in a step")
                meeting.wait("rank 0 updates")
                update = InThread(lambda: runtime.update(model.tensors(1)))
                meeting.wait("rank 0 has staged")
                latch.open()
                seen.append(step.result())
                update.result()
            else:
                meeting.wait("rank 1 is in a step")
                seen += [version_seen(runtime, model, runtime.graph(1).replay, (0, 1)) for _ in range(3)]
                meeting.tell("rank 0 updates")
                stage.arm("staged", lambda: meeting.tell("rank 0 has staged"))
                runtime.update(model.tensors(1))
            return [*seen, version_of(runtime, model, (0, 1))]

    assert run_on_ranks(go, 2) == [[0, 0, 0, 1], [0, 1]]


def test_an_idle_rank_takes_part_and_steps_later(transport: str) -> None:
    """A rank that has stepped never, under nccl: as often as the others, which is never."""

    def go(group: Group) -> list[int]:
        model = ByteModel(LAYERS)
        runtime, _ = updating(group, model, transport=transport, head="tail")
        with runtime:
            if transport == "pull" and group.rank != 2:
                assert version_of(runtime, model, (0, 1)) == 0
            runtime.update(model.tensors(1))
            return [runtime.epoch, version_of(runtime, model, (0, 1))]

    assert run_on_ranks(go, 3) == [[2, 1]] * 3


def test_a_rank_that_does_not_come(transport: str) -> None:
    """The others are told within their limit and keep the old weights; the next update that all come to ends well."""
    meeting = Meeting()

    def go(group: Group) -> list[Any]:
        model = ByteModel(LAYERS)
        runtime, _ = updating(group, model, transport=transport)
        limit_s, said = group.timeout_s, ""
        with runtime:
            if group.rank == 0:
                group.timeout_s = 0.2
                said = raised(lambda: runtime.update(model.tensors(1)))
                group.timeout_s = limit_s
                meeting.tell("rank 0 gave up")
            meeting.wait("rank 0 gave up")
            seen = [runtime.epoch, version_of(runtime, model, (0, 1))]
            if group.rank == 1:  # comes to what rank 0 has given up
                assert "rank 0 gave up" in raised(lambda: runtime.update(model.tensors(1)))
            runtime.update(model.tensors(1))
            return [said, *seen, runtime.epoch, version_of(runtime, model, (0, 1))]

    (said, *first), (_, *second) = run_on_ranks(go, 2)
    assert "rank 0 waited 0.2 s in update: staging" in said and "rank 1 (a thread) did not arrive" in said, said
    assert first == second == [0, 0, 2, 1]


@pytest.mark.parametrize("head", HEADS)
def test_a_slow_writer_while_others_replay_at_once(head: str) -> None:
    """Replays and a prefetch that rank 0 issues while rank 1 writes come after the update: they see the new version."""
    meeting = Meeting()

    def go(group: Group) -> list[int]:
        model = ByteModel(LAYERS)
        runtime, stage = updating(group, model, head=head)
        with runtime:
            runtime.prefetch(1)  # what it brings is never used
            if group.rank == 1:
                stage.arm("writing", lambda: meeting.wait("rank 0 has asked"))
                runtime.update(model.tensors(1))
                return [version_of(runtime, model, (0, 1))]
            update = InThread(lambda: runtime.update(model.tensors(1)))
            until(lambda: runtime.epoch == 1, "the update has stopped steps")

            def ask() -> int:
                meeting.tell("rank 0 has asked")
                runtime.prefetch(1)
                return version_seen(runtime, model, runtime.graph(1).replay, (0, 1))

            seen = [InThread(ask).result()]
            update.result()
            return [*seen, version_of(runtime, model, (0, 1))]

    assert run_on_ranks(go, 2) == [[1, 1], [1]]


def test_steps_go_on_while_tensors_come(transport: str) -> None:
    """Between two tensors of the iterator all ranks step: they see the old version."""

    def go(group: Group) -> list[int]:
        model = ByteModel(LAYERS)
        runtime, _ = updating(group, model, transport=transport, head="tail")
        seen: list[int] = []

        def coming() -> Iterator[tuple[str, Tensor]]:
            for item in model.tensors(1).items():
                seen.append(version_of(runtime, model, (0, 1)))
                yield item

        with runtime:
            runtime.update(coming())
            return [*seen, version_of(runtime, model, (0, 1))]

    assert run_on_ranks(go, 2) == [[0] * 5 + [1]] * 2


def test_an_open_loop_of_another_thread_ends_first() -> None:
    """Its layers see the old version to the end, though the update has begun."""

    def go(group: Group) -> list[int]:
        model = ByteModel(LAYERS)
        runtime, stage = updating(group, model)
        begun, staged = threading.Event(), threading.Event()

        def loop() -> int:
            def act() -> None:
                with runtime.begin_step(1) as step:
                    begun.set()
                    assert staged.wait(LIMIT_S)
                    for call in step.calls:
                        step.before_layer(call.layer)
                        step.state.run(model.segments[call.begin : call.end])
                        step.after_layer(call.layer)

            return version_seen(runtime, model, act, (0, 1))

        with runtime:
            stepping = InThread(loop)
            assert begun.wait(LIMIT_S)
            stage.arm("staged", staged.set)
            runtime.update(model.tensors(1))
            return [stepping.result(), version_seen(runtime, model, lambda: in_a_loop(runtime, model), (0, 1))]

    assert run_on_ranks(go, 2) == [[0, 1]] * 2


def test_a_thread_with_a_step_open_cannot_update() -> None:
    """All ranks are told, and the step goes on."""

    def go(group: Group) -> list[Any]:
        model = ByteModel(LAYERS)
        runtime, _ = updating(group, model)
        with runtime:
            if group.rank == 1:
                step = runtime.begin_step(1)
                said = raised(lambda: runtime.update(model.tensors(1)))
                assert step.is_open
                step.abort()
            else:
                said = raised(lambda: runtime.update(model.tensors(1)))
            return [said, runtime.epoch, version_of(runtime, model, (0, 1))]

    first, second = run_on_ranks(go, 2)
    assert first == second
    assert "update: stopping failed on rank 1: a step of this thread is open" in first[0]
    assert "nothing was written: the weights of epoch 0 stay" in first[0] and first[1:] == [0, 0]


@pytest.mark.parametrize("what", ["another byte", "a tensor less", "another choice", "an error"])
def test_ranks_that_are_given_unlike_tensors(what: str, transport: str) -> None:
    """The tensor and the ranks are named, on all ranks alike; the old weights stay."""
    words = {
        "another byte": "tensor bytes.1.w0 is not the same on all ranks: its checksum is ",
        "a tensor less": "update: staging failed on rank 1: 1 tensor of the tensors given does not fit:",
        "another choice": "4 weights (bytes.0.w1, bytes.1.w0, bytes.2.w0 and 1 more) on rank 1; give all ranks",
        "an error": "update: staging failed on rank 1: ValueError: a fault on purpose",
    }

    def go(group: Group) -> list[Any]:
        model = ByteModel(LAYERS)
        runtime, _ = updating(group, model, transport=transport)
        tensors, choices = model.tensors(1), {}
        if group.rank == 1 and what == "another byte":
            tensors["bytes.1.w0"][700] ^= 1
        elif group.rank == 1 and what == "a tensor less":
            del tensors["bytes.1.w0"]
        elif group.rank == 1 and what == "another choice":
            choices["keep"] = "bytes.0.w0"
            del tensors["bytes.0.w0"]

        def coming() -> Iterator[tuple[str, Tensor]]:
            yield from tensors.items()
            if group.rank == 1 and what == "an error":
                fail()

        with runtime:
            said = raised(lambda: runtime.update(coming(), **choices))
            seen = [runtime.epoch, version_of(runtime, model, (0, 1))]
            assert try_update(runtime, model.tensors(1)) == ""
            return [said, *seen, version_of(runtime, model, (0, 1))]

    first, second = run_on_ranks(go, 2)
    assert first == second and first[1:] == [0, 0, 1]
    assert words[what] in first[0], first[0]


def test_a_closed_runtime_says_so_to_all() -> None:
    def go(group: Group) -> str:
        model = ByteModel(LAYERS)
        runtime, _ = updating(group, model)
        if group.rank == 1:
            runtime.close()
        said = raised(lambda: runtime.update(model.tensors(1)))
        if group.rank == 0:
            assert version_of(runtime, model, (0, 1)) == 0
            runtime.close()
        return said

    first, second = run_on_ranks(go, 2)
    assert first == second and "update: staging failed on rank 1: this runtime is closed" in first


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_whose_message_is_late_goes_the_way_of_the_others(first: int) -> None:
    """All are ready, and rank 1 alone does not hear of it. Whoever decides first has decided for both."""
    meeting = Meeting()

    def go(group: Group) -> list[Any]:
        model = ByteModel(LAYERS)
        runtime, stage = updating(group, model)
        heard = runtime._refuse_moved  # the last message before the decision

        def late(group: Group, moved: list[str]) -> None:
            heard(group, moved)
            runtime._refuse_moved = heard  # type: ignore[method-assign]
            meeting.tell(f"rank {group.rank} has heard")
            if group.rank == 0 and first == 1:
                meeting.wait("rank 1 has decided")
            if group.rank == 1:
                if first == 0:
                    meeting.wait("rank 0 writes")
                raise CommError("the last message did not come")

        runtime._refuse_moved = late  # type: ignore[method-assign]
        stage.arm("decided", lambda: meeting.tell(f"rank {group.rank} writes"))
        with runtime:
            said = try_update(runtime, model.tensors(1))
            meeting.tell(f"rank {group.rank} has decided")
            return [said, runtime.epoch, version_of(runtime, model, (0, 1))]

    one, other = run_on_ranks(go, 2)
    assert one == other
    if first == 0:
        assert one == ["", 2, 1]
    else:
        assert one[0].startswith("the last message did not come; nothing was written") and one[1:] == [0, 0]


def test_updates_leave_nothing_behind() -> None:
    """Descriptors and mappings, of updates that end well, that leave the old weights, and that leave none."""

    def held() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(Path("/proc/self/maps").read_text().splitlines())

    def go(group: Group) -> list[tuple[int, int]]:
        model, counts = ByteModel(LAYERS), []
        runtime, stage = updating(group, model)
        with runtime:
            for _ in range(3):
                for fault in ("staged", "stopped", "writing", ""):
                    if group.rank == 1:
                        stage.arm(fault, fail)
                    try_update(runtime, model.tensors(1))
                runtime.update(model.tensors(1))
                group.barrier()
                counts.append(held() if group.rank == 0 else (0, 0))
                group.barrier()
        return counts

    counts = run_on_ranks(go, 2)[0]
    assert len({num_fds for num_fds, _ in counts}) == 1, counts
    maps = [num_maps for _, num_maps in counts]
    assert max(maps) - min(maps) < 16, counts  # malloc's own come and go; each of these rounds maps 16 pages and more


def test_tensors_of_an_update_cannot_begin_another() -> None:
    def go(group: Group) -> list[Any]:
        model = ByteModel(LAYERS)
        runtime, _ = updating(group, model)

        def coming() -> Iterator[tuple[str, Tensor]]:
            yield from model.tensors(1).items()
            runtime.update(model.tensors(2))

        with runtime:
            return [raised(lambda: runtime.update(coming())), version_of(runtime, model, (0, 1, 2))]

    for said, version in run_on_ranks(go, 2):
        assert "update was called by what gives the tensors of an update" in said and version == 0


def test_two_updates_of_one_rank_come_one_after_the_other() -> None:
    """Two threads of one rank, alone."""

    def go(group: Group) -> list[int]:
        model = ByteModel(LAYERS)
        runtime, stage = updating(group, model)
        with runtime:
            other: list[InThread] = []
            stage.arm("writing", lambda: other.append(InThread(lambda: runtime.update(model.tensors(2)))))
            runtime.update(model.tensors(1))
            other[0].result()
            return [runtime.epoch, version_of(runtime, model, (0, 1, 2))]

    assert run_on_ranks(go, 1) == [[4, 2]]
