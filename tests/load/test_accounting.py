"""Everything that does not fit is one error, with near names and the way out."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import pytest

from graphshard.core.errors import LoadError
from graphshard.core.specs import WeightSpec
from graphshard.load.accounting import Accounting
from graphshard.load.store import TensorEntry


def refusal(accounting: Accounting) -> str:
    with pytest.raises(LoadError) as raised:
        accounting.raise_if_any()
    return str(raised.value)


def test_what_fits_is_no_error() -> None:
    accounting = Accounting("somewhere")
    accounting.names(["a", "b", "rope.inv_freq", "c.9"], ["a", "b", "a"], ignore=["*.inv_freq", "c.[0-9]"])
    accounting.weight(WeightSpec("a", (2, 3), "float32"), TensorEntry("a", "float32", (2, 3)))
    accounting.raise_if_any()


def test_all_of_it_is_told_at_once() -> None:
    accounting = Accounting("/models/tiny")
    held = ["layers.0.q_projection.weight", "layers.0.k_proj.weight", "layers.1.v_proj.weight", "lm_head.weight"]
    needed = ["layers.0.q_proj.weight", "layers.0.k_proj.weight", "layers.1.v_proj.weight", "embed"]
    accounting.names(held, needed)
    accounting.weight(WeightSpec("layers.0.k_proj.weight", (8, 8), "bfloat16"), TensorEntry("x", "bfloat16", (8, 4)))
    accounting.weight(WeightSpec("layers.1.v_proj.weight", (8,), "bfloat16"), TensorEntry("x", "float16", (8,)))
    accounting.twice("layers.1.v_proj.weight")
    assert refusal(accounting).splitlines() == [
        "7 tensors of /models/tiny do not fit:",
        "  missing        embed: none of 4 names is near",
        "  missing        layers.0.q_proj.weight: near it are layers.0.q_projection.weight",
        "  not asked for  layers.0.q_projection.weight",
        "  not asked for  lm_head.weight",
        "  another shape  layers.0.k_proj.weight is bfloat16[8, 4], the model asks for bfloat16[8, 8]",
        "  another dtype  layers.1.v_proj.weight is float16[8], the model asks for bfloat16[8]",
        "  given twice    layers.1.v_proj.weight",
        "Give the checkpoint of this model's configuration, or recipes that make its weights of its tensors",
        'What may be left out is named: ignore=("...",) takes names and patterns; '
        "a tied head that is stored as well and rotary inv_freq are such",
    ]


def test_the_way_out_is_the_callers() -> None:
    accounting = Accounting("the tensors given", "Give all of them", "Runtime.ignore = ")
    accounting.names(["a", "stray"], ["a"])
    assert refusal(accounting).splitlines()[2:] == [
        'What may be left out is named: Runtime.ignore = ("stray",) takes names and patterns; '
        "a tied head that is stored as well and rotary inv_freq are such"
    ]
    accounting.names(["a"], ["a", "b"])
    assert refusal(accounting).splitlines()[-2] == "Give all of them"


def test_recipes_of_no_weight_are_told_with_near_names() -> None:
    accounting = Accounting("somewhere")
    accounting.recipes(["layers.0.qkv", "layers.9.qvk"], ["layers.0.qkv", "layers.9.qkv"])
    said = "  recipe  layers.9.qvk: the model has no weight of this name; near layers.9.qvk are layers.9.qkv"
    assert said in refusal(accounting)


def test_strides_count() -> None:
    accounting = Accounting("somewhere")
    accounting.weight(WeightSpec("a", (2, 3), "float32", (1, 2)), TensorEntry("a", "float32", (2, 3)))
    assert "a is float32[2, 3], the model asks for float32[2, 3] with strides (1, 2)" in refusal(accounting)


def test_the_wrong_checkpoint_altogether_is_told_briefly_and_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = []

    def count(name: str, candidates: Sequence[str], n: int) -> list[str]:
        looked_at.append(len(candidates))
        return []

    monkeypatch.setattr(difflib, "get_close_matches", count)
    accounting = Accounting("somewhere")
    accounting.names(
        [f"transformer.h.{i}.attn.weight" for i in range(50_000)], [f"model.layers.{i}.weight" for i in range(50_000)]
    )
    text = refusal(accounting)
    assert text.startswith("100000 tensors") and len(text.splitlines()) < 100 and "and 49960 more" in text
    assert 0 < sum(looked_at) < 50_000  # each look takes microseconds, and 50,000 times 50,000 would be hours
