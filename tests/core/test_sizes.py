"""Sizes against torch's own, and bytes as text."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphshard.core.errors import SpecError
from graphshard.core.sizes import BYTE_UNITS, DTYPE_BITS, align_up, dtype_bits, format_bytes, num_bytes, parse_bytes
from graphshard.core.specs import ModelSpec, SegmentSpec, StepShape, WeightSpec

TORCH_DTYPES = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}


@pytest.mark.parametrize("name", sorted(TORCH_DTYPES))
def test_every_dtype_of_torch_has_its_bits(name: str) -> None:
    assert dtype_bits(name) == 8 * TORCH_DTYPES[name].itemsize


def test_unknown_dtype_lists_the_known_ones() -> None:
    with pytest.raises(SpecError, match=r"unknown dtype 'fp8'; known are .*bfloat16.*float8_e4m3fn"):
        WeightSpec("w", (2,), "fp8")


@given(
    shape=st.lists(st.integers(0, 4), max_size=4),
    data=st.data(),
    dtype=st.sampled_from(["uint8", "bfloat16", "float32", "float64", "bool", "float8_e5m2"]),
)
def test_strided_bytes_are_those_of_torchs_storage(shape: list[int], data: st.DataObject, dtype: str) -> None:
    strides = data.draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape)))
    tensor = torch.empty_strided(shape, strides, dtype=TORCH_DTYPES[dtype])
    assert num_bytes(shape, dtype, strides) == tensor.untyped_storage().nbytes()
    assert num_bytes(shape, dtype, None) == tensor.numel() * tensor.itemsize


@pytest.mark.parametrize("size", [2**31 - 1, 2**31, 2**32 + 16, 3 * 2**30, 5 * 2**30])
def test_sizes_beyond_32_bits_are_exact(size: int) -> None:
    assert WeightSpec("w", (size,), "uint8").num_bytes == size
    assert WeightSpec("w", (size, 2), "float64", (2, 1)).num_bytes == 16 * size


def test_packed_fp4_counts_pairs() -> None:
    assert WeightSpec("w", (7168, 1792), "float4_e2m1fn_x2").num_bytes == 7168 * 1792


@given(value=st.integers(0, 2**70), alignment=st.integers(1, 2**20))
def test_align_up(value: int, alignment: int) -> None:
    aligned = align_up(value, alignment)
    assert aligned % alignment == 0 and value <= aligned < value + alignment


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("4096", 4096),
        ("7B", 7),
        ("14MiB", 14 << 20),
        ("1.5 GiB", 3 << 29),
        (" 64KiB ", 65536),
        ("2TiB", 1 << 41),
    ],
)
def test_parse_bytes(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "MiB", "14MB", "-1", "1e6", "1.5", "0.3KiB", "14 mib", "1 2"])
def test_parse_bytes_refuses(text: str) -> None:
    with pytest.raises(SpecError):
        parse_bytes(text)


@given(count=st.integers(1, 1023), unit=st.sampled_from(sorted(BYTE_UNITS)))
def test_format_bytes_reads_back(count: int, unit: str) -> None:
    assert parse_bytes(format_bytes(count * BYTE_UNITS[unit])) == count * BYTE_UNITS[unit]


def test_specs_refuse_what_cannot_be() -> None:
    weight = WeightSpec("w", (2, 2), "float32")
    with pytest.raises(SpecError, match="negative"):
        WeightSpec("w", (-1,), "float32")
    with pytest.raises(SpecError, match="1 strides for 2 dimensions"):
        WeightSpec("w", (2, 2), "float32", (1,))
    with pytest.raises(SpecError, match="named twice: w"):
        ModelSpec("m", (weight, weight), ())
    with pytest.raises(SpecError, match=r"layers\.1\.s reads unknown weights \['x'\]"):
        ModelSpec("m", (weight,), (SegmentSpec("s", 1, ("w", "x")),))
    with pytest.raises(SpecError, match="has no weight 'x'"):
        ModelSpec("m", (weight,), ()).weight("x")
    with pytest.raises(SpecError, match="start at 1"):
        StepShape(0)


def test_all_dtypes_are_whole_bytes() -> None:
    assert all(bits % 8 == 0 for bits in DTYPE_BITS.values())  # a view's offset is a byte
