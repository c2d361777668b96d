"""What recipes refuse, and how they say it; runs of bytes beyond 32 bits; reports of the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from graphshard.core.errors import LoadError, SpecError
from graphshard.load import recipe_runs
from graphshard.load.recipe import label_of, reads_of, recipe_for
from graphshard.load.recipe_runs import Run, byte_runs, way_of
from graphshard.load.recipe_types import result_of, typed
from graphshard.load.store import TensorEntry
from graphshard.recipes import (
    Cast,
    Concat,
    PackInt4,
    QuantizeFp8,
    Read,
    Recipe,
    Reinterpret,
    RequantizeUe8m0,
    ScaleOf,
    Slice,
    Transpose,
)


def entries(**tensors: tuple[str, tuple[int, ...]]) -> dict[str, TensorEntry]:
    return {name: TensorEntry(name, dtype, shape) for name, (dtype, shape) in tensors.items()}


STORE = entries(
    q=("bfloat16", (64, 32)),
    k=("bfloat16", (16, 32)),
    wide=("bfloat16", (16, 33)),
    half=("float16", (16, 32)),
    ints=("int8", (4, 3)),
    bytes=("uint8", (4, 3)),
    fp8=("float8_e4m3fn", (300, 200)),
    fp8_scale=("float32", (3, 2)),
    e8m0=("float8_e8m0fnu", (3, 2)),
    fp4=("float4_e2m1fn_x2", (2, 4)),
    norm=("float32", (32,)),
    one=("float32", ()),
)
Q, K = Read("q"), Read("k")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Read(""), r"Read\(''\): a tensor's name is a text"),
        (lambda: Concat([]), "Concat has no parts"),
        (lambda: Concat([Q, "k"]), r"Concat of 'k': a part is a node of a recipe; write Read\('k'\)"),
        (lambda: Concat(Q), r"Concat of Read\(name='q'\): give several, in a list"),  # type: ignore[arg-type]
        (lambda: Reinterpret(Q, 8, "uint8"), "Reinterpret as 8: give several, in a list"),  # type: ignore[arg-type]
        (lambda: RequantizeUe8m0(Q, K, 128), "with blocks of 128: give several, in a list"),  # type: ignore[arg-type]
        (lambda: recipe_for({"w": "q"}, "w"), r"recipe 'w' of 'q': a part is a node"),  # type: ignore[dict-item]
        (lambda: recipe_for({"w": None}, "w"), r"recipe 'w' of None: a part is a node"),  # type: ignore[dict-item]
        (lambda: Concat([Q], -1), "Concat along dim -1"),
        (lambda: Slice(Q, 0, 3, 2), r"Slice of \[3, 2\): give whole numbers"),
        (lambda: Slice(Q, 0, -1, 2), r"Slice of \[-1, 2\)"),
        (lambda: Slice(Q, True, 0, 2), "Slice along dim True"),
        (lambda: Cast(Q, "float12"), "unknown dtype 'float12'; known are"),
        (lambda: Reinterpret(Q, (-1, 2), "uint8"), r"Reinterpret as \(-1, 2\)"),
        (lambda: QuantizeFp8(Q, "row"), "QuantizeFp8 per 'row': known are tensor, channel"),
        (lambda: QuantizeFp8(Q, "tensor", "int8"), "QuantizeFp8 to 'int8': known are float8_e4m3fn, float8_e5m2"),
        (lambda: RequantizeUe8m0(Q, K, (0, 128)), r"blocks of \(0, 128\)"),
        (lambda: ScaleOf(Q), "only QuantizeFp8 and RequantizeUe8m0 have a scale"),
    ],
)
def test_nodes_that_make_no_sense_are_refused_when_they_are_made(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make()


QUANTIZED = QuantizeFp8(Q, "tensor")
REFUSED: list[tuple[Recipe, str]] = [
    (Read("v"), r"tensor v is not among the 12 tensors there are"),
    (Concat([Q, Read("wide")]), r"part 1, wide bfloat16\[16, 33\], does not fit part 0, q bfloat16\[64, 32\]"),
    (Concat([Q, K], 1), r"Concat along dim 1: part 1, k bfloat16\[16, 32\], does not fit part 0"),
    (Concat([K, Read("half")]), r"part 1, half float16\[16, 32\], has another dtype than part 0.*cast one of them"),
    (Concat([Q, K], 2), r"part 0, q bfloat16\[64, 32\], has no such dimension"),
    (Concat([Q, Concat([K, Read("norm")])]), r"part 1, norm float32\[32\], has another dtype than part 0, k"),
    (Slice(Q, 0, 0, 65), r"Slice \[0, 65\) along dim 0 of q bfloat16\[64, 32\]: it ends at 64"),
    (Slice(Q, 2, 0, 1), "it has no such dimension"),
    (Transpose(Read("norm")), r"Transpose of norm float32\[32\]: it has not two dimensions"),
    (Transpose(Read("fp4")), "values packed in pairs along a row"),
    (Cast(Read("fp4"), "float32"), r"Cast to float32 of fp4 float4_e2m1fn_x2\[2, 4\]: it takes bool, int8"),
    (Cast(Q, "float4_e2m1fn_x2"), r"Cast of q bfloat16\[64, 32\] to float4_e2m1fn_x2: known are"),
    (Cast(Q, "int8"), r"Cast of q bfloat16\[64, 32\] to int8: what is out of range has no value"),
    (Cast(Read("e8m0"), "uint16"), "what is out of range has no value"),
    (Reinterpret(Q, (64, 31), "bfloat16"), r"4096 bytes, as bfloat16\[64, 31\], 3968 bytes"),
    (QuantizeFp8(Read("ints"), "tensor"), r"QuantizeFp8 of ints int8\[4, 3\]: it takes float32, bfloat16, float16"),
    (QuantizeFp8(Read("norm"), "channel"), "give a matrix, whose rows are the channels"),
    (PackInt4(Read("ints")), "an even number of columns"),
    (PackInt4(Read("bytes")), r"PackInt4 of bytes uint8\[4, 3\]: it takes int8"),
    (RequantizeUe8m0(Q, Read("fp8_scale")), r"RequantizeUe8m0 of q bfloat16\[64, 32\]: it takes float8_e4m3fn"),
    (RequantizeUe8m0(Read("fp8"), Q), r"with the scale q bfloat16\[64, 32\]: it takes float32"),
    (RequantizeUe8m0(Read("fp8"), Read("norm")), r"blocks of \(128, 128\) that run over the whole of it have \[3, 2\]"),
    # what has been made already is not made again
    (QuantizeFp8(Read("fp8"), "tensor"), r"QuantizeFp8 of fp8 float8_e4m3fn\[300, 200\]: it takes float32"),
    (QuantizeFp8(QUANTIZED, "tensor"), "it is the result of QuantizeFp8 of q already"),
    (QuantizeFp8(Cast(Concat([QUANTIZED, QUANTIZED]), "float32"), "channel"), "the result of QuantizeFp8 of q already"),
    (RequantizeUe8m0(Read("fp8"), Read("e8m0")), r"with the scale e8m0 float8_e8m0fnu\[3, 2\]: it takes float32"),
    (RequantizeUe8m0(QUANTIZED, ScaleOf(QUANTIZED)), "it is the result of QuantizeFp8 of q already"),
    (
        RequantizeUe8m0(RequantizeUe8m0(Read("fp8"), Read("fp8_scale")), Read("fp8_scale")),
        "it is the result of RequantizeUe8m0 of fp8 and 1 more already",
    ),
    (
        PackInt4(Reinterpret(PackInt4(Slice(Read("ints"), 1, 0, 2)), (2, 2), "int8")),
        "it is the result of PackInt4 of ints already",
    ),
]


@pytest.mark.parametrize(("recipe", "message"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_parts_that_do_not_fit_are_named(recipe: Recipe, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        result_of(recipe, STORE)


def test_strided_tensors_are_read_alone() -> None:
    store = {"w": TensorEntry("w", "uint8", (4, 3), (8, 1))}
    assert result_of(Read("w"), store) == ((4, 3), "uint8")
    with pytest.raises(LoadError, match=r"Concat of w uint8\[4, 3\], which is read .* with strides \(8, 1\)"):
        result_of(Slice(Concat([Read("w")]), 0, 0, 1), store)


@pytest.mark.parametrize("rows", [[192, 192], [64] * 4, [384, 64, 64], [127, 128]])
def test_block_scales_of_parts_are_not_taken_for_those_of_the_whole(rows: list[int]) -> None:
    store = {}
    for i, num_rows in enumerate(rows):
        store |= entries(
            **{f"w{i}": ("float8_e4m3fn", (num_rows, 192)), f"s{i}": ("float32", (-(-num_rows // 128), 2))}
        )
    weights, scales = ([Read(f"{kind}{i}") for i in range(len(rows))] for kind in "ws")
    with pytest.raises(LoadError, match="parts have blocks of their own, requantise each and concatenate the results"):
        result_of(RequantizeUe8m0(Concat(weights), Concat(scales)), store)
    parts = [RequantizeUe8m0(weight, scale) for weight, scale in zip(weights, scales, strict=True)]
    assert result_of(Concat(parts), store) == ((sum(rows), 192), "float8_e4m3fn")
    num_blocks = sum(-(-num_rows // 128) for num_rows in rows)
    assert result_of(Concat([ScaleOf(part) for part in parts]), store) == ((num_blocks, 2), "float8_e8m0fnu")


def test_block_scales_may_run_over_the_joints() -> None:
    store = entries(s=("float32", (116, 2)), **{f"g{i}": ("float8_e4m3fn", (1856, 200)) for i in range(8)})
    node = RequantizeUe8m0(Concat([Read(f"g{i}") for i in range(8)]), Read("s"))
    assert result_of(node, store) == ((14848, 200), "float8_e4m3fn")
    assert result_of(ScaleOf(node), store) == ((116, 2), "float8_e8m0fnu")


def test_scales_have_the_shapes_that_go_with_them() -> None:
    assert result_of(ScaleOf(QUANTIZED), STORE) == ((1,), "float32")
    assert result_of(ScaleOf(QuantizeFp8(Q, "channel")), STORE) == ((64,), "float32")
    stacked = QuantizeFp8(Reinterpret(Q, (2, 32, 32), "bfloat16"), "channel")
    assert result_of(ScaleOf(stacked), STORE) == ((2, 32), "float32")
    assert result_of(Concat([Read("one")] * 3), STORE) == ((3,), "float32")


def test_names_that_are_read_and_labels() -> None:
    recipe = Concat([Q, Concat([K, Q])])
    assert reads_of(recipe) == ("q", "k") and label_of(recipe) == "Concat of q and 1 more" and label_of(Q) == "q"
    assert recipe_for({"x": recipe}, "x") is recipe and recipe_for({"x": recipe}, "y") == Read("y")
    assert hash(Concat([Q, K])) == hash(Concat((Q, K)))


def test_runs_of_merged_weights_and_of_columns() -> None:
    assert byte_runs(Concat([Q, K]), STORE) == (Run(0, "q", 0, 4096), Run(4096, "k", 0, 1024))
    assert byte_runs(Slice(Concat([Q, K]), 0, 63, 66), STORE) == (Run(0, "q", 4032, 64), Run(64, "k", 0, 128))
    both = Concat([Slice(Q, 0, 0, 20), Slice(Q, 0, 20, 64)])
    assert byte_runs(both, STORE) == (Run(0, "q", 0, 4096),)
    columns = byte_runs(Slice(Slice(Q, 1, 4, 20), 1, 2, 5), STORE)
    assert columns == tuple(Run(6 * row, "q", 64 * row + 12, 6) for row in range(64))
    beside = byte_runs(Concat([Slice(K, 1, 0, 30), Slice(Read("wide"), 1, 31, 33)], 1), STORE)
    assert beside is not None and beside[:3] == (Run(0, "k", 0, 60), Run(60, "wide", 62, 4), Run(64, "k", 64, 60))
    assert byte_runs(Slice(Q, 1, 3, 3), STORE) == () and byte_runs(Transpose(Q), STORE) is None
    assert byte_runs(Slice(Read("fp4"), 1, 1, 3), STORE) == (Run(0, "fp4", 1, 2), Run(2, "fp4", 5, 2))


def test_runs_beyond_32_bits() -> None:
    num_rows = 2**31 + 16
    store = entries(a=("float8_e4m3fn", (num_rows, 3)), b=("float8_e4m3fn", (num_rows, 3)))
    runs = byte_runs(Slice(Concat([Read("a"), Read("b")]), 0, num_rows - 1, 2 * num_rows - 1), store)
    assert runs == (Run(0, "a", 3 * num_rows - 3, 3), Run(3, "b", 0, 3 * num_rows - 3))
    seen = byte_runs(Reinterpret(Read("a"), (3 * num_rows,), "uint8"), store)
    assert seen == (Run(0, "a", 0, 3 * num_rows),)


def test_very_many_runs_are_left_to_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe_runs, "MAX_RUNS", 100)
    for num_rows, is_bytes in ((100, True), (101, False)):
        tall = Slice(Read("tall"), 1, 0, 1)
        store = entries(tall=("bfloat16", (num_rows, 2)))
        assert (byte_runs(tall, store) is not None) is is_bytes
        assert way_of(typed(tall, store)) == ("bytes" if is_bytes else "rows: more than 100 runs")


@pytest.mark.parametrize(
    ("recipe", "way"),
    [
        (Q, "bytes"),
        (Concat([Cast(Q, "bfloat16"), K]), "bytes"),
        (Transpose(Concat([Q, K])), "rows: transpose"),
        (QuantizeFp8(Transpose(Q), "channel"), "rows: transpose, quantize_fp8 per channel"),
        (ScaleOf(QUANTIZED), "rows: quantize_fp8 per tensor, scale"),
        (Cast(Q, "float16"), "rows: cast to float16"),
        (PackInt4(Slice(Read("ints"), 1, 0, 2)), "rows: pack_int4"),
        (RequantizeUe8m0(Read("fp8"), Read("fp8_scale")), "rows: requantize_ue8m0"),
    ],
)
def test_the_way_is_told(recipe: Recipe, way: str) -> None:
    assert way_of(typed(recipe, STORE)) == way
