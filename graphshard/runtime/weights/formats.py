"""Dequantising: what each storage format means, as float32. The reference that a kernel's output is held against.

All take weights as they are stored, [n, k] or flat stacks of such rows, and return float32 of the logical shape: one
product of a value and its scale, in float32. A wrong number of scales is refused, never repeated or cut to fit, and so
are dtypes that stand for something else (bytes that are to be seen as scales, int4 packed into int32).

Merged weights: `part_rows` are the rows of each part, in order, where parts have scales of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphshard.core.errors import LoadError
from graphshard.load.recipe_types import block_counts
from graphshard.runtime.weights.quantize import e8m0_values

MXFP4_GROUP = 32
NVFP4_GROUP = 16

_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""By the three low bits of a value; the fourth is the sign (OCP Microscaling Formats 1.0, section 5.3.3)."""


def dequantize_float(weight: Tensor) -> Tensor:
    """Float32, bfloat16, float16 and FP8 without a scale: every value is exact in float32."""
    return weight.float()


def dequantize_per_tensor(weight: Tensor, scale: Tensor) -> Tensor:
    """One `scale`, [1] or a scalar, for all of `weight`.

    Raises:
        LoadError: there is another number of scales.
    """
    _check_count("per tensor", scale, 1, weight)
    return weight.float() * _floats("per tensor", scale).reshape(())


def dequantize_per_part(weight: Tensor, scales: Tensor, part_rows: Sequence[int]) -> Tensor:
    """One of `scales`, [len(part_rows)], for each part of a merged `weight`.

    Raises:
        LoadError: there is another number of scales, or the parts have other rows together.
    """
    _check_parts(weight, part_rows)
    _check_count("per part", scales, len(part_rows), weight)
    rows = torch.tensor(part_rows, dtype=torch.int64, device=scales.device)
    return _by_row(weight.float(), _floats("per part", scales).reshape(-1).repeat_interleave(rows))


def dequantize_per_channel(weight: Tensor, scale: Tensor) -> Tensor:
    """One scale for each row of `weight` [..., k]: [...] or [..., 1].

    Raises:
        LoadError: there is another number of scales.
    """
    _check_count("per channel", scale, weight.shape[:-1].numel(), weight)
    return _by_row(weight.float(), _floats("per channel", scale).reshape(-1))


def dequantize_blocks(
    weight: Tensor,
    scale: Tensor,
    block: tuple[int, int] = (128, 128),
    *,
    part_rows: Sequence[int] | None = None,
    skipped_rows: int = 0,
) -> Tensor:
    """One scale for each block of `weight` [n, k], the blocks at the edges whole: [ceil(n / 128), ceil(k / 128)].

    Scales are floats or `float8_e8m0fnu`. With `part_rows` every part begins with a block of its own (the ceilings
    add up); without, blocks run over the joints. `skipped_rows` of the first block are not in `weight`: rows that were
    cut from a larger one, with the rows of `scale` that they touch.

    Raises:
        LoadError: there is another number of scales, the parts have other rows together, or `weight` is no matrix.
    """
    if weight.dim() != 2 or min(block) < 1:
        raise LoadError(f"blocks of {block} of {_text(weight)}: blocks of 1 by 1 or more are cut from a matrix")
    if part_rows is None:
        wanted = block_counts((skipped_rows + weight.shape[0], weight.shape[1]), block)
        row_block = torch.arange(skipped_rows, skipped_rows + weight.shape[0], device=weight.device) // block[0]
    else:
        _check_parts(weight, part_rows)
        blocks = [-(-rows // block[0]) for rows in part_rows]
        wanted = (sum(blocks), block_counts(weight.shape, block)[1])
        pieces = [
            torch.arange(rows, device=weight.device) // block[0] + sum(blocks[:i]) for i, rows in enumerate(part_rows)
        ]
        row_block = torch.cat(pieces) if pieces else torch.arange(0, device=weight.device)
    if tuple(scale.shape) != wanted:
        how = f"its parts of {list(part_rows)} rows each on their own" if part_rows is not None else "the whole of it"
        raise LoadError(
            f"scales per block: {list(scale.shape)} were given, {list(wanted)} are needed for {_text(weight)} "
            f"in blocks of {block} over {how}"
        )
    columns = _floats("per block", scale).repeat_interleave(block[1], dim=1)[:, : weight.shape[1]]
    return weight.float() * columns[row_block]


def dequantize_mxfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """E2M1 values, two to a byte, the even one in the low bits, with one E8M0 scale for each 32 of a row.

    `packed` is uint8 or `float4_e2m1fn_x2` [..., k / 2], `scale` is `float8_e8m0fnu` or its bytes [..., k / 32].

    Raises:
        LoadError: there is another number of scales.
    """
    values = e2m1_values(packed)
    if scale.dtype not in (torch.float8_e8m0fnu, torch.uint8):
        raise LoadError(f"MXFP4 scales are {_text(scale)}: give float8_e8m0fnu, or its bytes in uint8")
    return values * _by_group("MXFP4", e8m0_values(scale), values, MXFP4_GROUP)


def dequantize_nvfp4(
    packed: Tensor, scale: Tensor, global_scale: Tensor, *, part_rows: Sequence[int] | None = None
) -> Tensor:
    """E2M1 values with one E4M3 scale for each 16 of a row, times a float32 scale of the whole, or of each part.

    `packed` is as for MXFP4, `scale` is `float8_e4m3fn` [..., k / 16]. The two scales are multiplied first.

    Raises:
        LoadError: there is another number of scales.
    """
    values = e2m1_values(packed)
    by_group = _by_group("NVFP4", _floats("NVFP4", scale), values, NVFP4_GROUP)
    if part_rows is None:
        return values * dequantize_per_tensor(by_group, global_scale)
    return values * dequantize_per_part(by_group, global_scale, part_rows)


def dequantize_int4(packed: Tensor, scale: Tensor, group: int) -> Tensor:
    """Two's complement int4, two to a uint8, the even one in the low bits, one scale for each `group` of a row.

    `packed` is [..., k / 2], `scale` any float dtype [..., ceil(k / group)].

    Raises:
        LoadError: there is another number of scales.
    """
    if group < 1:
        raise LoadError(f"int4 with a scale for each {group} of a row: give 1 or more")
    values = int4_values(packed).float()
    return values * _by_group("int4", _floats("int4", scale), values, group)


def e2m1_values(packed: Tensor) -> Tensor:
    """The float32 values of bytes of two E2M1 each: [..., k / 2] as [..., k]. A -0 stays one."""
    magnitudes = torch.tensor(_E2M1_MAGNITUDES, dtype=torch.float32, device=packed.device)
    return torch.cat([magnitudes, -magnitudes])[_nibbles(packed).int()]


def int4_values(packed: Tensor) -> Tensor:
    """The int8 values from -8 to 7 of bytes of two int4 each: [..., k / 2] as [..., k]."""
    nibbles = _nibbles(packed).to(torch.int8)
    return torch.where(nibbles > 7, nibbles - 16, nibbles)


def _nibbles(packed: Tensor) -> Tensor:
    if packed.element_size() != 1 or not packed.dim():
        raise LoadError(f"{_text(packed)} is not packed two values to a byte: give rows of uint8")
    data = packed.view(torch.uint8)
    return torch.stack([data & 0xF, data >> 4], dim=-1).flatten(-2)


def _floats(what: str, scale: Tensor) -> Tensor:
    if not scale.is_floating_point():
        raise LoadError(f"scales {what} are {_text(scale)}: give them as the floats that they are")
    return scale.float()


def _by_row(values: Tensor, scales: Tensor) -> Tensor:
    return values * scales.view(*values.shape[:-1], 1)


def _by_group(kind: str, scale: Tensor, values: Tensor, group: int) -> Tensor:
    """One scale for each value, from one for each `group` of a row."""
    wanted = (*values.shape[:-1], -(-values.shape[-1] // group))
    if tuple(scale.shape) != wanted:
        raise LoadError(
            f"{kind} scales per {group}: {list(scale.shape)} were given, {list(wanted)} are needed for "
            f"{list(values.shape)} values"
        )
    return scale.repeat_interleave(group, dim=-1)[..., : values.shape[-1]]


def _check_count(per: str, scale: Tensor, wanted: int, weight: Tensor) -> None:
    if scale.numel() != wanted:
        raise LoadError(
            f"scales {per}: {scale.numel()} were given, {wanted} needed for {_text(weight)}; a merged weight whose "
            "parts have scales of their own is dequantised per part"
        )


def _check_parts(weight: Tensor, part_rows: Sequence[int]) -> None:
    if sum(part_rows) != weight.shape[0] or min(part_rows, default=0) < 0:
        raise LoadError(f"parts of {list(part_rows)} rows have {sum(part_rows)} together, {_text(weight)} has others")


def _text(weight: Tensor) -> str:
    return f"{str(weight.dtype).removeprefix('torch.')}{list(weight.shape)}"
