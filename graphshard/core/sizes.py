"""Sizes: bits of a dtype, bytes of a tensor, bytes as text. Python ints throughout, so no size overflows."""

from __future__ import annotations

import re
from collections.abc import Sequence

from graphshard.core.errors import SpecError

DTYPE_BITS: dict[str, int] = {
    "bool": 8,
    **{f"{sign}int{bits}": bits for sign in ("", "u") for bits in (8, 16, 32, 64)},
    # torch stores its narrow integers one to a byte; packed ones are uint8 here
    **{f"{sign}int{bits}": 8 for sign in ("", "u") for bits in range(1, 8)},
    "float64": 64,
    "float32": 32,
    "float16": 16,
    "bfloat16": 16,
    "float8_e4m3fn": 8,
    "float8_e4m3fnuz": 8,
    "float8_e5m2": 8,
    "float8_e5m2fnuz": 8,
    "float8_e8m0fnu": 8,
    "float4_e2m1fn_x2": 8,  # one element of torch's is two packed values
    "complex32": 32,
    "complex64": 64,
    "complex128": 128,
    **dict.fromkeys(("qint8", "quint8", "quint4x2", "quint2x4", "bits8", "bits1x8", "bits2x4", "bits4x2"), 8),
    "bits16": 16,
    "qint32": 32,
}
"""Bits of one element, by torch's name without `torch.`."""

NARROW_DTYPES = frozenset(
    {
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
        *("float4_e2m1fn_x2", "quint4x2", "quint2x4", "bits1x8", "bits2x4", "bits4x2"),
    }
)
"""Dtypes whose values take less than a byte, alone in it or packed."""

BYTE_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}

_BYTES_TEXT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def dtype_bits(dtype: str) -> int:
    """Bits of one element of `dtype`; SpecError with the known names if it is none of torch's."""
    bits = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise SpecError(f"unknown dtype {dtype!r}; known are {', '.join(sorted(DTYPE_BITS))}")
    return bits


def has_narrow_elements(dtype: str) -> bool:
    """Whether values of `dtype` take less than a byte."""
    return dtype in NARROW_DTYPES


def num_bytes(shape: Sequence[int], dtype: str, strides: Sequence[int] | None) -> int:
    """Bytes from the first to the last element of a tensor (`strides` in elements; None: contiguous)."""
    bits = dtype_bits(dtype)
    if strides is None:
        num_elements = 1
        for size in shape:
            num_elements *= size
    elif 0 in shape:
        num_elements = 0
    else:
        num_elements = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return (num_elements * bits + 7) // 8


def align_up(value: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that is not below `value`."""
    return -(-value // alignment) * alignment


def parse_bytes(text: str) -> int:
    """Bytes of a text such as `14MiB`, `1.5 GiB` or `4096`; SpecError with the known units otherwise."""
    match = _BYTES_TEXT.fullmatch(text)
    unit = (match.group(2) or "B") if match else ""
    if match is None or unit not in BYTE_UNITS:
        raise SpecError(f"{text!r} is not a number of bytes; write 4096 or 14MiB (units: {', '.join(BYTE_UNITS)})")
    whole, _, fraction = match.group(1).partition(".")
    scale = int(10 ** len(fraction))
    value, rest = divmod(int(whole + fraction) * BYTE_UNITS[unit], scale)
    if rest:
        raise SpecError(f"{text!r} is not a whole number of bytes")
    return value


def bytes_unit(value: int) -> str:
    """The largest unit that `value` fills: `GiB`, `MiB`, ..., `B`."""
    return next((unit for unit in ("TiB", "GiB", "MiB", "KiB") if abs(value) >= BYTE_UNITS[unit]), "B")


def in_unit(value: int, unit: str) -> str:
    """`value` as a number of `unit`, with one digit (bytes have none)."""
    return str(value) if unit == "B" else f"{value / BYTE_UNITS[unit]:.1f}"


def format_bytes(value: int) -> str:
    """`value` in the largest unit that it fills: `14.0 MiB`, `9.1 GiB`, `512 B`."""
    unit = bytes_unit(value)
    return f"{in_unit(value, unit)} {unit}"
