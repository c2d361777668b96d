"""Recipes that only move bytes, as runs: which bytes of which tensors make up the weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import NamedTuple

from graphshard.core.sizes import dtype_bits
from graphshard.load.recipe import (
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
    nodes_of,
)
from graphshard.load.recipe_types import Described, Typed, typed
from graphshard.load.spans import concat_spans, slice_spans

MAX_RUNS = 1 << 16
"""More runs than this (slices of columns of a very tall weight) are left to evaluation by rows."""


class Run(NamedTuple):
    """Bytes `[begin, begin + num_bytes)` of the weight are those of `tensor` from `tensor_begin` on."""

    begin: int
    tensor: str
    tensor_begin: int
    num_bytes: int


def byte_runs(recipe: Recipe, entries: Mapping[str, Described]) -> tuple[Run, ...] | None:
    """The runs of what `recipe` makes: in order, without gaps, neighbours merged, none empty.

    None if a node changes bytes or their order within a matrix, or if there were more than `MAX_RUNS`: then it is
    evaluated by rows.

    Raises:
        LoadError: parts do not fit.
    """
    return runs_of(typed(recipe, entries))


def runs_of(result: Typed) -> tuple[Run, ...] | None:
    """As `byte_runs`, of a recipe whose types are known."""
    if not _moves_bytes(result):
        return None
    runs: list[Run] = []
    for run in _runs(result, 0, result.num_bytes, 0):
        last = runs[-1] if runs else None
        if last and last.tensor == run.tensor and last.tensor_begin + last.num_bytes == run.tensor_begin:
            runs[-1] = last._replace(num_bytes=last.num_bytes + run.num_bytes)
        elif len(runs) == MAX_RUNS:
            return None
        else:
            runs.append(run)
    return tuple(runs)


def _moves_bytes(result: Typed) -> bool:
    moves = isinstance(result.node, (Read, Concat, Slice, Reinterpret)) or _keeps_dtype(result)
    return moves and all(map(_moves_bytes, result.parts))


def _keeps_dtype(result: Typed) -> bool:
    return isinstance(result.node, Cast) and result.parts[0].dtype == result.dtype


def _runs(result: Typed, begin: int, end: int, at: int) -> Iterator[Run]:
    """The runs of bytes `[begin, end)` of `result`, which lie at `at` of the weight."""
    node = result.node
    match node:
        case Read():
            if begin < end:
                yield Run(at, node.name, begin, end - begin)
        case Concat():
            sizes = [(part.shape or (1,))[node.dim] * _inner_bytes(part, node.dim) for part in result.parts]
            for part, first, last in concat_spans(begin, end, sizes):
                yield from _runs(result.parts[part], first, last, at)
                at += last - first
        case Slice():
            whole = result.parts[0]
            inner = _inner_bytes(whole, node.dim)
            period = whole.shape[node.dim] * inner
            for first, last in slice_spans(begin, end, period, node.begin * inner, node.end * inner):
                yield from _runs(whole, first, last, at)
                at += last - first
        case _:
            yield from _runs(result.parts[0], begin, end, at)


def _inner_bytes(part: Typed, dim: int) -> int:
    """Bytes of one index of `part` along `dim`, all later dimensions included."""
    return prod(part.shape[dim + 1 :]) * dtype_bits(part.dtype) // 8


def way_of(result: Typed) -> str:
    """How a weight is loaded, for reports: `bytes`, or `rows: ` and what needs whole rows."""
    if runs_of(result) is not None:
        return "bytes"
    kinds = list(dict.fromkeys(filter(None, map(_kind, nodes_of(result.node)))))
    return f"rows: {', '.join(kinds) if kinds else f'more than {MAX_RUNS} runs'}"


def _kind(node: Recipe) -> str | None:
    """What `node` does to values; None if it moves bytes."""
    match node:
        case QuantizeFp8():
            return f"quantize_fp8 per {node.per}"
        case Cast():
            return f"cast to {node.dtype}"
        case Transpose():
            return "transpose"
        case RequantizeUe8m0():
            return "requantize_ue8m0"
        case PackInt4():
            return "pack_int4"
        case ScaleOf():
            return "scale"
        case _:
            return None
