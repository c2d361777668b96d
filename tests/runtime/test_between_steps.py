"""Random calls of all kinds, alike on all ranks: every segment sees its bytes, and the cache holds what folds added."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from byte_steps import compile_bytes
from fold_model import DraftModel, FoldModel, LendingModel
from ranks import run_on_ranks

from graphshard.comm.group import Group

HEADS = ("inside", "outside", "tail")
KINDS = ("step", "step", "prefetch", "discard", "update")
NUM_CALLS = 40


def random_calls(group: Group, transport: str, seed: int) -> list[str]:
    """Steps, folds and prefetches of two shapes, discards, captures and updates of one runtime."""
    dice = random.Random(seed)  # the same on all ranks
    model, version, wrong = FoldModel(), 0, []
    choices: dict[str, Any] = {"units": dice.choice(["layer", "weight"]), "prefetch_depth": dice.choice([0, 1, 2])}
    choices |= {"head": dice.choice(HEADS), "executor": dice.choice(["cooperative", "threaded"])}
    with compile_bytes(group, model, transport=transport, capture_sizes=[1, 2], **choices) as runtime:
        state = runtime.buffers(max(runtime.programs), "cache")["state"]
        expected = torch.zeros_like(state)
        for number in range(NUM_CALLS):
            size, call = dice.choice([1, 2]), dice.choice(("eager", "graph", "fold", "fold", "prefetch", "rare"))
            if call in ("eager", "graph"):
                act = runtime.graph(size).replay if call == "graph" else (lambda size=size: runtime.run(size))
                outputs = runtime.graph(size).outputs
                for tensor in outputs.values():
                    tensor.zero_()
                act()
                wrong += [f"call {number}: {line}" for line in model.wrong(outputs, version)]
            elif call == "fold":
                accepted = [dice.randrange(5) for _ in range(size)]
                runtime.graph(size).inputs["accepted"].copy_(torch.tensor(accepted))
                before = (runtime.held, runtime.num_primes, runtime.has_prefetched(size))
                runtime.fold(size, run=dice.choice(["graph", "eager"]))
                expected[:size] += model.folded(accepted, version)
                if before != (runtime.held, runtime.num_primes, runtime.has_prefetched(size)):
                    wrong.append(f"call {number}: a fold touched the slots")
            elif call == "prefetch":
                runtime.prefetch(size)
                if not runtime.has_prefetched(size):
                    wrong.append(f"call {number}: what was prefetched is not there")
            elif dice.random() < 0.5:
                runtime.discard_prefetch()
            elif dice.random() < 0.5:
                runtime.close_graphs()
                runtime.capture()
            else:
                version += 1
                runtime.update(model.tensors(version))
            if not torch.equal(state, expected):
                return [*wrong, f"call {number} ({call}) left {state.tolist()}, not {expected.tolist()}"]
    return wrong


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 20))])
@pytest.mark.parametrize("transport", ["pull", "nccl"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_calls_between_steps_in_any_order(world_size: int, transport: str, seed: int) -> None:
    for wrong in run_on_ranks(random_calls, world_size, transport, seed):
        assert wrong == []


def random_pair(group: Group, transport: str, seed: int) -> list[str]:
    """A target and a draft that borrows of it: steps, prefetches, discards and updates of either."""
    dice = random.Random(seed)
    target = LendingModel()
    draft, versions, wrong = DraftModel(target), [0, 0], []
    with (
        compile_bytes(group, target, transport=transport, units="layer", head=dice.choice(HEADS)) as lender,
        compile_bytes(group, draft, transport=transport, borrow=lender, head=dice.choice(HEADS)) as borrower,
    ):
        for number in range(NUM_CALLS):
            runtime, call = dice.choice((lender, borrower)), dice.choice(KINDS)
            if call == "step":
                act = runtime.graph(1).replay if dice.random() < 0.5 else (lambda runtime=runtime: runtime.run(1))
                for tensor in runtime.graph(1).outputs.values():
                    tensor.zero_()
                act()
                truth = target.tensors(versions[0]) if runtime is lender else draft.tensors(versions[1], versions[0])
                for key, seen in runtime.graph(1).outputs.items():
                    if not torch.equal(seen, truth[key.split(":")[1]]):
                        wrong.append(f"call {number}: {key} is not that of versions {versions}")
            elif call == "prefetch":
                runtime.prefetch(1)
            elif call == "discard":
                runtime.discard_prefetch()
            elif dice.random() < 0.4:
                which = 0 if runtime is lender else 1
                versions[which] += 1
                runtime.update(draft.owned(versions[1]) if which else target.tensors(versions[0]))
    return wrong


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 10))])
@pytest.mark.parametrize("transport", ["pull", "nccl"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_lender_and_a_borrower_in_any_order(world_size: int, transport: str, seed: int) -> None:
    for wrong in run_on_ranks(random_pair, world_size, transport, seed):
        assert wrong == []
