"""Evaluating recipes: any rows of what one makes, in memory bounded by the rows asked for.

A row is a vector along the last dimension, counted over all the others (`Typed.num_rows`, `Typed.width`), so that a
stack of matrices is done a few rows at a time too. Nodes that move elements move them as integers of their size: no
NaN payload and no sign of a zero is lost, whatever the dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod

import torch
from torch import Tensor

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
)
from graphshard.load.recipe_types import Typed
from graphshard.load.spans import concat_spans, slice_spans
from graphshard.runtime.weights.quantize import amax_of_rows, cast, fp8_scale, pack_int4, quantize_fp8, requantize_ue8m0

Rows = Callable[[str, int, int], Tensor]
"""Rows `[begin, end)` of a tensor by name, as (end - begin) * width elements of its dtype, contiguous, on the host."""

STRIPE_BYTES = 8 << 20
_MIN_BLOCK_BYTES = 1 << 20
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def evaluate(result: Typed, begin: int, end: int, rows: Rows, scales: Mapping[Recipe, Tensor]) -> Tensor:
    """Rows `[begin, end)` of what a recipe makes: [end - begin, width], contiguous. It may share memory with `rows`.

    Args:
        result: the recipe over its store.
        begin: The first row.
        end: One past the last row.
        rows: What reads the store.
        scales: The float32 scale, [1], of each node in `scaled_per_tensor(result)`.

    Raises:
        LoadError: values that cannot be quantised or packed.
    """
    return _evaluate(result, begin, end, rows, scales).contiguous().view(_torch_dtype(result))


def stripes(result: Typed, begin: int, end: int, stripe_bytes: int = STRIPE_BYTES) -> Iterator[tuple[int, int]]:
    """Ranges that divide the rows `[begin, end)`: for each no node holds more than `stripe_bytes`, or one row."""
    step = max(1, int(stripe_bytes / max(1.0, result.row_bytes * _growth(result))))
    for first in range(begin, end, step):
        yield first, min(first + step, end)


def scaled_per_tensor(result: Typed) -> list[Typed]:
    """The nodes whose one scale needs all rows, each once: what `amax` is to be taken of before evaluation."""
    found: dict[Recipe, Typed] = {}
    if isinstance(result.node, QuantizeFp8) and result.node.per == "tensor":
        found[result.node] = result
    for part in result.parts:
        found |= {inner.node: inner for inner in scaled_per_tensor(part)}
    return list(found.values())


def amax(quantized: Typed, share: int, num_shares: int, rows: Rows) -> float:
    """The largest magnitude in one of `num_shares` shares of what a `QuantizeFp8` node quantises; 0.0 for no rows.

    The shares together cover it: the largest of theirs is the amax of the whole, however many there are.

    Raises:
        LoadError: a value is infinite or NaN.
    """
    part = quantized.parts[0]
    while isinstance(part.node, Transpose):  # the same values, read in the order in which they lie
        part = part.parts[0]
    begin, end = (part.num_rows * i // num_shares for i in (share, share + 1))
    largest = 0.0
    for first, last in stripes(part, begin, end):
        values = evaluate(part, first, last, rows, {})
        largest = max(largest, float(amax_of_rows(values, quantized.text()).max()))
    return largest


def scale_from_amax(quantized: Typed, amax: float) -> Tensor:
    """The float32 scale, [1], of a node per tensor whose largest magnitude is `amax`."""
    return fp8_scale(torch.tensor([amax], dtype=torch.float32, device="cpu"), quantized.dtype)


def _evaluate(result: Typed, begin: int, end: int, rows: Rows, scales: Mapping[Recipe, Tensor]) -> Tensor:
    """As `evaluate`, as integers of the elements' size, contiguous or not."""
    if begin >= end or not result.width:
        return torch.empty((end - begin, result.width), dtype=_carrier(result), device="cpu")
    match result.node:
        case Read(name):
            made = rows(name, begin, end).reshape(end - begin, result.width)
        case Concat():
            return _concat(result, result.node.dim, begin, end, rows, scales)
        case Slice():
            return _slice(result, result.node, begin, end, rows, scales)
        case Transpose():
            return _transpose(result, begin, end, rows, scales)
        case Reinterpret():
            return _reinterpret(result, begin, end, rows, scales)
        case Cast():
            made = cast(evaluate(result.parts[0], begin, end, rows, scales), _torch_dtype(result))
        case QuantizeFp8():
            values = evaluate(result.parts[0], begin, end, rows, scales)
            scale = _fp8_scale(result, result.node, values, scales)
            made = quantize_fp8(values, scale, result.dtype)
        case RequantizeUe8m0():
            made = _requantize(result, result.node, begin, end, rows, scales)
        case PackInt4():
            made = pack_int4(evaluate(result.parts[0], begin, end, rows, scales), result.text())
        case ScaleOf():
            made = _scale(result, begin, end, rows, scales)
    return made.view(_carrier(result))


def _concat(result: Typed, dim: int, begin: int, end: int, rows: Rows, scales: Mapping[Recipe, Tensor]) -> Tensor:
    if dim == len(result.shape) - 1 and dim:
        return torch.cat([_evaluate(part, begin, end, rows, scales) for part in result.parts], dim=1)
    inner = prod(result.shape[dim + 1 : -1])
    spans = concat_spans(begin, end, [(part.shape or (1,))[dim] * inner for part in result.parts])
    return _joined([_evaluate(result.parts[part], first, last, rows, scales) for part, first, last in spans])


def _slice(result: Typed, node: Slice, begin: int, end: int, rows: Rows, scales: Mapping[Recipe, Tensor]) -> Tensor:
    part, dim = result.parts[0], node.dim
    if dim == len(part.shape) - 1 and dim:
        return _evaluate(part, begin, end, rows, scales)[:, node.begin : node.end]
    inner = prod(part.shape[dim + 1 : -1])
    spans = slice_spans(begin, end, part.shape[dim] * inner, node.begin * inner, node.end * inner)
    return _joined([_evaluate(part, first, last, rows, scales) for first, last in spans])


def _transpose(result: Typed, begin: int, end: int, rows: Rows, scales: Mapping[Recipe, Tensor]) -> Tensor:
    """Columns of the part, which is read whole, in blocks of rows as large as what is asked for."""
    part = result.parts[0]
    out = torch.empty((end - begin, result.width), dtype=_carrier(result), device="cpu")
    block_bytes = max(_MIN_BLOCK_BYTES, (end - begin) * result.row_bytes)
    for first, last in stripes(part, 0, part.num_rows, block_bytes):
        out[:, first:last] = _evaluate(part, first, last, rows, scales)[:, begin:end].t()
    return out


def _reinterpret(result: Typed, begin: int, end: int, rows: Rows, scales: Mapping[Recipe, Tensor]) -> Tensor:
    part = result.parts[0]
    first_byte, last_byte = begin * result.row_bytes, end * result.row_bytes
    first, last = first_byte // part.row_bytes, -(-last_byte // part.row_bytes)
    data = _evaluate(part, first, last, rows, scales).contiguous().view(torch.uint8).flatten()
    data = data[first_byte - first * part.row_bytes : last_byte - first * part.row_bytes]
    if data.data_ptr() % _carrier(result).itemsize:
        data = data.clone()
    return data.view(_carrier(result)).view(end - begin, result.width)


def _fp8_scale(result: Typed, node: QuantizeFp8, values: Tensor, scales: Mapping[Recipe, Tensor]) -> Tensor:
    """The scale of each row of `values`, or the one of them all."""
    if node.per == "tensor":
        return scales[node]
    return fp8_scale(amax_of_rows(values, result.text()), result.dtype)


def _requantize(
    result: Typed, node: RequantizeUe8m0, begin: int, end: int, rows: Rows, scales: Mapping[Recipe, Tensor]
) -> Tensor:
    height = node.block[0]
    first = begin // height
    weight, _ = _requantized_blocks(result, node, first, -(-end // height), rows, scales)
    return weight[begin - first * height : end - first * height]


def _requantized_blocks(
    result: Typed, node: RequantizeUe8m0, begin: int, end: int, rows: Rows, scales: Mapping[Recipe, Tensor]
) -> tuple[Tensor, Tensor]:
    """Rows of blocks `[begin, end)`: the weight's, and the scale's."""
    weight, scale = result.parts
    height = node.block[0]
    values = evaluate(weight, begin * height, min(end * height, weight.num_rows), rows, scales)
    return requantize_ue8m0(values, evaluate(scale, begin, end, rows, scales), node.block, result.text())


def _scale(result: Typed, begin: int, end: int, rows: Rows, scales: Mapping[Recipe, Tensor]) -> Tensor:
    made = result.parts[0]
    node = made.node
    if isinstance(node, RequantizeUe8m0):
        return _requantized_blocks(made, node, begin, end, rows, scales)[1]
    assert isinstance(node, QuantizeFp8), node
    if node.per == "tensor":
        return scales[node].view(1, 1)
    channels = range(begin * result.width, end * result.width)
    amaxes = [
        amax_of_rows(evaluate(made.parts[0], first, last, rows, scales), made.text())
        for first, last in stripes(made.parts[0], channels.start, channels.stop, _MIN_BLOCK_BYTES)
    ]
    return fp8_scale(torch.cat(amaxes), made.dtype).view(end - begin, result.width)


def _growth(result: Typed) -> float:
    """How many bytes a node under `result` holds at most for each byte of its own, when it is evaluated by rows."""
    node = result.node
    if isinstance(node, (Read, Transpose)) or not result.num_bytes:
        return 1.0
    if isinstance(node, ScaleOf) and isinstance(node.node, QuantizeFp8):
        return 1.0  # by stripes of its own
    inner = max(map(_growth, result.parts))
    if isinstance(node, (Concat, Reinterpret)) or (isinstance(node, Slice) and node.dim < len(result.shape) - 1):
        return inner
    if isinstance(node, Slice):
        return max(1.0, inner * result.parts[0].row_bytes / result.row_bytes)
    return max(1.0, inner * result.parts[0].num_bytes / result.num_bytes)


def _joined(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _carrier(result: Typed) -> torch.dtype:
    return _CARRIERS[_torch_dtype(result).itemsize]


def _torch_dtype(result: Typed) -> torch.dtype:
    dtype = getattr(torch, result.dtype)
    assert isinstance(dtype, torch.dtype), dtype
    return dtype
