"""Groups smaller than the world: each shares one copy of its own model, and no other rank takes part."""

from __future__ import annotations

from byte_model import ByteModel
from byte_steps import compile_bytes, wrong_after
from ranks import run_on_ranks

from graphshard.comm.group import Group


def pairs(world: Group, transport: str) -> list[str]:
    """Ranks 0 and 2 shard one model, ranks 1 and 3 another with more layers and another plan."""
    mine = [0, 2] if world.rank % 2 == 0 else [1, 3]
    group = world.subgroup(mine)
    assert group is not None
    model = ByteModel([[5000 + world.rank % 2]] * (2 + mine[0]), name=f"model{mine[0]}")
    wrong = []
    with compile_bytes(group, model, units="layer", prefetch_depth=mine[0], transport=transport) as runtime:
        assert (group.rank, group.world_size) == (mine.index(world.rank), 2)
        graph = runtime.graph(batch_size=1)
        for act in (graph.replay, lambda: runtime.run(1), graph.replay):
            wrong += wrong_after(runtime, model, act)
    return wrong


def test_two_groups_in_one_world(transport: str) -> None:
    assert run_on_ranks(pairs, 4, transport) == [[], [], [], []]


def lone(world: Group, transport: str) -> list[str] | None:
    """Only ranks 1 and 2 of three shard; rank 0 has nothing to do with it."""
    group = world.subgroup([1, 2])
    if group is None:
        return None
    model = ByteModel([[7000], [9000], [11000]])
    with compile_bytes(group, model, units="layer", prefetch_depth=1, transport=transport) as runtime:
        return wrong_after(runtime, model, runtime.graph(batch_size=1).replay)


def test_ranks_outside_a_group_take_no_part(transport: str) -> None:
    assert run_on_ranks(lone, 3, transport) == [None, [], []]
