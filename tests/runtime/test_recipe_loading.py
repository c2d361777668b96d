"""Loaded in chunks by any number of ranks and gathered again, a weight is what its recipe makes of whole tensors."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch
from format_cases import CASES, MERGED, Case, online
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recipe_loading import gathered
from recipe_trees import DTYPES, any_bytes, finite, plain, raw, recipes
from torch import Tensor

from graphshard.core.errors import LoadError
from graphshard.load.checkpoint import Checkpoint
from graphshard.recipes import Concat, QuantizeFp8, Read, Recipe, Reinterpret, ScaleOf, Slice, Transpose
from graphshard.runtime.weights.formats import dequantize_per_channel, dequantize_per_part

few = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def check_gathered(tensors: dict[str, Tensor], wanted: dict[str, Recipe], world_size: int, **choices: int) -> None:
    """Each weight, gathered, has the bytes that plain torch makes."""
    made = gathered(tensors, wanted, world_size, **choices)
    for name, recipe in wanted.items():
        assert raw(made[name]) == raw(plain(recipe, tensors)), (name, recipe)


def check_trees(
    trees: Sequence[tuple[Recipe, dict[str, Tensor]]], world_size: int, per_unit: int, alignment_bytes: int
) -> None:
    """Recipes over one store, each with names of its own."""
    tensors = {f"{i}.{name}": tensor for i, (_, own) in enumerate(trees) for name, tensor in own.items()}
    wanted = {f"weight{i}": _renamed(recipe, f"{i}.") for i, (recipe, _) in enumerate(trees)}
    check_gathered(tensors, wanted, world_size, per_unit=per_unit, alignment_bytes=alignment_bytes)


def _renamed(recipe: Recipe, prefix: str) -> Recipe:
    if isinstance(recipe, Read):
        return Read(prefix + recipe.name)
    values = {name: getattr(recipe, name) for name in recipe.__dataclass_fields__}
    for name, value in values.items():
        if hasattr(value, "__dataclass_fields__"):
            values[name] = _renamed(value, prefix)
        elif name == "parts":
            values[name] = tuple(_renamed(part, prefix) for part in value)
    return type(recipe)(**values)


ANY = (
    st.lists(recipes(depth=2), min_size=1, max_size=3),
    st.integers(1, 8),
    st.integers(1, 3),
    st.sampled_from([16, 256]),
)


@few
@given(*ANY)
def test_random_recipes(
    trees: list[tuple[Recipe, dict[str, Tensor]]], world_size: int, per_unit: int, alignment_bytes: int
) -> None:
    check_trees(trees, world_size, per_unit, alignment_bytes)


@pytest.mark.slow
@settings(few, max_examples=400)
@given(*ANY)
def test_many_random_recipes(
    trees: list[tuple[Recipe, dict[str, Tensor]]], world_size: int, per_unit: int, alignment_bytes: int
) -> None:
    check_trees(trees, world_size, per_unit, alignment_bytes)


def check_case(case: Case, world_size: int) -> None:
    """The bytes of plain torch, and dequantised the values of the checkpoint's own tensors."""
    made = gathered(case.tensors, case.recipes, world_size)
    for name, recipe in case.recipes.items():
        assert raw(made[name]) == raw(plain(recipe, dict(case.tensors))), name
    assert raw(case.dequantized(made)) == raw(case.expected)


@pytest.mark.parametrize("name", CASES)
def test_every_format_dequantises_to_the_checkpoint_values(name: str) -> None:
    check_case(CASES[name](), 1 + list(CASES).index(name) % 8)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", range(1, 9))
@pytest.mark.parametrize("name", CASES)
def test_every_format_on_any_number_of_ranks(name: str, world_size: int) -> None:
    check_case(CASES[name](), world_size)


@pytest.mark.parametrize("per", ["tensor", "channel"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_quantised_on_the_way_every_number_of_ranks_has_the_same_bytes(per: str, dtype: str) -> None:
    rows = MERGED[2]
    tensors, wanted = online(per, dtype, rows)
    for world_size in range(1, 9):
        check_gathered(dict(tensors), wanted, world_size)
    made = gathered(tensors, wanted, 2)
    values = torch.cat([tensor.float() for tensor in tensors.values()])
    if per == "channel":
        back = dequantize_per_channel(made["w"], made["s"])
        amax = values.abs().amax(dim=1, keepdim=True)
    else:
        back = dequantize_per_part(made["w"], made["s"], rows)
        amax = torch.cat([t.float().abs().max().expand(t.shape[0], 1) for t in tensors.values()])
    # half a step of the format at each value, and at amax / max where values are subnormal
    relative = 2.0**-4 if dtype == "float8_e4m3fn" else 2.0**-3
    assert ((back - values).abs() <= values.abs() * relative + amax * 2.0**-17).all()


def test_one_scale_element_on_16_ranks_and_scales_without_elements() -> None:
    node = QuantizeFp8(Read("w"), "tensor")
    tensors = {"w": finite((5, 3), "bfloat16", 1), "none": torch.empty(0, 4), "scalar": torch.tensor(3.0)}
    wanted: dict[str, Recipe] = {
        "w": node,
        "s": ScaleOf(node),
        "e": QuantizeFp8(Read("none"), "tensor"),
        "es": ScaleOf(QuantizeFp8(Read("none"), "tensor")),
        "c": QuantizeFp8(Read("none"), "channel"),
        "cs": ScaleOf(QuantizeFp8(Read("none"), "channel")),
        "x": Read("scalar"),
    }
    for per_unit in (1, 2, 7):
        check_gathered(tensors, wanted, 16, per_unit=per_unit)


def test_an_amax_is_the_largest_of_all_ranks_shares() -> None:
    for row in range(16):  # the largest value lies in each rank's share in turn
        values = torch.full((16, 4), 0.5)
        values[row, 1] = -3.0
        node = QuantizeFp8(Transpose(Read("w")), "tensor")
        made = gathered({"w": values}, {"w": node, "s": ScaleOf(node)}, 4)
        assert made["s"].tolist() == [float(torch.tensor(3.0) / 448)]
        assert made["w"].float()[1, row] == -448


def _file(path: Path, tensors: Sequence[tuple[str, str, list[int], bytes]], padding: str = "") -> Path:
    """A safetensors file with tensors right after each other, whatever their alignment."""
    header, at = {}, 0
    for name, dtype, shape, data in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode() + padding.encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for *_, data in tensors))
    return path


def _random(num_bytes: int, seed: int) -> bytes:
    return raw(any_bytes((num_bytes,), "uint8", seed))


@pytest.mark.parametrize("padding", ["", " ", "  ", "   "])
def test_an_order_of_odd_sizes_from_a_file_of_odd_offsets(tmp_path: Path, padding: str) -> None:
    order = [
        ("u8", "U8", [3], _random(3, 1)),
        ("scale", "F32", [1], bytes.fromhex("0100807f")),  # a signalling NaN
        ("fp8", "F8_E4M3", [5], bytes.fromhex("7fff80007e")),  # both NaNs, -0, 0
        ("bf16", "BF16", [2], bytes.fromhex("0080c1ff")),  # -0, a NaN with a payload
        ("fp4", "F4", [2, 8], _random(8, 2)),
        ("e8m0", "F8_E8M0", [3], bytes.fromhex("00ff7f")),
        ("e5m2", "F8_E5M2", [2], bytes.fromhex("7dfc")),
        ("bool", "BOOL", [1], b"\1"),
        ("i64", "I64", [1], _random(8, 3)),
        ("empty", "F32", [0, 3], b""),
        ("empty fp4", "F4", [0, 8], b""),
    ]
    path = _file(tmp_path / "model.safetensors", order, padding)
    stored = {name: data for name, _, _, data in order}
    wanted: dict[str, Recipe] = {name: Read(name) for name in stored}
    wanted |= {
        "fp4 row": Slice(Read("fp4"), 0, 1, 2),
        "fp4 columns": Slice(Read("fp4"), 1, 1, 3),
        "twice": Concat([Read("fp4"), Read("fp4")], 1),
        "words": Reinterpret(Concat([Read("u8"), Reinterpret(Read("fp8"), (5,), "uint8")]), (2,), "float32"),
    }
    for world_size in (1, 2, 3, 5, 8):
        with closing(Checkpoint(path)) as checkpoint:
            assert checkpoint.entries["fp4"].shape == (2, 4)  # two values to an element
            made = gathered(checkpoint, wanted, world_size, per_unit=len(wanted))
        assert {name: raw(made[name]) for name in stored} == stored
        fp4 = stored["fp4"]
        assert raw(made["fp4 row"]) == fp4[4:] and raw(made["fp4 columns"]) == fp4[1:3] + fp4[5:7]
        assert raw(made["twice"]) == fp4[:4] * 2 + fp4[4:] * 2
        assert raw(made["words"]) == stored["u8"] + stored["fp8"]


def test_fp4_of_odd_width_is_refused(tmp_path: Path) -> None:
    path = _file(tmp_path / "model.safetensors", [("w", "F4", [3, 7], bytes(11))])
    with pytest.raises(LoadError, match=r"tensor w .*\[3, 7\]"):
        Checkpoint(path)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_are_moved_whatever_the_dtype(dtype: str) -> None:
    """Every bit pattern of one byte and two stays as it is: NaN payloads, -0."""
    size = any_bytes((1,), dtype, 0).element_size()
    data = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.uint8)
    if dtype == "bool":
        data = data & 1
    tensor = data.view(any_bytes((1,), dtype, 0).dtype).view(64, -1)
    wanted: dict[str, Recipe] = {"w": Concat([Slice(Read("w"), 1, 7, 100 // size), Slice(Read("w"), 1, 0, 7)], 1)}
    if dtype != "float4_e2m1fn_x2":
        wanted["t"] = Transpose(Read("w"))
    check_gathered({"w": tensor}, wanted, 3)


@pytest.mark.parametrize("world_size", [2, 7])
def test_blocks_over_the_joints_of_groups(world_size: int) -> None:
    case = CASES["joined blocks"]()
    assert case.tensors["scale"].shape == (116, 1)
    check_case(case, world_size)
