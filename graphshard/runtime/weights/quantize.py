"""Quantising and packing, on the host: the same bytes whichever rows are done together.

Everything is computed element by element in float32, so a value depends on its scale alone. FP8 values are
`value / scale` (a division, not a product with the reciprocal), cut to the largest finite value, rounded to nearest
even; -0 stays -0. What dequantises is `fp8 * scale`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphshard.core.errors import LoadError
from graphshard.load.recipe_types import block_counts

_E8M0_BIAS = 127
_ROW_BLOCK_BYTES = 1 << 20
"""Float32 temporaries of a row by row conversion."""


def cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """`values` as `dtype`. NaN becomes `dtype`'s own: what torch keeps of one depends on how many it casts at once."""
    made = values.to(dtype)
    if dtype == values.dtype or not (values.is_floating_point() and dtype.is_floating_point):
        return made
    nan = values.isnan()
    return (
        torch.where(nan, torch.full((), float("nan"), dtype=dtype, device=values.device), made) if nan.any() else made
    )


def fp8_scale(amax: Tensor, dtype: str) -> Tensor:
    """Float32 scales for the largest magnitudes `amax` (float32, any shape): `amax / finfo(dtype).max`.

    Where amax is 0 the scale is 1, so zeros stay zeros. It is never below the smallest normal float32.
    """
    info = torch.finfo(getattr(torch, dtype))
    scale = (amax / info.max).clamp_(min=torch.finfo(torch.float32).tiny)
    return torch.where(amax == 0, torch.ones_like(scale), scale)


def amax_of_rows(values: Tensor, where: str) -> Tensor:
    """The largest magnitude of each row of `values` [rows, width], as float32 [rows]; 0 for rows without elements.

    Raises:
        LoadError: one is infinite or NaN; `where` names the values.
    """
    amax = torch.zeros(values.shape[0], dtype=torch.float32, device=values.device)
    for begin, end in _row_blocks(values):
        if values.shape[1]:
            amax[begin:end] = values[begin:end].float().abs().amax(dim=1)
    check_finite(amax, where)
    return amax


def check_finite(values: Tensor, where: str) -> None:
    """Raise unless all `values` are finite.

    Raises:
        LoadError: one is infinite or NaN.
    """
    bad = int((~values.isfinite()).sum())
    if bad:
        raise LoadError(
            f"{where}: {bad} of {values.numel()} largest magnitudes are infinite or NaN, so there is no scale; "
            "mend the checkpoint, or load this weight as it is"
        )


def quantize_fp8(values: Tensor, scale: Tensor, dtype: str) -> Tensor:
    """`values` [rows, width] as FP8, with one float32 `scale` for each row, [rows], or for all, [1]."""
    torch_dtype = getattr(torch, dtype)
    limit = torch.finfo(torch_dtype).max
    out = torch.empty(values.shape, dtype=torch_dtype, device=values.device)
    for begin, end in _row_blocks(values):
        by = scale if scale.numel() == 1 else scale[begin:end, None]
        out[begin:end] = values[begin:end].float().div(by).clamp_(-limit, limit).to(torch_dtype)
    return out


def requantize_ue8m0(weight: Tensor, scale: Tensor, block: tuple[int, int], where: str) -> tuple[Tensor, Tensor]:
    """FP8 rows with float32 block scales as FP8 rows with power-of-two block scales.

    `weight` [n, k] begins at a block's first row; `scale` is [ceil(n / block[0]), ceil(k / block[1])]. A new scale is
    the smallest power of two that is not below amax / finfo.max, amax being the largest |weight * scale| of its block
    in float32; 1 for a block of zeros. Returns the weight in its dtype, and the scales in float8_e8m0fnu.

    Raises:
        LoadError: a block's amax is infinite or NaN; `where` names the weight.
    """
    limit = torch.finfo(weight.dtype).max
    counts = block_counts(weight.shape, block)
    out = torch.empty_like(weight)
    new_scale = torch.empty(counts, dtype=torch.uint8, device=weight.device)
    for i in range(counts[0]):
        rows = slice(i * block[0], min((i + 1) * block[0], weight.shape[0]))
        values = weight[rows].float().mul_(_by_column(scale[i], weight.shape[1], block[1]))
        columns = torch.zeros(counts[1] * block[1], dtype=torch.float32, device=weight.device)
        columns[: weight.shape[1]] = values.abs().amax(dim=0)
        amax = columns.view(counts[1], block[1]).amax(dim=1)
        check_finite(amax, f"{where}, row {rows.start} on")
        new_scale[i] = _ceil_e8m0(torch.where(amax == 0, torch.ones_like(amax), amax / limit))
        values.div_(_by_column(e8m0_values(new_scale[i]), weight.shape[1], block[1]))
        out[rows] = values.clamp_(-limit, limit).to(weight.dtype)
    return out, new_scale.view(torch.float8_e8m0fnu)


def e8m0_values(scale: Tensor) -> Tensor:
    """Power-of-two scales, `float8_e8m0fnu` or its bytes in uint8, as float32; byte 255 is NaN."""
    return scale.view(torch.float8_e8m0fnu).float()


def pack_int4(values: Tensor, where: str) -> Tensor:
    """Int8 `values` [rows, width] from -8 to 7, two to a byte [rows, width / 2]: the even column in the low bits.

    Raises:
        LoadError: a value is out of range; `where` names them.
    """
    if values.numel() and (int(values.min()) < -8 or int(values.max()) > 7):
        raise LoadError(f"{where}: values from {int(values.min())} to {int(values.max())}, and int4 holds -8 to 7")
    nibbles = values.view(torch.uint8) & 0xF
    return nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)


def _ceil_e8m0(values: Tensor) -> Tensor:
    """The byte of the smallest power of two not below each of `values` (float32, > 0), at least 2**-127."""
    mantissa, exponent = torch.frexp(
        values.clamp(min=2.0**-_E8M0_BIAS)
    )  # values = mantissa * 2**exponent, mantissa in [0.5, 1)
    power = exponent - (mantissa == 0.5).int()
    return (power + _E8M0_BIAS).to(torch.uint8)


def _by_column(scale: Tensor, num_columns: int, block: int) -> Tensor:
    """One scale for each column, from one for each block of columns."""
    return scale.repeat_interleave(block)[:num_columns]


def _row_blocks(values: Tensor) -> list[tuple[int, int]]:
    """Ranges of rows whose float32 copies take about `_ROW_BLOCK_BYTES`."""
    step = max(1, _ROW_BLOCK_BYTES // (4 * max(1, values.shape[1])))
    return [(begin, min(begin + step, values.shape[0])) for begin in range(0, values.shape[0], step)]
