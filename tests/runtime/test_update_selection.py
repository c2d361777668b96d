"""Which weights are updated: patterns, weights that belong together, and what ranks compare."""

from __future__ import annotations

import pytest

from graphshard.core.errors import SpecError
from graphshard.load.recipe import Concat, Read
from graphshard.runtime.update.agreement import Told, first_difference
from graphshard.runtime.update.selection import companions, select, stem_of

BLOCK_FP8 = ["a.weight", "a.weight_scale_inv", "b.weight", "b.weight_scale", "norm.weight"]


@pytest.mark.parametrize(
    "names",
    [
        ["a.weight", "a.weight_scale"],
        ["a.weight", "a.weight_scale_inv"],
        ["a.weight", "a.weight_scale", "a.weight_scale_2"],
        ["a.weight_packed", "a.weight_scale", "a.weight_zero_point"],
        ["a.qweight", "a.qzeros", "a.scales", "a.g_idx"],
        ["a.gate_up_proj_blocks", "a.gate_up_proj_scales"],
        ["w", "w_scale"],
    ],
)
def test_a_weight_and_its_scales_belong_together(names: list[str]) -> None:
    others = ["a.bias", "b.weight", "a.weights.weight", "scale_a"]
    assert companions([*others, *names], {}) == [tuple(names)]
    for name in names:
        with pytest.raises(SpecError, match="which belongs to it"):
            select([*others, *names], {}, name, ())
        rest = [other for other in names if other != name]
        assert select([*others, *names], {}, name, rest).updated == (name,)
    assert select([*others, *names], {}, names, ()).updated == tuple(names)


def test_stems() -> None:
    assert [stem_of(name) for name in ("a.b.weight_scale", "scale", "a.scale", "_scale", "x_scale")] == [
        "a.b.weight",
        "weight",
        "a.weight",
        "_scale",
        "x",
    ]


def test_weights_of_one_tensor_belong_together_over_any_number_of_steps() -> None:
    """a and b share one tensor, b and c another: all three."""
    recipes = {"b": Concat((Read("a"), Read("c"))), "d": Read("d")}
    assert companions(["a", "b", "c", "d"], recipes) == [("a", "b", "c")]


def test_patterns() -> None:
    assert select(BLOCK_FP8, {}, None, ()).updated == tuple(BLOCK_FP8)
    chosen = select(BLOCK_FP8, {}, ["a.*", "norm.*"], "norm.*")
    assert (chosen.updated, chosen.reads) == (("a.weight", "a.weight_scale_inv"),) * 2
    assert chosen.kept == ("b.weight", "b.weight_scale", "norm.weight")
    for only, keep, words in (
        ("c.*", (), r"only='c\.\*' matches no weight; known: a\.weight, "),
        (None, ["c"], "keep='c' matches no weight"),
        ("a.*", "a.*", "leave nothing to update"),
        ([1], (), r"only is \[1\]; it is a sequence of patterns"),
    ):
        with pytest.raises(SpecError, match=words):
            select(BLOCK_FP8, {}, only, keep)  # type: ignore[arg-type]
    assert select(BLOCK_FP8, {}, None, "*").updated == ()


def test_what_differs_between_ranks_is_named_with_the_ranks() -> None:
    told = [Told(2, ["a", "b"], {"a": 1, "b": 2}) for _ in range(3)]
    assert first_difference(told) is None
    for other, words in (
        (
            Told(4, ["a", "b"], {"a": 1, "b": 2}),
            "ranks have weights of different versions: epoch 2 on ranks 0 2, epoch 4",
        ),
        (
            Told(2, ["a"], {"a": 1}),
            "ranks update different weights: 2 weights (a, b) on ranks 0 2, 1 weights (a) on rank 1",
        ),
        (
            Told(2, ["a", "b"], {"a": 1, "b": 3}),
            "tensor b is not the same on all ranks: its checksum is 0000000000000002 on ranks 0 2, 0000000000000003 on "
            "rank 1 (1 of 2 tensors differ)",
        ),
    ):
        assert words in str(first_difference([told[0], other, told[2]]))
