"""Servers load under a default dtype and a default device of their own: they change no byte of ours."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from server_modules import PARTS, PLAN, WIDTH, checkpoint_of, load_all, online_fp8, prepare_server, server_model
from small_modules import bits
from torch import Tensor

from graphshard.comm.group import LocalGroup
from graphshard.load.recipe import Cast, QuantizeFp8, Read, Recipe, RequantizeUe8m0, ScaleOf, Transpose
from graphshard.load.recipe_types import typed
from graphshard.runtime.weights import formats
from graphshard.runtime.weights.evaluate import amax, evaluate, scale_from_amax, scaled_per_tensor
from graphshard.runtime.weights.tensors_in_hand import TensorsInHand


@contextlib.contextmanager
def defaults(name: str) -> Iterator[None]:
    before = torch.get_default_dtype()
    try:
        with torch.device("meta") if name == "meta" else contextlib.nullcontext():
            torch.set_default_dtype(torch.float32 if name == "meta" else getattr(torch, name))
            yield
    finally:
        torch.set_default_dtype(before)


def engine() -> list[Tensor]:
    """The weights of a module that was prepared, loaded, quantised online, finalized and updated."""
    found = []
    for per in ("tensor", "channel"):
        follow = {"*_scale": 1} if per == "channel" else {}
        prepared = prepare_server(copy.deepcopy(EMPTY), LocalGroup(1)[0], PARTS, follow=follow)
        load_all(prepared, TENSORS, PARTS)
        online_fp8(prepared, per)
        with prepared.finalize(**PLAN) as attached:
            attached.update({name: tensor.clone() for name, tensor in prepared.module.state_dict().items()})
            found += [attached.whole_weight(weight.name) for weight in attached.runtime.model.weights]
    return found


EMPTY = server_model(PARTS, WIDTH)
TENSORS = checkpoint_of(server_model(PARTS, WIDTH, "cpu"))
W = torch.randn(300, 200, generator=torch.Generator().manual_seed(0))
STORE = {"w": W, "fp8": W.to(torch.float8_e4m3fn), "scale": W[:3, :2].abs() + 0.1}
QUANTIZED = (QuantizeFp8(Read("w"), "tensor"), QuantizeFp8(Read("w"), "channel"))
BLOCKS = RequantizeUe8m0(Read("fp8"), Read("scale"))
RECIPES: list[Recipe] = [*QUANTIZED, *map(ScaleOf, QUANTIZED), BLOCKS, ScaleOf(BLOCKS), Cast(Read("w"), "bfloat16")]
RECIPES.append(Transpose(Read("w")))


def recipes() -> list[Tensor]:
    """What recipes make."""

    def rows(name: str, begin: int, end: int) -> Tensor:
        return STORE[name][begin:end]

    found = []
    for recipe in RECIPES:
        result = typed(recipe, TensorsInHand(STORE, ()).entries)
        scales = {each.node: scale_from_amax(each, amax(each, 0, 1, rows)) for each in scaled_per_tensor(result)}
        found.append(evaluate(result, 0, result.num_rows, rows, scales))
    return found


def dequantised() -> list[Tensor]:
    """What each format means."""
    packed, fp8 = W[:, :32].contiguous().view(torch.uint8), STORE["fp8"]
    return [
        formats.dequantize_per_part(fp8, STORE["scale"][0], [100, 200]),
        formats.dequantize_blocks(fp8, STORE["scale"]),
        formats.dequantize_blocks(fp8, STORE["scale"], part_rows=[128, 128, 44]),
        formats.dequantize_mxfp4(packed, packed[:, :8]),
        formats.dequantize_int4(packed, W[:, :8], 32),
    ]


@pytest.mark.parametrize("name", ["bfloat16", "float64", "meta"])
@pytest.mark.parametrize("made", [engine, recipes, dequantised])
def test_torchs_defaults_change_nothing(made: Callable[[], list[Tensor]], name: str) -> None:
    expected = made()
    with defaults(name):
        found = made()
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(bits(mine), bits(theirs))
