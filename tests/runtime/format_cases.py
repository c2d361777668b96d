"""Weights of every storage format: how a checkpoint holds them, how a model wants them, and what they are as float32.

`expected` comes from the checkpoint's own tensors, each dequantised by itself, element by element; `dequantized` from
the weights as the model holds them, by the function a kernel's user would call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from recipe_trees import any_bytes, finite, torch_dtype
from torch import Tensor

from graphshard.recipes import Concat, PackInt4, QuantizeFp8, Read, Recipe, RequantizeUe8m0, ScaleOf, Slice
from graphshard.runtime.weights.formats import (
    dequantize_blocks,
    dequantize_float,
    dequantize_int4,
    dequantize_mxfp4,
    dequantize_nvfp4,
    dequantize_per_channel,
    dequantize_per_part,
    dequantize_per_tensor,
)

SIZES = ((64, 192), (192, 64), (192, 576), (576, 192), (40, 1856), (1856, 40))
"""Rows and columns: none a multiple of 128, as models have them."""

MERGED = ((192, 192), (64, 64, 64, 64), (384, 64, 64))
"""Rows of the parts of merged weights."""

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A format in one layout of the checkpoint and the model."""

    tensors: Weights
    recipes: Mapping[str, Recipe]
    dequantized: Callable[[Weights], Tensor]
    expected: Tensor


def blockwise(weight: Tensor, scale: Tensor, block: tuple[int, int] = (128, 128)) -> Tensor:
    """By the definition: each block times its scale."""
    out = torch.empty(weight.shape)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            out[at] = weight[at].float() * scale[i, j].float()
    return out


def scales(shape: tuple[int, ...], seed: int) -> Tensor:
    """Float32 scales of many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator) * 2.0 ** torch.randint(-12, 3, shape, generator=generator)


def _fp8(shape: tuple[int, ...], seed: int, dtype: str = "float8_e4m3fn") -> Tensor:
    """Random bytes but no NaN, whose products would not compare."""
    made = any_bytes(shape, dtype, seed)
    return torch.where(made.float().isfinite(), made.float(), 1.0).to(torch_dtype(dtype))


def floats(dtype: str, shape: tuple[int, int]) -> Case:
    make = _fp8 if "float8" in dtype else finite
    weight = make(shape, dtype=dtype, seed=1)
    return Case({"w": weight}, {"w": Read("w")}, lambda w: dequantize_float(w["w"]), weight.to(torch.float32))


def _parts(rows: tuple[int, ...], columns: int, dtype: str = "float8_e4m3fn") -> dict[str, Tensor]:
    return {f"w{i}": _fp8((num_rows, columns), i, dtype) for i, num_rows in enumerate(rows)}


def per_part(rows: tuple[int, ...], dtype: str) -> Case:
    """Parts with a scalar each, merged in the model."""
    weights = _parts(rows, 72, dtype)
    own = {f"s{i}": scales((), i) for i in range(len(rows))}
    recipes = {"w": Concat([Read(name) for name in weights]), "s": Concat([Read(name) for name in own])}
    expected = torch.cat([w.float() * s for w, s in zip(weights.values(), own.values(), strict=True)])
    return Case(weights | own, recipes, lambda w: dequantize_per_part(w["w"], w["s"], rows), expected)


def one_scalar(rows: tuple[int, ...]) -> Case:
    """Merged with a single scalar in the checkpoint; the model's merged weight has a scale for each part."""
    weight, scale = _fp8((sum(rows), 72), 3), scales((), 4)
    recipes = {"w": Read("merged"), "s": Concat([Read("scale")] * len(rows))}
    return Case(
        {"merged": weight, "scale": scale},
        recipes,
        lambda w: dequantize_per_part(w["w"], w["s"], rows),
        weight.float() * scale,
    )


def split(rows: tuple[int, ...], per: str) -> Case:
    """Merged in the checkpoint, separate in the model, with each cardinality of scales."""
    weight = _fp8((sum(rows), 200), 5)
    block_rows = -(-sum(rows) // 128)
    scale = {
        "tensor": scales((), 6),
        "part": scales((len(rows),), 6),
        "channel": scales((sum(rows), 1), 6),
        "block": scales((block_rows, 2), 6),
    }[per]
    begins = [sum(rows[:i]) for i in range(len(rows))]
    recipes: dict[str, Recipe] = {}
    for i, (begin, num_rows) in enumerate(zip(begins, rows, strict=True)):
        end = begin + num_rows
        recipes[f"w{i}"] = Slice(Read("merged"), 0, begin, end)
        recipes[f"s{i}"] = {
            "tensor": Read("scale"),
            "part": Slice(Read("scale"), 0, i, i + 1) if per == "part" else Read("scale"),
            "channel": Slice(Read("scale"), 0, begin, end),
            "block": Slice(Read("scale"), 0, begin // 128, -(-end // 128)),
        }[per]

    def dequantized(made: Weights) -> Tensor:
        function = {"channel": dequantize_per_channel, "block": dequantize_blocks}.get(per, dequantize_per_tensor)
        more = [{"skipped_rows": begin % 128} if per == "block" else {} for begin in begins]
        return torch.cat([function(made[f"w{i}"], made[f"s{i}"], **more[i]) for i in range(len(rows))])

    if per == "part":
        expected = torch.cat([weight[b : b + n].float() * s for b, n, s in zip(begins, rows, scale, strict=True)])
    else:
        expected = blockwise(weight, scale) if per == "block" else weight.float() * scale
    return Case({"merged": weight, "scale": scale}, recipes, dequantized, expected)


def per_channel(rows: tuple[int, ...], dtype: str) -> Case:
    weights = _parts(rows, 72, dtype)
    own = {f"s{i}": scales((num_rows, 1), i) for i, num_rows in enumerate(rows)}
    recipes = {"w": Concat([Read(name) for name in weights]), "s": Concat([Read(name) for name in own])}
    expected = torch.cat([w.float() * s for w, s in zip(weights.values(), own.values(), strict=True)])
    return Case(weights | own, recipes, lambda w: dequantize_per_channel(w["w"], w["s"]), expected)


def blocks(shape: tuple[int, int], dtype: str = "float8_e4m3fn") -> Case:
    weight, scale = _fp8(shape, 7, dtype), scales((-(-shape[0] // 128), -(-shape[1] // 128)), 8)
    return Case(
        {"w": weight, "s": scale},
        {"w": Read("w"), "s": Read("s")},
        lambda w: dequantize_blocks(w["w"], w["s"]),
        blockwise(weight, scale),
    )


def merged_blocks(rows: tuple[int, ...]) -> Case:
    """Parts with blocks of their own: the ceilings add up."""
    weights = _parts(rows, 192)
    own = {f"s{i}": scales((-(-num_rows // 128), 2), i) for i, num_rows in enumerate(rows)}
    recipes = {"w": Concat([Read(name) for name in weights]), "s": Concat([Read(name) for name in own])}
    expected = torch.cat([blockwise(w, s) for w, s in zip(weights.values(), own.values(), strict=True)])
    return Case(weights | own, recipes, lambda w: dequantize_blocks(w["w"], w["s"], part_rows=rows), expected)


def joined_blocks(num_groups: int, rows: int, columns: int) -> Case:
    """Groups whose blocks run over the joints: 1856 rows are 14.5 blocks."""
    weights = _parts((rows,) * num_groups, columns)
    scale = scales((-(-num_groups * rows // 128), -(-columns // 128)), 9)
    recipes = {"w": Concat([Read(name) for name in weights]), "s": Read("scale")}
    return Case(
        weights | {"scale": scale},
        recipes,
        lambda w: dequantize_blocks(w["w"], w["s"]),
        blockwise(torch.cat([w.view(torch.uint8) for w in weights.values()]).view(torch.float8_e4m3fn), scale),
    )


def requantized(rows: tuple[int, ...]) -> Case:
    """Parts requantised to powers of two, each on its own. Scales that are powers already lose nothing."""
    weights = _parts(rows, 192)
    own = {f"s{i}": 2.0 ** torch.arange(-6, -6 + 2 * -(-n // 128)).view(-1, 2) for i, n in enumerate(rows)}
    nodes = [RequantizeUe8m0(Read(f"w{i}"), Read(f"s{i}")) for i in range(len(rows))]
    recipes = {"w": Concat(nodes), "s": Concat([ScaleOf(node) for node in nodes])}
    expected = torch.cat([blockwise(w, s) for w, s in zip(weights.values(), own.values(), strict=True)])
    return Case(weights | own, recipes, lambda w: dequantize_blocks(w["w"], w["s"], part_rows=rows), expected)


def _e2m1(nibble: int) -> float:
    """By the bits: sign, two of exponent (bias 1), one of mantissa; subnormal where the exponent is 0."""
    sign, exponent, mantissa = nibble >> 3, nibble >> 1 & 3, nibble & 1
    magnitude = 2.0 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2
    return -magnitude if sign else magnitude


def _unpacked(packed: Tensor, value_of: Callable[[int], float]) -> Tensor:
    table = torch.tensor([[value_of(byte & 15), value_of(byte >> 4)] for byte in range(256)])
    return table[packed.view(torch.uint8).long()].flatten(-2)


def _grouped(values: Tensor, scale: Tensor, group: int) -> Tensor:
    pieces = [values[:, j * group : (j + 1) * group] * scale[:, j : j + 1] for j in range(scale.shape[1])]
    return torch.cat(pieces, dim=1)


def mxfp4(rows: tuple[int, ...], *, as_bytes: bool) -> Case:
    kind = "uint8" if as_bytes else "float4_e2m1fn_x2"
    tensors = {}
    for i, num_rows in enumerate(rows):
        tensors[f"w{i}"] = any_bytes((num_rows, 96), kind, i)
        exponents = torch.randint(90, 160, (num_rows, 6), generator=torch.Generator().manual_seed(i)).to(torch.uint8)
        tensors[f"s{i}"] = exponents if as_bytes else exponents.view(torch.float8_e8m0fnu)
    recipes = {kind: Concat([Read(f"{kind}{i}") for i in range(len(rows))]) for kind in "ws"}
    expected = [
        _grouped(_unpacked(tensors[f"w{i}"], _e2m1), 2.0 ** (tensors[f"s{i}"].view(torch.uint8).float() - 127), 32)
        for i in range(len(rows))
    ]
    return Case(tensors, recipes, lambda w: dequantize_mxfp4(w["w"], w["s"]), torch.cat(expected))


def nvfp4(rows: tuple[int, ...]) -> Case:
    """Parts with global scales of their own, merged."""
    tensors = {}
    for i, num_rows in enumerate(rows):
        tensors[f"w{i}"] = any_bytes((num_rows, 40), "float4_e2m1fn_x2", i)
        tensors[f"s{i}"] = _fp8((num_rows, 5), 10 + i)
        tensors[f"g{i}"] = scales((1,), i)
    recipes = {kind: Concat([Read(f"{kind}{i}") for i in range(len(rows))]) for kind in "wsg"}
    expected = [
        _grouped(_unpacked(tensors[f"w{i}"], _e2m1), tensors[f"s{i}"].float() * tensors[f"g{i}"], 16)
        for i in range(len(rows))
    ]
    return Case(
        tensors, recipes, lambda w: dequantize_nvfp4(w["w"], w["s"], w["g"], part_rows=rows), torch.cat(expected)
    )


def int4(shape: tuple[int, int], group: int, *, packed: bool) -> Case:
    """Packed in the checkpoint, or int8 there and packed by a recipe."""
    values = finite(shape, "int8", 11)
    scale = scales((shape[0], -(-shape[1] // group)), 12).bfloat16()
    nibbles = values.view(torch.uint8) & 15
    weight = nibbles[:, 0::2] + 16 * nibbles[:, 1::2] if packed else values
    recipes: dict[str, Recipe] = {"w": Read("w") if packed else PackInt4(Read("w")), "s": Read("s")}
    return Case(
        {"w": weight, "s": scale},
        recipes,
        lambda w: dequantize_int4(w["w"], w["s"], group),
        _grouped(values.float(), scale.float(), group),
    )


CASES: dict[str, Callable[[], Case]] = {
    **{f"{d} {s}": partial(floats, d, s) for d in ("float32", "bfloat16", "float16") for s in SIZES[:2]},
    **{f"{d} unscaled": partial(floats, d, (40, 192)) for d in ("float8_e4m3fn", "float8_e5m2")},
    **{f"{d} per part {r}": partial(per_part, r, d) for d in ("float8_e4m3fn", "float8_e5m2") for r in MERGED},
    **{f"one scalar {r}": partial(one_scalar, r) for r in MERGED},
    **{f"split {per} {r}": partial(split, r, per) for per in ("tensor", "part", "channel", "block") for r in MERGED},
    **{f"per channel {r}": partial(per_channel, r, "float8_e4m3fn") for r in ((192,), *MERGED)},
    "per channel e5m2": partial(per_channel, (192, 192), "float8_e5m2"),
    **{f"blocks {s}": partial(blocks, s) for s in SIZES},
    "blocks e5m2": partial(blocks, (192, 576), "float8_e5m2"),
    **{f"merged blocks {r}": partial(merged_blocks, r) for r in MERGED},
    "joined blocks": partial(joined_blocks, 8, 1856, 40),
    **{f"requantised {r}": partial(requantized, r) for r in ((192,), *MERGED)},
    **{f"mxfp4 {r} {b}": partial(mxfp4, r, as_bytes=b) for r in ((64,), (24, 8, 8)) for b in (False, True)},
    **{f"nvfp4 {r}": partial(nvfp4, r) for r in ((64,), (24, 8, 8))},
    **{f"int4 {p} {s}": partial(int4, s, 32, packed=p) for p in (True, False) for s in ((64, 192), (10, 80))},
}


def online(per: str, dtype: str, rows: tuple[int, ...]) -> tuple[Weights, dict[str, Recipe]]:
    """Bfloat16 parts quantised when they are loaded, and their scales."""
    tensors = {f"w{i}": finite((num_rows, 72), "bfloat16", i) for i, num_rows in enumerate(rows)}
    nodes = [QuantizeFp8(Read(name), per, dtype) for name in tensors]  # type: ignore[arg-type]
    return tensors, {"w": Concat(nodes), "s": Concat([ScaleOf(node) for node in nodes])}
