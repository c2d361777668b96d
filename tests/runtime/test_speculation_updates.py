"""Updates of a target, of its draft, of both: a prefetch made before is made again; never old bytes beside new."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import speculative_programs as programs
import torch
from byte_model import ByteModel, self_naming
from byte_steps import compile_bytes
from fault_tools import InThread, until
from ranks import run_on_ranks
from speculative_rig import DRAFT_LAYERS, TARGET_LAYERS, FoldModel, Pair
from torch import Tensor

import graphshard
from graphshard.comm.group import Group
from graphshard.core.specs import ModelSpec, SegmentSpec, WeightSpec
from graphshard.runtime.bind import Hooks
from graphshard.runtime.model import Segment, StepState
from graphshard.runtime.runtime import Runtime


@pytest.mark.parametrize(
    ("which", "run"), [(["target"], "graph"), (["draft"], "graph"), (["target", "draft"], "eager")]
)
def test_the_next_step_has_the_new_bytes_on_all_ranks(transport: str, which: list[str], run: str) -> None:
    for found in run_on_ranks(programs.update_models, 3, transport, which, run):
        assert found["wrong"] == []
        assert found["epochs"] == {name: 2 * (name in which) for name in ("draft", "target")}
        assert found["reports"] == sorted(which)
        assert found["prefetched"] == [True, "draft" not in which]  # what was gathered before is worth nothing


def test_an_update_that_names_nothing_or_too_much_is_refused_on_all_ranks(transport: str) -> None:
    nothing, too_much, unlike = programs_told = run_on_ranks(programs.refused_updates, 2, transport)[0]
    assert programs_told == run_on_ranks(programs.refused_updates, 2, transport)[1]
    assert nothing.startswith("SpecError: update of a speculation failed on rank 0 (and on rank 1): name what is")
    assert "only and keep say which weights of one model are updated" in too_much
    assert unlike.startswith(
        "CommError: update of a speculation: ranks differ: models is target on rank 0, draft on rank 1"
    )


def update_slowly(group: Group, transport: str, together: threading.Barrier) -> dict[str, Any]:
    """Rank 1's tensors come late, and its last stage is late: who steps at once sees old or new bytes, never both.

    `together` is both ranks', which are threads.
    """
    late = threading.Event()

    def stage(name: str) -> None:
        if name == "checked" and group.rank == 1:
            assert late.wait(60.0)

    hooks = Hooks(poison=True, update=stage)
    with Pair(group, transport, draft_choices={"hooks": hooks}) as pair:
        model, mixed = pair.models["draft"], []
        seen: list[int] = []

        def look() -> None:
            step = pair.spec.graph(1)
            for tensor in step.draft().outputs.values():
                tensor.zero_()
            step.propose()
            wrong = [model.wrong(step.draft().outputs, version) for version in (0, 1)]
            mixed.extend(wrong[0] if wrong[0] and wrong[1] else [])
            seen.append(0 if not wrong[0] else 1)
            step.verify()
            step.commit()

        look()
        gate = threading.Event()

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in model.tensors(1).items():
                if group.rank == 1:
                    assert gate.wait(60.0)
                yield name, tensor

        updating = InThread(lambda: pair.spec.update(draft=tensors()))
        if transport == "pull":  # steps go on while rank 1's tensors are waited for
            for _ in range(3):
                look()
        together.wait(60.0)  # or the update would stop a step of the other rank
        gate.set()
        if transport == "pull" and group.rank == 0:
            until(lambda: pair.draft.epoch == 1, "the update stops steps")
        together.wait(60.0)
        late.set()
        updating.result()
        look()
        return {"mixed": mixed, "seen": seen}


def test_old_or_new_everywhere_however_slow_a_rank_is(transport: str) -> None:
    for found in run_on_ranks(update_slowly, 2, transport, threading.Barrier(2)):
        assert found["mixed"] == [] and found["seen"] == sorted(found["seen"]) and found["seen"][-1] == 1
        assert found["seen"][0] == 0


# --- weights that both read ---


class Borrower(ByteModel):
    """A draft that reads a weight of the target's, from its memory, at its beginning and at its end."""

    def __init__(self, layers: Sequence[Sequence[int]], shared: WeightSpec) -> None:
        super().__init__(layers, name="draft")
        self.shared = shared
        reads = [SegmentSpec(name, None, (shared.name,)) for name in ("embed", "head")]
        embed, head = (Segment(spec, self._show(spec)) for spec in reads)
        self.segments = (embed, *self.segments, head)
        self.weights.append(shared)

    def _show(self, spec: SegmentSpec) -> Any:
        def run(state: StepState) -> None:
            state.buffer(f"{spec.path}:{self.shared.name}").copy_(state.weight(self.shared.name))

        return run

    def spec(self) -> ModelSpec:
        return replace(super().spec(), borrowed=(self.shared.name,))

    def tensors(self, version: int = 0) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in super().tensors(version).items() if name != self.shared.name}

    def wrong_bytes(self, outputs: dict[str, Tensor], version: int, shared_version: int) -> list[str]:
        truth = self.tensors(version)
        truth[self.shared.name] = self_naming("target", self.shared.name, self.shared.num_bytes, shared_version)
        return [key for key, seen in outputs.items() if bool((seen != truth[key.split(":")[1]]).any())]


def shared_pair(group: Group, transport: str) -> tuple[Runtime, Runtime, FoldModel, Borrower]:
    """A target, and a draft that borrows what the target's fold reads."""
    target = FoldModel(TARGET_LAYERS, name="target")
    draft = Borrower(DRAFT_LAYERS, target.weights[-1])
    choices = {"units": "layer", "prefetch_depth": 1, "transport": transport, "timeout_s": 20.0}
    lender = compile_bytes(group, target, **choices)
    return lender, compile_bytes(group, draft, borrow=lender, head="outside", **choices), target, draft


def update_shared(group: Group, transport: str, run: str) -> dict[str, Any]:
    lender, borrower, target, draft = shared_pair(group, transport)
    shared = draft.shared
    found = {"wrong": []}
    with graphshard.speculate(lender, borrower, run=run) as spec:

        def step(version: int, shared_version: int) -> None:
            one = spec.graph(1)
            for tensor in one.draft().outputs.values():
                tensor.zero_()
            one.propose()
            found["wrong"] += draft.wrong_bytes(dict(one.draft().outputs), version, shared_version)
            one.verify()
            one.commit()

        step(0, 0)
        spec.update(target=target.tensors(1))
        step(0, 1)  # the draft sees the target's new bytes, which were written once
        everything = draft.tensors(1) | {shared.name: target.tensors(7)[shared.name]}
        spec.update(draft=everything)  # the shared one among them is passed over
        step(1, 1)
        spec.update(target=target.tensors(2), draft=draft.tensors(2))
        step(2, 2)
    return found


@pytest.mark.parametrize("run", ["graph", "eager"])
def test_a_weight_that_both_read_is_updated_once(transport: str, run: str) -> None:
    for found in run_on_ranks(update_shared, 2, transport, run):
        assert found["wrong"] == []


def update_beside_steps(group: Group, run: str) -> dict[str, Any]:
    """Another thread updates the target, ten times, while this one steps; a draft run reads one version throughout."""
    lender, borrower, target, draft = shared_pair(group, "pull")
    mixed: list[str] = []
    with graphshard.speculate(lender, borrower, run=run) as spec:
        step = spec.graph(1)

        def update_often() -> None:
            for version in range(1, 11):
                spec.update(target=target.tensors(version))

        updating, num_steps = InThread(update_often), 0
        while updating.is_alive() or num_steps < 20:
            num_steps += 1
            for tensor in step.draft().outputs.values():
                tensor.zero_()
            step.propose()
            embed, head = (step.draft().outputs[f"{path}:{draft.shared.name}"] for path in ("embed", "head"))
            if not torch.equal(embed, head):
                mixed.append(f"step {num_steps}: the head is of another version than the embedding")
            step.verify()
            step.commit()
        updating.result()
        step.propose()
        wrong = draft.wrong_bytes(dict(step.draft().outputs), 0, 10)
        step.verify()
        step.commit()
        wrong += target.wrong(step.target.outputs, 10)
    return {"mixed": mixed, "wrong": wrong}


@pytest.mark.parametrize("run", ["graph", "eager"])
def test_steps_go_on_beside_updates_of_what_both_read(run: str) -> None:
    for found in run_on_ranks(update_beside_steps, 2, run):
        assert found == {"mixed": [], "wrong": []}
