"""Updates with a fault at each stage on each rank: the old weights everywhere, or none anywhere; never a mixture."""

from __future__ import annotations

import random
from typing import Any

import pytest
from byte_model import ByteModel
from ranks import run_on_ranks
from update_programs import (
    LAYERS,
    NEW_STAGES,
    OLD_STAGES,
    fail,
    is_padding_zero,
    raised,
    refusals,
    try_update,
    updating,
    version_of,
)

from graphshard.comm.group import Group
from graphshard.runtime.update.updating import STAGES

HEADS = ("inside", "outside", "tail")


def faulty_updates(group: Group, faults: list[list[Any]], choices: dict[str, Any]) -> list[str]:
    """One update a fault, [stage, rank] or [] for none; what each said. A torn version is repaired before the next."""
    model = ByteModel(LAYERS, tied=True)
    runtime, stage = updating(group, model, **choices)
    said = []
    with runtime:
        table, nodes = runtime.buffer_table(), runtime.graph(1).num_nodes()
        now = 0
        for version, fault in enumerate(faults, 1):
            if fault and fault[1] == group.rank:
                stage.arm(fault[0], fail)
            epoch = runtime.epoch
            text = try_update(runtime, model.tensors(version))
            said.append(text)
            if not fault:
                assert text == ""
                now = version
            elif fault[0] in OLD_STAGES:
                assert runtime.epoch == epoch and "nothing was written" in text, text
            else:
                assert runtime.epoch == epoch + 1
                assert all(f"rank {fault[1]}" in refusal for refusal in refusals(runtime))
                partial = try_update(runtime, model.tensors(version), keep="*.w0")
                assert "only a complete update gives weights of no version" in partial
                assert runtime.epoch == epoch + 1
                assert try_update(runtime, model.tensors(version)) == ""
                now = version
            assert runtime.epoch % 2 == 0
            assert version_of(runtime, model, (now, version - 1, version)) == now
            assert is_padding_zero(runtime)
        assert (runtime.buffer_table(), runtime.graph(1).num_nodes()) == (table, nodes)
        said.append(f"{runtime.num_primes} gathers outside steps")
    return said


def faulty_updates_of_each(group: Group, faults: list[list[Any]], choices: list[dict[str, Any]]) -> list[str]:
    """`faulty_updates` under several plans, one after another in the same processes."""
    return [text for choice in choices for text in faulty_updates(group, faults, choice)]


def check(faults: list[list[Any]], world_size: int, **choices: Any) -> list[str]:
    """All ranks say the same."""
    said = run_on_ranks(faulty_updates, world_size, faults, choices, timeout_s=240.0)
    assert all(one == said[0] for one in said), said
    return list(said[0])


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_fault_at_each_stage_on_the_last_rank(world_size: int, transport: str) -> None:
    faults = [[stage, world_size - 1] for stage in STAGES]
    said = check(faults, world_size, head="tail", transport=transport)
    for (stage, rank), text in zip(faults, said, strict=False):
        assert f"failed on rank {rank}: ValueError: a fault on purpose" in text, text
        assert ("of no version (epoch" in text) == (stage in NEW_STAGES), text


@pytest.mark.parametrize("head", HEADS)
def test_a_few_random_faults(head: str, transport: str) -> None:
    check(random_faults(random.Random(head), 4, 2), 2, head=head, transport=transport)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("head", HEADS)
def test_a_hundred_random_faults(head: str, transport: str, world_size: int) -> None:
    check(random_faults(random.Random(world_size), 100, world_size), world_size, head=head, transport=transport)


@pytest.mark.slow
def test_faults_in_processes() -> None:
    faults = [["stopped", 1], ["writing", 0], [], ["checked", 1]]
    choices = [{"head": "tail", "transport": transport} for transport in ("pull", "nccl")]
    said = run_on_ranks(faulty_updates_of_each, 2, faults, choices, mode="processes", timeout_s=240.0)
    assert said[0] == said[1]


def random_faults(chance: random.Random, count: int, world_size: int) -> list[list[Any]]:
    """Three in four updates have one."""
    faults = [[chance.choice(STAGES), chance.randrange(world_size)] for _ in range(count)]
    return [fault if chance.random() < 0.75 else [] for fault in faults]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_a_rank_that_is_interrupted_holds_nobody_up(kind: type[BaseException]) -> None:
    """Others hear of it at once, not after their limit; their old weights stay, and the next update goes well."""

    def go(group: Group) -> list[Any]:
        model = ByteModel(LAYERS)
        runtime, stage = updating(group, model)

        def interrupt() -> None:
            raise kind("Ctrl-C")

        with runtime:
            if group.rank == 1:
                stage.arm("staging", interrupt)
                with pytest.raises(kind):
                    runtime.update(model.tensors(1))
                said = ""
            else:
                said = raised(lambda: runtime.update(model.tensors(1)))
            before = version_of(runtime, model, (0, 1, 2))
            runtime.update(model.tensors(2))
            return [said, before, version_of(runtime, model, (0, 1, 2))]

    (said, *versions), others = run_on_ranks(go, 2)
    assert f"update: staging was interrupted on rank 1 by {kind.__name__}: Ctrl-C" in said, said
    assert "the weights of epoch 0 stay" in said and [versions, others] == [[0, 2], ["", 0, 2]]
