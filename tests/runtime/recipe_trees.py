"""Random recipes over random tensors, and what they make in plain torch: whole tensors, one node after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from graphshard.load.store import TensorEntry
from graphshard.recipes import (
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

FLOATS = ("float32", "bfloat16", "float16")
FP8 = ("float8_e4m3fn", "float8_e5m2")
DTYPES = (*FLOATS, *FP8, "float8_e8m0fnu", "float4_e2m1fn_x2", "uint8", "int8", "bool", "int64", "uint16", "float64")

Shape = tuple[int, ...]


def raw(tensor: Tensor) -> bytes:
    """The bytes of a contiguous tensor."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, name)  # type: ignore[no-any-return]


def any_bytes(shape: Shape, dtype: str, seed: int) -> Tensor:
    """Random bytes: NaNs of all payloads, infinities and -0 among them."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == "bool" else 256
    num_bytes = prod(shape) * torch_dtype(dtype).itemsize
    data = torch.randint(0, high, (num_bytes,), dtype=torch.uint8, generator=generator)
    return data.view(torch_dtype(dtype)).view(shape)


def any_nan(shape: Shape, dtype: str) -> Tensor:
    """NaNs with random payloads and signs, quiet and signalling."""
    ones = any_bytes(shape, dtype, 5)
    exponent = torch.tensor(float("inf"), dtype=ones.dtype)
    ints = _as_ints(ones) | _as_ints(exponent)
    return torch.where((ints & 1) == 1, ints, ints | 1).view(ones.dtype)


def finite(shape: Shape, dtype: str, seed: int) -> Tensor:
    """Values of many magnitudes, zeros, -0 and whole rows of zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == "int8":
        return torch.randint(-8, 8, shape, dtype=torch.int8, generator=generator)
    values = torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-6, 7, shape, generator=generator)
    zeros = torch.randint(0, 4, shape, generator=generator) == 0
    values = torch.where(zeros, -0.0 * torch.ones(shape), values)
    if len(shape) > 1 and shape[0] > 1 and seed % 3 == 0:
        values[seed % shape[0]] = 0
    return values.to(torch_dtype(dtype))


def entries_of(tensors: dict[str, Tensor]) -> dict[str, TensorEntry]:
    return {
        name: TensorEntry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    }


class Grower:
    """Grows a recipe from its result down, and the tensors that it reads."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.tensors: dict[str, Tensor] = {}

    def grow(self, shape: Shape, dtype: str, depth: int, *, plain: bool = False) -> Recipe:
        """A recipe that makes `shape` of `dtype`; with `plain` of finite values that nothing has quantised."""
        kinds = self._kinds(shape, dtype, plain) if depth else []
        kind = self.draw(st.sampled_from(["read", *kinds]))
        return getattr(self, f"_{kind}")(shape, dtype, depth - 1, plain)  # type: ignore[no-any-return]

    def _kinds(self, shape: Shape, dtype: str, plain: bool) -> list[str]:
        kinds = ["concat", "slice"] if shape else []
        if len(shape) == 2 and dtype != "float4_e2m1fn_x2":
            kinds.append("transpose")
        if dtype in FLOATS:
            kinds.append("cast")
        if plain:
            return kinds
        kinds.append("reinterpret")
        if dtype in FP8:
            kinds += ["quantize"] * 2 + (["requantize"] * 2 if len(shape) == 2 else [])
        if dtype == "uint8" and len(shape) > 1:
            kinds.append("pack")
        if dtype == "float32" and shape:
            kinds.append("scale")
        if dtype == "float8_e8m0fnu" and len(shape) == 2:
            kinds.append("requantized_scale")
        return kinds

    def _read(self, shape: Shape, dtype: str, depth: int, plain: bool) -> Recipe:
        alike = [
            name
            for name, tensor in self.tensors.items()
            if (name[0] == "f") == plain and tensor.dtype == torch_dtype(dtype) and tuple(tensor.shape) == shape
        ]
        if alike and self.draw(st.booleans()):
            return Read(alike[0])
        name = f"{'f' if plain else 'b'}{len(self.tensors)}"
        self.tensors[name] = (finite if plain else any_bytes)(shape, dtype, self.draw(st.integers(0, 999)))
        return Read(name)

    def _concat(self, shape: Shape, dtype: str, depth: int, plain: bool) -> Recipe:
        dim = self.draw(st.integers(0, len(shape) - 1))
        cuts = sorted(self.draw(st.lists(st.integers(0, shape[dim]), max_size=2)))
        sizes = [end - begin for begin, end in zip([0, *cuts], [*cuts, shape[dim]], strict=True)]
        parts = [(*shape[:dim], size, *shape[dim + 1 :]) for size in sizes]
        scalars = [() if part == (1,) and self.draw(st.booleans()) else part for part in parts]
        return Concat([self.grow(part, dtype, depth, plain=plain) for part in scalars], dim)

    def _slice(self, shape: Shape, dtype: str, depth: int, plain: bool) -> Recipe:
        dim = self.draw(st.integers(0, len(shape) - 1))
        before, after = self.draw(st.integers(0, 2)), self.draw(st.integers(0, 2))
        part = (*shape[:dim], before + shape[dim] + after, *shape[dim + 1 :])
        return Slice(self.grow(part, dtype, depth, plain=plain), dim, before, before + shape[dim])

    def _transpose(self, shape: Shape, dtype: str, depth: int, plain: bool) -> Recipe:
        return Transpose(self.grow((shape[1], shape[0]), dtype, depth, plain=plain))

    def _cast(self, shape: Shape, dtype: str, depth: int, plain: bool) -> Recipe:
        others = FLOATS if plain else (*FLOATS, *FP8, "float64", "int8", "uint16", "int64", "bool")
        return Cast(self.grow(shape, self.draw(st.sampled_from(others)), depth, plain=plain), dtype)

    def _reinterpret(self, shape: Shape, dtype: str, depth: int, plain: bool) -> Recipe:
        num_bytes = prod(shape) * torch_dtype(dtype).itemsize
        other = self.draw(st.sampled_from([d for d in DTYPES if num_bytes % torch_dtype(d).itemsize == 0]))
        if dtype == "bool":
            other = "bool"  # other bytes are no bools
        size = num_bytes // torch_dtype(other).itemsize
        rows = self.draw(st.sampled_from([n for n in (1, 2, 3, 4) if size % n == 0]))
        inner = self.draw(st.sampled_from([(size,), (rows, size // rows), (1, rows, size // rows)]))
        return Reinterpret(self.grow(inner, other, depth), shape, dtype)

    def _quantize(self, shape: Shape, dtype: str, depth: int, plain: bool) -> Recipe:
        per = self.draw(st.sampled_from(["tensor", "channel"] if len(shape) > 1 else ["tensor"]))
        return QuantizeFp8(self.grow(shape, self.draw(st.sampled_from(FLOATS)), depth, plain=True), per, dtype)

    def _requantize(self, shape: Shape, dtype: str, depth: int, plain: bool) -> Recipe:
        block = self.draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
        scale = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
        name = f"f{len(self.tensors)}"
        self.tensors[name] = finite(shape, "float32", len(self.tensors)).to(torch_dtype(dtype))
        weight: Recipe = Read(name)
        if self.draw(st.booleans()):
            self.tensors[f"{name}t"] = self.tensors.pop(name).t().contiguous()
            weight = Transpose(Read(f"{name}t"))
        return RequantizeUe8m0(weight, self.grow(scale, "float32", depth, plain=True), block)

    def _pack(self, shape: Shape, dtype: str, depth: int, plain: bool) -> Recipe:
        return PackInt4(self.grow((*shape[:-1], 2 * shape[-1]), "int8", depth, plain=True))

    def _scale(self, shape: Shape, dtype: str, depth: int, plain: bool) -> Recipe:
        kind = self.draw(st.sampled_from(FP8))
        if shape == (1,) and self.draw(st.booleans()):
            part = self.grow((3, 2), "bfloat16", depth, plain=True)
            return ScaleOf(QuantizeFp8(part, "tensor", kind))
        return ScaleOf(QuantizeFp8(self.grow((*shape, 3), "float16", depth, plain=True), "channel", kind))

    def _requantized_scale(self, shape: Shape, dtype: str, depth: int, plain: bool) -> Recipe:
        rows, columns = (2 * size - self.draw(st.integers(0, 1)) if size else 0 for size in shape)
        node = self._requantize((rows, columns), "float8_e4m3fn", depth, plain)
        assert isinstance(node, RequantizeUe8m0)
        scale = self.grow(shape, "float32", depth, plain=True)
        return ScaleOf(RequantizeUe8m0(node.weight, scale, (2, 2)))


ROOTS = {
    "quantize": FP8,
    "requantize": FP8,
    "pack": ("uint8",),
    "scale": ("float32",),
    "requantized_scale": ("float8_e8m0fnu",),
    "transpose": tuple(dtype for dtype in DTYPES if dtype != "float4_e2m1fn_x2"),
}
"""Kinds of node that need a matrix of certain dtypes."""


@st.composite
def recipes(draw: Any, depth: int = 3) -> tuple[Recipe, dict[str, Tensor]]:
    """A recipe of up to `depth` nodes over a read, and its tensors."""
    grower = Grower(draw)
    root = draw(st.sampled_from(["any"] * len(ROOTS) + list(ROOTS)))
    if root == "any":
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        return grower.grow(shape, draw(st.sampled_from(DTYPES)), depth), grower.tensors
    matrix = (draw(st.integers(0, 7)), draw(st.integers(0, 7)))
    recipe = getattr(grower, f"_{root}")(matrix, draw(st.sampled_from(ROOTS[root])), depth - 1, False)
    return recipe, grower.tensors


def plain(recipe: Recipe, tensors: dict[str, Tensor]) -> Tensor:
    """What `recipe` makes, whole."""
    match recipe:
        case Read(name):
            return tensors[name]
        case Concat(parts, dim):
            made = [plain(part, tensors) for part in parts]
            pieces = [_as_ints(part if part.dim() else part.view(1)) for part in made]
            return torch.cat(pieces, dim).view(made[0].dtype)
        case Slice(part, dim, begin, end):
            made_part = plain(part, tensors)
            return _as_ints(made_part).narrow(dim, begin, end - begin).contiguous().view(made_part.dtype)
        case Transpose(part):
            return plain(part, tensors).t().clone(memory_format=torch.contiguous_format)
        case Cast(part, dtype):
            return casted(plain(part, tensors), dtype)
        case Reinterpret(part, shape, dtype):
            return (
                torch.frombuffer(bytearray(raw(plain(part, tensors))) or bytearray(8), dtype=torch.uint8)[
                    : prod(shape) * torch_dtype(dtype).itemsize
                ]
                .view(torch_dtype(dtype))
                .view(shape)
            )
        case PackInt4(part):
            values = plain(part, tensors).to(torch.int16) % 16
            return (values[..., 0::2] + 16 * values[..., 1::2]).to(torch.uint8)
        case QuantizeFp8():
            return quantized(plain(recipe.part, tensors), recipe)[0]
        case RequantizeUe8m0(weight, scale, block):
            return requantized(plain(weight, tensors), plain(scale, tensors), block)[0]
        case ScaleOf(node) if isinstance(node, QuantizeFp8):
            return quantized(plain(node.part, tensors), node)[1]
        case ScaleOf(node):
            return requantized(plain(node.weight, tensors), plain(node.scale, tensors), node.block)[1]


def casted(values: Tensor, dtype: str) -> Tensor:
    """`values` as `dtype`, every NaN alike."""
    made = values.to(torch_dtype(dtype))
    if made.dtype != values.dtype and values.is_floating_point() and made.is_floating_point():
        _as_ints(made).view(-1)[values.view(-1).isnan()] = _as_ints(torch.tensor(float("nan")).to(made.dtype))
    return made


def quantized(values: Tensor, node: QuantizeFp8) -> tuple[Tensor, Tensor]:
    """FP8 and scale by the formula."""
    limit = torch.finfo(torch_dtype(node.dtype)).max
    values = values.float()
    if node.per == "tensor":
        amax = values.abs().max().view(1) if values.numel() else torch.zeros(1)
    else:
        amax = values.abs().amax(-1) if values.shape[-1] else torch.zeros(values.shape[:-1])
    scale = torch.where(amax == 0, 1.0, amax / limit)
    by = scale if node.per == "tensor" else scale.unsqueeze(-1)
    return (values / by).clamp(-limit, limit).to(torch_dtype(node.dtype)).view(values.shape), scale


def requantized(weight: Tensor, scale: Tensor, block: Sequence[int]) -> tuple[Tensor, Tensor]:
    """FP8 and power-of-two scales, a block at a time, the power from Python's own floats."""
    limit = torch.finfo(weight.dtype).max
    out, exponents = torch.empty_like(weight), torch.zeros(scale.shape, dtype=torch.uint8)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            values = weight[at].float() * scale[i, j]
            amax = values.abs().max()
            power = math.ceil(math.log2(float(amax / limit))) if amax else 0  # exact: far from 2**k * (1 + eps)
            power += 2.0**power < float(amax / limit)
            exponents[i, j] = power + 127
            out[at] = (values / 2.0**power).clamp(-limit, limit).to(weight.dtype)
    return out, exponents.view(torch.float8_e8m0fnu)


def _as_ints(tensor: Tensor) -> Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
