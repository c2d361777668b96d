"""Quantising at its edges, and what formats refuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from format_cases import blockwise, finite, scales
from hypothesis import given, settings
from hypothesis import strategies as st
from recipe_trees import raw
from torch import Tensor

from graphshard.core.errors import LoadError
from graphshard.runtime.weights.formats import (
    dequantize_blocks,
    dequantize_int4,
    dequantize_mxfp4,
    dequantize_nvfp4,
    dequantize_per_channel,
    dequantize_per_part,
    dequantize_per_tensor,
    int4_values,
)
from graphshard.runtime.weights.quantize import (
    amax_of_rows,
    e8m0_values,
    fp8_scale,
    pack_int4,
    quantize_fp8,
    requantize_ue8m0,
)

E4M3_MAX = 448.0
TINY = torch.finfo(torch.float32).tiny


def test_scales_of_zeros_and_of_the_smallest_values() -> None:
    amax = torch.tensor([0.0, 448.0, 1.0, 1e-42, torch.finfo(torch.float32).max])
    scale = fp8_scale(amax, "float8_e4m3fn")
    assert scale.tolist()[:2] == [1.0, 1.0] and scale[3] == TINY
    assert torch.equal(scale[[2, 4]], amax[[2, 4]] / E4M3_MAX)
    values = torch.tensor([[0.0, -0.0], [448.0, -1e-9], [1.0, -1.0], [1e-42, -1e-42], [3e38, -3e38]])
    made = quantize_fp8(values, scale, "float8_e4m3fn")
    assert raw(made[0]) == b"\x00\x80" and raw(made[1]) == b"\x7e\x80" and raw(made[2]) == b"\x7e\xfe"
    assert made.float().isfinite().all()


def test_rounding_is_to_nearest_even_after_a_division() -> None:
    values = torch.tensor([[1.0625, 1.1875, 448.0, -432.0]])  # halfway: down to 1.0, up to 1.25, and up to -448
    assert quantize_fp8(values, torch.ones(1), "float8_e4m3fn").float().tolist() == [[1.0, 1.25, 448.0, -448.0]]
    odd = torch.tensor([3.0]) / 448  # 3 / (3 / 448) is 448 again; a product with the reciprocal may miss it
    assert quantize_fp8(torch.tensor([[3.0, -3.0]]), odd, "float8_e4m3fn").float().tolist() == [[448.0, -448.0]]


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_values_without_a_scale_are_refused(value: float) -> None:
    values = torch.ones(5, 3, dtype=torch.bfloat16)
    values[1, 2] = values[4, 0] = value
    with pytest.raises(LoadError, match="proj: 2 of 5 largest magnitudes are infinite or NaN, so there is no scale"):
        amax_of_rows(values, "proj")
    weight = torch.ones(4, 4).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 2.0], [1.0, value]])
    with pytest.raises(LoadError, match="proj, row 2 on: 1 of 2 largest magnitudes are infinite or NaN"):
        requantize_ue8m0(weight, scale, (2, 2), "proj")


def test_blocks_of_zeros_and_of_nan() -> None:
    weight = torch.zeros(4, 4).to(torch.float8_e4m3fn)
    made, scale = requantize_ue8m0(weight, torch.full((2, 2), 3.0), (2, 2), "w")
    assert not any(raw(made)) and raw(scale) == b"\x7f" * 4
    weight.view(torch.uint8)[3, 3] = 0x7F
    with pytest.raises(LoadError, match="row 2 on"):
        requantize_ue8m0(weight, torch.ones(2, 2), (2, 2), "w")


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4), st.integers(1, 4), st.integers(0, 10**6))
def test_requantised_blocks_keep_their_values(rows: int, columns: int, height: int, width: int, seed: int) -> None:
    block = (height, width)
    weight = finite((rows, columns), "float32", seed).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = scales((-(-rows // height), -(-columns // width)), seed)
    made, powers = requantize_ue8m0(weight, scale, block, "w")
    before, after = blockwise(weight, scale, block), dequantize_blocks(made, powers, block)
    assert torch.frexp(powers.float())[0].eq(0.5).all()
    # half a step of E4M3's 3 bits of mantissa, or of its smallest value 2**-9
    step = blockwise(torch.ones(rows, columns), powers, block)
    assert ((after - before).abs() <= torch.maximum(before.abs() * 2.0**-4, step * 2.0**-10)).all()
    again, same = requantize_ue8m0(made, powers.float(), block, "w")
    assert raw(dequantize_blocks(again, same, block)) == raw(after)
    assert (same.view(torch.uint8) <= powers.view(torch.uint8)).all()


@pytest.mark.parametrize("power", [-127, -126, -1, 0, 1, 110])
@pytest.mark.parametrize(("value", "shift"), [(448.0, 0), (416.0, 0), (224.0, -1), (256.0, 0)])
def test_powers_are_the_smallest_that_hold_the_block(power: int, value: float, shift: int) -> None:
    weight = torch.tensor([[value]]).to(torch.float8_e4m3fn)
    made, scale = requantize_ue8m0(weight, torch.tensor([[2.0**power]]), (128, 128), "w")
    expected = max(-127, power + shift)
    assert scale.view(torch.uint8).item() == expected + 127
    assert made.float().item() == value * 2.0 ** (power - expected)


def test_all_e8m0_bytes() -> None:
    values = e8m0_values(torch.arange(256, dtype=torch.int32).to(torch.uint8))
    assert values[:255].tolist() == [2.0 ** (byte - 127) for byte in range(255)] and values[255].isnan()


def test_int4_out_of_range_is_refused_and_all_bytes_come_back() -> None:
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(8, 32)
    assert raw(pack_int4(int4_values(every), "w")) == raw(every)
    for value in (-9, 8):
        values = torch.tensor([[0, value]], dtype=torch.int8)
        with pytest.raises(
            LoadError, match=f"w: values from {min(0, value)} to {max(0, value)}, and int4 holds -8 to 7"
        ):
            pack_int4(values, "w")


W = torch.ones(192, 64).to(torch.float8_e4m3fn)
PACKED = torch.zeros(4, 32, dtype=torch.uint8)
GROUPS = torch.ones(4, 4).to(torch.float8_e4m3fn)
WRONG: list[tuple[Callable[[], Tensor], str]] = [
    (lambda: dequantize_per_tensor(W, torch.ones(3)), r"scales per tensor: 3 were given, 1 needed for float8_e4m3fn"),
    (lambda: dequantize_per_tensor(W, torch.ones(0)), "scales per tensor: 0 were given"),
    (lambda: dequantize_per_part(W, torch.ones(1), [96, 96]), "scales per part: 1 were given, 2 needed"),
    (lambda: dequantize_per_part(W, torch.ones(2), [96, 64]), r"parts of \[96, 64\] rows have 160 together"),
    (lambda: dequantize_per_channel(W, torch.ones(1)), r"scales per channel: 1 were given, 192 needed"),
    (lambda: dequantize_per_channel(W, torch.ones(64)), "scales per channel: 64 were given"),
    (lambda: dequantize_blocks(W, torch.ones(1, 1)), r"scales per block: \[1, 1\] were given, \[2, 1\] are needed"),
    (lambda: dequantize_blocks(W, torch.ones(2)), r"scales per block: \[2\] were given"),
    (
        lambda: dequantize_blocks(W, torch.ones(2, 1), part_rows=[64, 64, 64]),
        r"\[2, 1\] were given, \[3, 1\] are needed for .* over its parts of \[64, 64, 64\] rows each on their own",
    ),
    (
        lambda: dequantize_blocks(W, torch.ones(2, 1), part_rows=[192, 64]),
        "rows have 256 together",
    ),
    (lambda: dequantize_blocks(W, torch.ones(2, 1), skipped_rows=65), r"\[3, 1\] are needed"),
    (lambda: dequantize_mxfp4(PACKED, torch.ones(4, 1).to(torch.float8_e8m0fnu)), r"MXFP4 scales per 32: \[4, 1\]"),
    (
        lambda: dequantize_nvfp4(PACKED, GROUPS[:2], torch.ones(1)),
        r"NVFP4 scales per 16: \[2, 4\] were",
    ),
    (lambda: dequantize_nvfp4(PACKED, GROUPS, torch.ones(2)), r"scales per tensor: 2 were given, 1 needed"),
    (lambda: dequantize_nvfp4(PACKED, GROUPS, torch.ones(1), part_rows=[2, 2]), "scales per part: 1 were given, 2"),
    (
        lambda: dequantize_blocks(W, torch.ones(2, 1, dtype=torch.uint8)),
        r"per block are uint8\[2, 1\]: give them",
    ),
    (lambda: dequantize_per_tensor(W, torch.tensor(1)), r"scales per tensor are int64\[\]"),
    (lambda: dequantize_nvfp4(PACKED, GROUPS.view(torch.uint8), torch.ones(1)), "scales NVFP4 are uint8"),
    (lambda: dequantize_mxfp4(PACKED, torch.ones(4, 2)), r"MXFP4 scales are float32\[4, 2\]: give float8_e8m0fnu"),
    (lambda: dequantize_int4(PACKED.view(torch.int32), torch.ones(4, 2), 32), r"int32\[4, 8\] is not packed two"),
    (lambda: dequantize_int4(PACKED, torch.ones(4, 2), 0), "a scale for each 0 of a row"),
    (lambda: dequantize_blocks(W[None], torch.ones(1, 2)), r"float8_e4m3fn\[1, 192, 64\]: blocks .* from a matrix"),
    (lambda: dequantize_blocks(W, torch.ones(2, 1), (0, 128)), r"blocks of \(0, 128\) of"),
    (lambda: dequantize_per_part(W, torch.ones(2), [193, -1]), r"parts of \[193, -1\] rows have 192 together"),
    (lambda: dequantize_int4(PACKED, torch.ones(4, 3), 32), r"int4 scales per 32: \[4, 3\] were given, \[4, 2\] are"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_scales_that_do_not_fit_are_refused(call: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        call()


def test_weights_without_elements() -> None:
    none = W[:0]
    assert dequantize_per_tensor(none, torch.ones(())).shape == (0, 64)
    assert dequantize_per_part(none, torch.ones(0), []).shape == (0, 64)
    assert dequantize_per_channel(none, torch.ones(0, 1)).shape == (0, 64)
    assert dequantize_blocks(none, torch.ones(0, 1)).shape == (0, 64)
    assert dequantize_blocks(none, torch.ones(0, 1), part_rows=[]).shape == (0, 64)
    assert dequantize_mxfp4(PACKED[:0], torch.ones(0, 2, dtype=torch.uint8)).shape == (0, 64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_nothing_is_written_to_what_is_quantised(dtype: str) -> None:
    values = finite((6, 4), dtype, 5)
    before = raw(values)
    made = quantize_fp8(values, fp8_scale(amax_of_rows(values, "w"), "float8_e5m2"), "float8_e5m2")
    assert raw(values) == before and made.dtype == torch.float8_e5m2
    packed = finite((6, 4), "int8", 5)
    before = raw(packed)
    pack_int4(packed, "w")
    assert raw(packed) == before
    weight, scale = finite((6, 4), "float32", 5).to(torch.float8_e4m3fn), scales((3, 2), 1)
    before = raw(weight) + raw(scale)
    requantize_ue8m0(weight, scale, (2, 2), "w")
    assert raw(weight) + raw(scale) == before
