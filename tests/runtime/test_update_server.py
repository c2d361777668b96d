"""A server that replays from C while weights are updated: refused while they are written, right bytes after."""

from __future__ import annotations

from typing import Any

import pytest
from byte_model import ByteModel
from embed_api import OK, STATE, EmbeddedStep
from ranks import run_on_ranks
from update_programs import LAYERS, fail, raised, try_update, updating, version_of, version_seen

from graphshard._core import Memory, Stream
from graphshard.comm.group import Group

HEADS = ("inside", "outside", "tail")


def by_c(step: EmbeddedStep) -> None:
    assert step.replay() == OK, step.error
    assert step.wait() == OK, step.error


def prefetch(step: EmbeddedStep) -> int:
    return int(step.api.gs_step_prefetch(step.pointer))


@pytest.mark.parametrize("stage", ["stopping", "stopped", "decided", "writing", "checked"])
@pytest.mark.parametrize("head", HEADS)
def test_c_is_refused_while_weights_are_written(head: str, stage: str) -> None:
    """Replays and prefetches; before it C prefetched what is never used."""

    def go(group: Group) -> list[Any]:
        model = ByteModel(LAYERS)
        runtime, hook = updating(group, model, head=head)
        with runtime:
            step = EmbeddedStep(runtime.graph(1).handle)
            seen = [version_seen(runtime, model, lambda: by_c(step), (0, 1))]
            assert prefetch(step) == OK
            found: list[Any] = []
            hook.arm(stage, lambda: found.extend([step.epoch(), step.replay(), step.error, prefetch(step), step.error]))
            runtime.update(model.tensors(1))
            assert found == [1, STATE, WRITTEN + "replay" + EVEN, STATE, WRITTEN + "prefetch" + EVEN]
            assert step.epoch() == 2
            seen += [version_seen(runtime, model, lambda: by_c(step), (0, 1)) for _ in range(2)]
            seen.append(version_of(runtime, model, (0, 1)))
            step.release()
            return seen

    assert run_on_ranks(go, 2) == [[0, 1, 1, 1]] * 2


WRITTEN, EVEN = "the weights are being written (epoch 1); ", " when the epoch is even"


def test_c_is_refused_until_weights_have_a_version_again() -> None:
    def go(group: Group) -> list[Any]:
        model = ByteModel(LAYERS)
        runtime, hook = updating(group, model, head="tail")
        with runtime:
            step = EmbeddedStep(runtime.graph(1).handle)
            by_c(step)
            if group.rank == 1:
                hook.arm("writing", fail)
            assert try_update(runtime, model.tensors(1)) != ""
            refused = [step.replay(), prefetch(step), step.epoch()]
            assert try_update(runtime, model.tensors(2)) == ""
            seen = version_seen(runtime, model, lambda: by_c(step), (0, 1, 2))
            step.release()
            return [*refused, seen]

    assert run_on_ranks(go, 2) == [[STATE, STATE, 1, 2]] * 2


def test_what_c_still_runs_is_waited_for() -> None:
    """C's prefetch is held up: too long for one update, which leaves the old weights; the next one waits for it."""

    def go(group: Group) -> list[Any]:
        model = ByteModel(LAYERS)
        runtime, _ = updating(group, model, head="tail")
        with runtime:
            step = EmbeddedStep(runtime.graph(1).handle)
            by_c(step)
            runtime.run(1)  # C's next prefetch is due
            latch, opener = Memory(runtime.driver, 4), Stream(runtime.driver)
            patience, said = runtime.timeout_s, ""
            if group.rank == 1:
                runtime._streams["prefetch"].wait_value(latch.address, 1)
                assert prefetch(step) == OK
                runtime.timeout_s = 0.05
            said = raised(lambda: runtime.update(model.tensors(1)))
            epoch = runtime.epoch
            runtime.timeout_s = patience
            opener.write_value(latch.address, 1)
            seen = [version_seen(runtime, model, lambda: by_c(step), (0, 1))]
            runtime.update(model.tensors(1))
            seen.append(version_seen(runtime, model, lambda: by_c(step), (0, 1)))
            step.release()
            return [said, epoch, *seen]

    first, second = run_on_ranks(go, 2)
    assert first == second and first[1:] == [0, 0, 1]
    assert "update: stopping failed on rank 1: waited 0.1 s for replay 1, or a prefetch, of the server" in first[0]


def test_under_nccl_c_and_updates_take_turns() -> None:
    def go(group: Group) -> list[int]:
        model = ByteModel(LAYERS)
        runtime, _ = updating(group, model, transport="nccl")
        with runtime:
            graph = runtime.graph(1)
            graph.promise_alike()
            step = EmbeddedStep(graph.handle)
            seen = []
            for version in range(1, 4):
                by_c(step)
                runtime.update(model.tensors(version))
                seen.append(version_seen(runtime, model, lambda: by_c(step), range(4)))
                seen.append(version_of(runtime, model, range(4)))
            step.release()
            return seen

    assert run_on_ranks(go, 2) == [[1, 1, 2, 2, 3, 3]] * 2
