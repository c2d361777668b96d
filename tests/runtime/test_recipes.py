"""Recipes evaluated by rows, in any stripes, are the recipe in plain torch; so are runs of bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from recipe_trees import any_bytes, any_nan, casted, entries_of, plain, raw, recipes, torch_dtype
from torch import Tensor

from graphshard.core.errors import LoadError
from graphshard.load.recipe import nodes_of
from graphshard.load.recipe_runs import runs_of
from graphshard.load.recipe_types import CASTABLE_DTYPES, Typed, typed
from graphshard.recipes import (
    Cast,
    Concat,
    QuantizeFp8,
    Read,
    Recipe,
    Reinterpret,
    RequantizeUe8m0,
    ScaleOf,
    Slice,
    Transpose,
)
from graphshard.runtime.weights.evaluate import amax, evaluate, scale_from_amax, scaled_per_tensor, stripes

few = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
many = settings(few, max_examples=1500)


def rows_of(tensors: dict[str, Tensor]) -> Callable[[str, int, int], Tensor]:
    """What reads rows of tensors in memory."""
    entries = entries_of(tensors)

    def rows(name: str, begin: int, end: int) -> Tensor:
        whole = typed(Read(name), entries)
        assert 0 <= begin < end <= whole.num_rows and whole.width
        return tensors[name].view(whole.num_rows, whole.width)[begin:end]

    return rows


def scales_of(result: Typed, tensors: dict[str, Tensor], num_shares: int) -> dict[Recipe, Tensor]:
    """Scales per tensor, as `num_shares` ranks find them together."""
    rows = rows_of(tensors)
    return {
        node.node: scale_from_amax(node, max(amax(node, share, num_shares, rows) for share in range(num_shares)))
        for node in scaled_per_tensor(result)
    }


def check_stripes(
    recipe: Recipe, tensors: dict[str, Tensor], num_shares: int, stripe_bytes: int, data: st.DataObject
) -> None:
    """Evaluated whole, by stripes and over some rows, `recipe` is what plain torch makes of whole tensors."""
    for kind in {type(node).__name__ for node in nodes_of(recipe)}:
        event(kind)
    before = {name: raw(tensor) for name, tensor in tensors.items()}
    expected = plain(recipe, tensors)
    result = typed(recipe, entries_of(tensors))
    assert (result.shape, result.dtype) == (tuple(expected.shape), str(expected.dtype).removeprefix("torch."))
    rows, scales = rows_of(tensors), scales_of(result, tensors, num_shares)
    whole = evaluate(result, 0, result.num_rows, rows, scales)
    assert whole.dtype == expected.dtype and whole.is_contiguous() and raw(whole) == raw(expected)
    bounds = stripes(result, 0, result.num_rows, stripe_bytes)
    cut = [evaluate(result, begin, end, rows, scales) for begin, end in bounds]
    assert b"".join(map(raw, cut)) == raw(expected)
    begin = data.draw(st.integers(0, result.num_rows))
    end = data.draw(st.integers(begin, result.num_rows))
    some = raw(evaluate(result, begin, end, rows, scales))
    assert some == raw(expected)[begin * result.row_bytes : end * result.row_bytes]
    assert {name: raw(tensor) for name, tensor in tensors.items()} == before


ANY = (recipes(), st.integers(1, 8), st.integers(1, 64), st.data())


@few
@given(*ANY)
def test_any_stripes_of_any_recipe_are_the_recipe_in_plain_torch(
    made: tuple[Recipe, dict[str, Tensor]], num_shares: int, stripe_bytes: int, data: st.DataObject
) -> None:
    check_stripes(*made, num_shares, stripe_bytes, data)


@pytest.mark.slow
@many
@given(*ANY)
def test_any_stripes_of_many_recipes(
    made: tuple[Recipe, dict[str, Tensor]], num_shares: int, stripe_bytes: int, data: st.DataObject
) -> None:
    check_stripes(*made, num_shares, stripe_bytes, data)


def check_runs(recipe: Recipe, tensors: dict[str, Tensor]) -> None:
    """Runs of bytes follow each other, are as long as can be, and make what plain torch makes."""
    runs = runs_of(typed(recipe, entries_of(tensors)))
    event("bytes" if runs is not None else "rows")
    if runs is None:
        return
    out = bytearray()
    next_bytes = None
    for run in runs:
        assert run.begin == len(out) and run.num_bytes > 0 and (run.tensor, run.tensor_begin) != next_bytes
        next_bytes = run.tensor, run.tensor_begin + run.num_bytes
        data = raw(tensors[run.tensor])
        assert next_bytes[1] <= len(data)
        out += data[run.tensor_begin : next_bytes[1]]
    assert bytes(out) == raw(plain(recipe, tensors))


@few
@given(recipes())
def test_runs_of_bytes_make_what_evaluation_makes(made: tuple[Recipe, dict[str, Tensor]]) -> None:
    check_runs(*made)


@pytest.mark.slow
@many
@given(recipes())
def test_runs_of_bytes_of_many_recipes(made: tuple[Recipe, dict[str, Tensor]]) -> None:
    check_runs(*made)


BIG = {
    "m": torch.zeros(2048, 1024, dtype=torch.bfloat16),
    "tall": torch.zeros(1 << 18, 8, dtype=torch.bfloat16),
    "stack": torch.zeros(4, 512, 1024, dtype=torch.bfloat16),
    "fp8": torch.zeros(2048, 2048, dtype=torch.uint8).view(torch.float8_e4m3fn),
    "scale": torch.ones(16, 16),
}
M = Read("m")
REQUANTIZED = RequantizeUe8m0(Read("fp8"), Read("scale"))
BOUNDED = [
    Transpose(M),
    Transpose(Read("tall")),
    QuantizeFp8(Transpose(M), "tensor"),
    QuantizeFp8(Transpose(M), "channel"),
    ScaleOf(QuantizeFp8(M, "channel")),
    ScaleOf(QuantizeFp8(Read("stack"), "channel")),
    QuantizeFp8(Read("stack"), "channel"),
    Concat([Cast(Read("stack"), "float32")] * 2, 1),
    Cast(Slice(M, 1, 0, 2), "float32"),
    Cast(Reinterpret(M, (2048 * 1024,), "bfloat16"), "float16"),
    Concat([M, M, Cast(M, "bfloat16")], 1),
    REQUANTIZED,
    ScaleOf(REQUANTIZED),
]


@pytest.mark.parametrize("recipe", BOUNDED, ids=[str(i) for i in range(len(BOUNDED))])
def test_no_more_than_a_stripe_is_read_at_a_time(recipe: Recipe) -> None:
    """Of tensors of 4 MiB; a stripe is 1 MiB. A row of blocks is read whole."""
    result = typed(recipe, entries_of(BIG))
    rows, largest = rows_of(BIG), 0

    def counted(name: str, begin: int, end: int) -> Tensor:
        nonlocal largest
        found = rows(name, begin, end)
        largest = max(largest, found.nbytes)
        return found

    scales = {
        node.node: scale_from_amax(node, max(amax(node, share, 4, counted) for share in range(4)))
        for node in scaled_per_tensor(result)
    }
    for begin, end in stripes(result, 0, result.num_rows, 1 << 20):
        evaluate(result, begin, end, counted, scales)
    assert 0 < largest <= 1 << 20


@pytest.mark.parametrize("source", CASTABLE_DTYPES)
def test_casts_do_not_depend_on_how_many_are_cast_at_once(source: str) -> None:
    """NaNs of all payloads and values out of range among them; vector units and single elements agree."""
    tensor = any_bytes((67, 5), source, 7)
    if tensor.is_floating_point() and tensor.element_size() > 1:
        tensor[::3] = any_nan(tensor[::3].shape, source)
    rows = rows_of({"w": tensor})
    for dtype in CASTABLE_DTYPES:
        try:
            result = typed(Cast(Read("w"), dtype), entries_of({"w": tensor}))
        except LoadError:
            assert tensor.is_floating_point() and not torch_dtype(dtype).is_floating_point and dtype != "bool"
            continue
        whole = evaluate(result, 0, 67, rows, {})
        assert raw(whole) == b"".join(raw(evaluate(result, row, row + 1, rows, {})) for row in range(67))
        assert raw(whole) == raw(casted(tensor, dtype))
