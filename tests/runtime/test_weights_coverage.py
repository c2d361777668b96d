"""Every byte of every sharded weight is on one rank, whatever the plan; ranks that are mixed up are found at load."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from load_rig import compiled_of, load, model_of, tensors_of
from ranks import try_on_ranks

import graphshard
from graphshard.comm.group import Group
from graphshard.core.layout import Layout, UnitLayout, chunk_pieces
from graphshard.core.specs import WeightSpec
from graphshard.runtime.weights import fill
from graphshard.runtime.weights.coverage import check_coverage
from graphshard.runtime.weights.tensors_in_hand import TensorsInHand

Held = list[dict[str, list[tuple[int, int]]]]


def held_by(layout: Layout) -> Held:
    """What each rank is to load."""
    held: Held = []
    for rank in range(layout.world_size):
        held.append({})
        for unit in layout.units:
            for piece in chunk_pieces(unit, rank):
                held[rank].setdefault(piece.weight, []).append((piece.weight_begin, piece.weight_end))
    return held


LAYOUTS = st.builds(
    lambda sizes, world_size, units: (
        compiled_of(
            model_of([WeightSpec(f"w{i}", (size,), "uint8") for i, size in enumerate(sizes)]), world_size, units=units
        ).layout
    ),
    st.lists(st.integers(1, 3000), min_size=1, max_size=6),
    st.integers(1, 9),
    st.sampled_from(["layer", "weight", "bytes:2000"]),
)


@settings(max_examples=60, deadline=None)
@given(LAYOUTS, st.data())
def test_chunks_cover_every_weight_exactly_once_and_nothing_else_passes(layout: Layout, data: st.DataObject) -> None:
    held = held_by(layout)
    check_coverage(layout, held)
    pieces = [(rank, weight) for rank, of_rank in enumerate(held) for weight in of_rank]
    rank, weight = data.draw(st.sampled_from(pieces))
    (begin, end), num_bytes = held[rank][weight][0], sum(e - b for of in held for b, e in of.get(weight, ()))
    change = data.draw(st.sampled_from(["lost", "shorter", "longer", "shifted", "twice"]))
    held[rank][weight] = {
        "lost": [],
        "shorter": [(begin + 1, end)],
        "longer": [(begin, end + 1)],
        "shifted": [(begin + 1, end + 1)],
        "twice": [(begin, end), (begin, end)],
    }[change]
    with pytest.raises(graphshard.CommError, match=rf"weight {weight}, {num_bytes} bytes, is not whole: "):
        check_coverage(layout, held)


def _as_rank_0(unit: UnitLayout, rank: int) -> tuple[object, ...]:
    return chunk_pieces(unit, 0)


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_that_all_keep_the_first_shard_are_refused(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of([WeightSpec("w", (5000,), "uint8")])
    monkeypatch.setattr(fill, "chunk_pieces", _as_rank_0)
    outcomes = try_on_ranks(
        lambda group: load(group, compiled_of(model, world_size), TensorsInHand(tensors_of(model))), world_size
    )
    for outcome in outcomes:
        assert outcome.error_type == "CommError", outcome
        assert "weight w, 5000 bytes, is not whole: ranks 0 1 loaded bytes 0 to " in outcome.error


def test_a_rank_that_was_told_another_world_size_is_refused() -> None:
    model = model_of([WeightSpec("w", (5000,), "uint8")])

    def rank(group: Group) -> None:
        load(group, compiled_of(model, 2 + group.rank), TensorsInHand(tensors_of(model)))

    for outcome in try_on_ranks(rank, 2):
        assert outcome.error_type == "CommError" and "layouts differ: rank 0 has digest" in outcome.error
        assert "rank 1 " in outcome.error and "the same model, plan and world size" in outcome.error


def test_no_rank_has_a_number_by_default() -> None:
    """A rank that was forgotten is an error at the call, never rank 0. None may stand for all ranks."""
    found = []
    for path in sorted(Path(graphshard.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            arguments = [*node.args.posonlyargs, *node.args.args]
            defaults = list(zip(arguments[::-1], node.args.defaults[::-1], strict=False))
            defaults += [pair for pair in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if pair[1]]
            for argument, default in defaults:
                if argument.arg in ("rank", "ranks", "source_rank") and ast.unparse(default) != "None":
                    found.append(f"{path.name}: {node.name}({argument.arg}={ast.unparse(default)})")
    assert found == []
