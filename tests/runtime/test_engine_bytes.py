"""The engine path gives the bytes of byte-range loading: every format, recipe, cut and number of ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import engine_programs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_on_ranks
from server_modules import (
    BLOCK,
    PLAN,
    ServerLinear,
    checkpoint_of,
    load_all,
    online_fp8,
    prepare_server,
    server_model,
    shard_window,
)
from torch import Tensor, nn

import graphshard
from graphshard.comm.group import Group
from graphshard.load.recipe import PackInt4, QuantizeFp8, Read, Recipe, RequantizeUe8m0, ScaleOf
from graphshard.runtime.attach.spec import ModuleSegments
from graphshard.runtime.engine import filler
from graphshard.runtime.runtime import Runtime
from graphshard.runtime.weights.quantize import pack_int4, requantize_ue8m0
from graphshard.runtime.weights.whole import whole_weight


def by_byte_ranges(group: Group, like: Runtime, tensors: dict[str, Tensor], recipes: dict[str, Recipe]) -> Runtime:
    """The same weights under the same plan, each rank reading its own byte ranges of `tensors`."""
    return graphshard.compile(
        ModuleSegments(like.model),
        group,
        checkpoint=tensors,
        recipes=recipes,
        ignore=["*"],
        plan=like.plan,
        capture_sizes=(),
    )


def whole_weights(runtime: Runtime) -> dict[str, bytes]:
    return {
        weight.name: whole_weight(runtime, weight.name).contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for weight in runtime.model.weights
    }


def same_bytes(group: Group, one: Runtime, other: Runtime) -> list[str]:
    """What differs."""
    wrong = [] if one.layout.digest == other.layout.digest else ["layouts differ"]
    wrong += [] if shard_window(one) == shard_window(other) else ["chunks differ"]
    mine, theirs = whole_weights(one), whole_weights(other)
    wrong += [f"{name} differs" for name in mine if mine[name] != theirs[name]]
    group.barrier()
    return wrong


def plain_rank(group: Group, dtype: str, parts: list[int], width: int, row_multiple: int) -> list[str]:
    model = server_model(parts, width, dtype=getattr(torch, dtype))
    tensors = checkpoint_of(server_model(parts, width, "cpu", dtype=getattr(torch, dtype)))
    prepared = prepare_server(model, group, parts, row_multiple=row_multiple)
    load_all(prepared, tensors, parts)
    with prepared.finalize(**PLAN) as attached, by_byte_ranges(group, attached.runtime, tensors, {}) as other:
        return same_bytes(group, attached.runtime, other)


cuts = {
    "world_size": st.integers(1, 8),
    "parts": st.lists(st.integers(0, 40), min_size=3, max_size=3).filter(any),
    "width": st.integers(1, 33),
    "row_multiple": st.sampled_from([1, 3, 16]),
}
DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("examples", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_bytes_equal_those_of_byte_ranges(examples: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(dtype=st.sampled_from(DTYPES), window=st.sampled_from([7, 64, 1 << 20]), **cuts)
    def check(world_size: int, dtype: str, parts: list[int], width: int, row_multiple: int, window: int) -> None:
        with mock.patch.object(filler, "MAX_WINDOW_BYTES", window):  # small ones make many stripes
            found = run_on_ranks(plain_rank, world_size, dtype, parts, width, row_multiple)
        assert found == [[]] * world_size

    check()


# --- online FP8: the scales of rows on their own are those of the whole ---


def fp8_recipes(model: Any, per: str) -> dict[str, Recipe]:
    found: dict[str, Recipe] = {}
    for weight in model.weights:
        if weight.name.endswith(".weight") and weight.dtype == "float8_e4m3fn":
            node = QuantizeFp8(Read(weight.name), per)  # type: ignore[arg-type]
            found[weight.name] = node
            found[f"{weight.name}_scale"] = ScaleOf(node)
    return found


def fp8_rank(group: Group, per: str, parts: list[int], width: int, row_multiple: int) -> list[str]:
    model = server_model(parts, width)
    tensors = checkpoint_of(server_model(parts, width, "cpu"))
    follow = {"*.weight_scale": 1} if per == "channel" else {}
    prepared = prepare_server(model, group, parts, row_multiple=row_multiple, follow=follow)
    load_all(prepared, tensors, parts)
    online_fp8(prepared, per)
    with prepared.finalize(**PLAN) as attached:
        recipes = fp8_recipes(attached.runtime.model, per)
        with by_byte_ranges(group, attached.runtime, tensors, recipes) as other:
            return same_bytes(group, attached.runtime, other)


@pytest.mark.parametrize("per", ["tensor", "channel"])
@pytest.mark.parametrize("examples", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_online_fp8_makes_the_bytes_that_its_recipe_makes(per: str, examples: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(**cuts)
    def check(world_size: int, parts: list[int], width: int, row_multiple: int) -> None:
        assert run_on_ranks(fp8_rank, world_size, per, parts, width, row_multiple) == [[]] * world_size

    check()


def rank_with_scales(group: Group, rows: int, width: int) -> list[str]:
    """FP8 with float32 block scales, requantised by this rank's rows and scales of blocks to powers of two."""
    model = server_model([rows, 0, 0], width, dtype=torch.float8_e4m3fn)
    like = server_model([rows, 0, 0], width, "cpu", dtype=torch.float8_e4m3fn)
    for module in (model, like):
        for linear in linears(module):
            add_block_scale(linear)
    tensors = checkpoint_of(like)
    tensors |= {name: tensor.abs() + 0.1 for name, tensor in tensors.items() if name.endswith("scale")}
    prepared = prepare_server(model, group, [rows, 0, 0], row_multiple=BLOCK, follow={"*.weight_scale": BLOCK})
    for name, tensor in tensors.items():
        prepared.load(name, tensor)
    for linear in linears(model):
        weight, scale = requantize_ue8m0(linear.weight.detach(), linear.weight_scale.detach(), (BLOCK, BLOCK), "rows")
        linear.weight.data.copy_(weight)
        linear.weight_scale = nn.Parameter(scale, requires_grad=False)
    with prepared.finalize(**PLAN) as attached:
        recipes: dict[str, Recipe] = {}
        for weight in attached.runtime.model.weights:
            if weight.name.endswith(".weight") and weight.dtype == "float8_e4m3fn":
                node = RequantizeUe8m0(Read(weight.name), Read(f"{weight.name}_scale"), (BLOCK, BLOCK))
                recipes |= {weight.name: node, f"{weight.name}_scale": ScaleOf(node)}
        with by_byte_ranges(group, attached.runtime, tensors, recipes) as other:
            return same_bytes(group, attached.runtime, other)


def linears(module: nn.Module) -> list[ServerLinear]:
    return [inner for inner in module.modules() if isinstance(inner, ServerLinear)]


def add_block_scale(linear: ServerLinear) -> None:
    rows, width = linear.weight.shape
    shape = (-(-rows // BLOCK), -(-width // BLOCK))
    linear.weight_scale = nn.Parameter(torch.empty(shape, device=linear.weight.device), requires_grad=False)


@pytest.mark.parametrize(("rows", "width", "world_size"), [(300, 192, 3), (576, 64, 4), (128, 130, 2)])
def test_block_fp8_with_odd_edges_is_requantised_on_the_rows_of_each_rank(
    rows: int, width: int, world_size: int
) -> None:
    assert run_on_ranks(rank_with_scales, world_size, rows, width) == [[]] * world_size


def packing_rank(group: Group) -> list[str]:
    model = server_model([5, 3, 2], 12, dtype=torch.int8)
    tensors = checkpoint_of(server_model([5, 3, 2], 12, "cpu", dtype=torch.int8))
    tensors |= {
        name: (torch.arange(tensor.numel()) % 16 - 8).to(torch.int8).view(tensor.shape)
        for name, tensor in tensors.items()
        if tensor.dtype == torch.int8
    }
    prepared = prepare_server(model, group, [5, 3, 2])
    load_all(prepared, tensors, [5, 3, 2])
    for linear in linears(model):
        linear.weight = nn.Parameter(pack_int4(linear.weight.detach(), "rows"), requires_grad=False)
    with prepared.finalize(**PLAN) as attached:
        packed = [w.name for w in attached.runtime.model.weights if w.dtype == "uint8"]
        recipes: dict[str, Recipe] = {name: PackInt4(Read(name)) for name in packed}
        with by_byte_ranges(group, attached.runtime, tensors, recipes) as other:
            return [*same_bytes(group, attached.runtime, other), *([] if len(packed) == 4 else [f"packed {packed}"])]


def test_packed_rows_are_redistributed_with_fewer_bytes_a_row() -> None:
    assert run_on_ranks(packing_rank, 3) == [[]] * 3


# --- formats that come as they are ---


def raw_rank(group: Group, dtype: str) -> list[str]:
    """Any bytes at all, NaN payloads and -0 among them."""
    model = server_model([7, 2, 4], 6, dtype=getattr(torch, dtype))
    tensors = checkpoint_of(server_model([7, 2, 4], 6, "cpu"))
    generator = torch.Generator().manual_seed(1)
    for name, tensor in model.state_dict().items():
        if tensor.dtype == getattr(torch, dtype):
            noise = torch.randint(0, 256, (tensor.nbytes,), dtype=torch.uint8, generator=generator)
            tensors[name] = noise.view(tensor.dtype).view(tensor.shape)
    prepared = prepare_server(model, group, [7, 2, 4])
    load_all(prepared, tensors, [7, 2, 4])
    with prepared.finalize(**PLAN) as attached, by_byte_ranges(group, attached.runtime, tensors, {}) as other:
        return same_bytes(group, attached.runtime, other)


@pytest.mark.parametrize("dtype", ["uint8", "float4_e2m1fn_x2", "float8_e8m0fnu", "bfloat16"])
def test_any_bytes_of_any_format_arrive(dtype: str) -> None:
    assert run_on_ranks(raw_rank, 3, dtype) == [[]] * 3


# --- over processes, and over the other transport ---


@pytest.mark.parametrize(
    ("mode", "transport"),
    [
        ("threads", "pull"),
        ("threads", "nccl"),
        ("processes", "pull"),
        pytest.param("processes", "nccl", marks=pytest.mark.slow),
    ],
)
def test_both_transports_and_kinds_of_ranks(mode: str, transport: str) -> None:
    assert run_on_ranks(engine_programs.transported_rank, 2, transport, mode=mode) == [[], []]
