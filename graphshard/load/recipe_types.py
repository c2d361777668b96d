"""Shapes and dtypes of recipes: what each node gives, or why its parts do not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

from graphshard.core.errors import LoadError
from graphshard.core.sizes import num_bytes
from graphshard.load.recipe import (
    FP8_DTYPES,
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
    label_of,
    nodes_of,
    parts_of,
)

FLOAT_DTYPES = ("float32", "bfloat16", "float16")
"""What `QuantizeFp8` takes."""

CASTABLE_DTYPES = (
    "bool",
    *(f"{sign}int{bits}" for bits in (8, 16, 32, 64) for sign in ("", "u")),
    *("float64", *FLOAT_DTYPES, *FP8_DTYPES, "float8_e8m0fnu"),
)
"""What `Cast` takes and makes: dtypes with one value an element."""


class Described(Protocol):
    """Anything with a dtype and a shape: a store's entry, a weight."""

    @property
    def dtype(self) -> str:
        """Torch's name of the dtype, without `torch.`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes in elements."""

    @property
    def strides(self) -> tuple[int, ...] | None:
        """Elements from one index to the next; None: rows one after the other."""


@dataclass(frozen=True, slots=True)
class Typed:
    """A node with what it gives, `shape` elements of `dtype`, over its parts with theirs."""

    node: Recipe
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[Typed, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the result."""
        return num_bytes(self.shape, self.dtype, None)

    @property
    def num_rows(self) -> int:
        """Rows: vectors along the last dimension, over all the others; single elements where there is but one."""
        return prod(self.shape[:-1]) if len(self.shape) > 1 else prod(self.shape)

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.shape[-1] if len(self.shape) > 1 else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of a row; row r begins at byte r * row_bytes."""
        return num_bytes((self.width,), self.dtype, None)

    def text(self) -> str:
        """`q_proj.weight bfloat16[64, 32]`."""
        return f"{label_of(self.node)} {self.dtype}[{', '.join(map(str, self.shape))}]"


def typed(recipe: Recipe, entries: Mapping[str, Described]) -> Typed:
    """`recipe` with the shape and dtype of each of its nodes, over a store of `entries`.

    Raises:
        LoadError: a tensor is not among them, or parts do not fit; it says which.
    """
    if isinstance(recipe, Read):
        entry = entries.get(recipe.name)
        if entry is None:
            raise LoadError(f"tensor {recipe.name} is not among the {len(entries)} tensors there are")
        return Typed(recipe, tuple(entry.shape), entry.dtype, ())
    parts = tuple(typed(part, entries) for part in parts_of(recipe))
    for part in parts:
        if isinstance(part.node, Read) and entries[part.node.name].strides is not None:
            raise LoadError(
                f"{type(recipe).__name__} of {part.text()}, which is read as it is stored, with strides "
                f"{entries[part.node.name].strides}: give a contiguous copy of it under another name"
            )
    shape, dtype = _result(recipe, parts)
    return Typed(recipe, shape, dtype, parts)


def result_of(recipe: Recipe, entries: Mapping[str, Described]) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of what `recipe` makes.

    Raises:
        LoadError: as `typed`.
    """
    result = typed(recipe, entries)
    return result.shape, result.dtype


def block_counts(shape: Sequence[int], block: tuple[int, int]) -> tuple[int, int]:
    """Blocks of `block` that cover a matrix, those at the edges whole: the ceiling of each quotient."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def _result(recipe: Recipe, parts: tuple[Typed, ...]) -> tuple[tuple[int, ...], str]:
    first = parts[0]
    match recipe:
        case Concat():
            return _concat(recipe, parts), first.dtype
        case Slice():
            return _slice(recipe, first), first.dtype
        case Transpose():
            if len(first.shape) != 2 or first.dtype == "float4_e2m1fn_x2":
                what = "values packed in pairs along a row" if len(first.shape) == 2 else "not two dimensions"
                raise LoadError(f"Transpose of {first.text()}: it has {what}; transpose matrices of whole elements")
            return (first.shape[1], first.shape[0]), first.dtype
        case Cast():
            _check_cast(recipe, first)
            return first.shape, recipe.dtype
        case Reinterpret():
            wanted = num_bytes(recipe.shape, recipe.dtype, None)
            if wanted != first.num_bytes:
                raise LoadError(
                    f"Reinterpret of {first.text()}, {first.num_bytes} bytes, as {recipe.dtype}{list(recipe.shape)}, "
                    f"{wanted} bytes: the bytes stay the same, so their number must"
                )
            return recipe.shape, recipe.dtype
        case QuantizeFp8():
            return _quantize(recipe, first), recipe.dtype
        case RequantizeUe8m0():
            return _requantize(recipe, *parts), first.dtype
        case PackInt4():
            return _pack(first), "uint8"
        case ScaleOf(node):
            return _scale(node, first)
        case Read():
            raise AssertionError("a read has no parts")


def _check_cast(recipe: Cast, part: Typed) -> None:
    _check_dtype(f"Cast to {recipe.dtype} of", part, CASTABLE_DTYPES)
    if recipe.dtype not in CASTABLE_DTYPES:
        raise LoadError(f"Cast of {part.text()} to {recipe.dtype}: known are {', '.join(CASTABLE_DTYPES)}")
    is_float = part.dtype.startswith("float") or part.dtype == "bfloat16"
    if is_float and recipe.dtype.startswith(("int", "uint")):
        raise LoadError(f"Cast of {part.text()} to {recipe.dtype}: what is out of range has no value; cast to a float")


def _concat(recipe: Concat, parts: tuple[Typed, ...]) -> tuple[int, ...]:
    shapes = [part.shape or (1,) for part in parts]
    dim, first = recipe.dim, shapes[0]
    for i, (part, shape) in enumerate(zip(parts, shapes, strict=True)):
        where = f"Concat along dim {dim}: part {i}, {part.text()},"
        if dim >= len(shape):
            raise LoadError(f"{where} has no such dimension")
        if part.dtype != parts[0].dtype:
            raise LoadError(
                f"{where} has another dtype than part 0, {parts[0].text()}; cast one of them where that is meant"
            )
        if _without(shape, dim) != _without(first, dim):
            raise LoadError(
                f"{where} does not fit part 0, {parts[0].text()}: all sizes but that of dim {dim} must be equal"
            )
    return (*first[:dim], sum(shape[dim] for shape in shapes), *first[dim + 1 :])


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return shape[:dim] + shape[dim + 1 :]


def _slice(recipe: Slice, part: Typed) -> tuple[int, ...]:
    dim = recipe.dim
    where = f"Slice [{recipe.begin}, {recipe.end}) along dim {dim} of {part.text()}"
    if dim >= len(part.shape):
        raise LoadError(f"{where}: it has no such dimension")
    if recipe.end > part.shape[dim]:
        raise LoadError(f"{where}: it ends at {part.shape[dim]}")
    return (*part.shape[:dim], recipe.end - recipe.begin, *part.shape[dim + 1 :])


def _quantize(recipe: QuantizeFp8, part: Typed) -> tuple[int, ...]:
    _check_first_time("QuantizeFp8", part)
    _check_dtype("QuantizeFp8 of", part, FLOAT_DTYPES)
    if recipe.per == "channel" and len(part.shape) < 2:
        raise LoadError(f"QuantizeFp8 per channel of {part.text()}: give a matrix, whose rows are the channels")
    return part.shape


def _requantize(recipe: RequantizeUe8m0, weight: Typed, scale: Typed) -> tuple[int, ...]:
    _check_first_time("RequantizeUe8m0", weight)
    _check_first_time("RequantizeUe8m0", scale)
    _check_dtype("RequantizeUe8m0 of", weight, FP8_DTYPES)
    _check_dtype("RequantizeUe8m0 with the scale", scale, ("float32",))
    if len(weight.shape) != 2:
        raise LoadError(f"RequantizeUe8m0 of {weight.text()}: blocks are cut from a matrix")
    wanted = block_counts(weight.shape, recipe.block)
    joints = _joints(weight.node, weight.parts)
    of_parts = isinstance(scale.node, Concat) and scale.node.dim == 0 and len(scale.parts) > 1
    if scale.shape != wanted or (of_parts and any(joint % recipe.block[0] for joint in joints)):
        hint = "; where parts have blocks of their own, requantise each and concatenate the results" if joints else ""
        raise LoadError(
            f"RequantizeUe8m0 of {weight.text()} with the scale {scale.text()}: blocks of {recipe.block} that run over "
            f"the whole of it have {list(wanted)} scales{hint}"
        )
    return weight.shape


def _joints(node: Recipe, parts: tuple[Typed, ...]) -> list[int]:
    """The rows at which a part of a concatenation of rows ends and the next begins."""
    if not isinstance(node, Concat) or node.dim != 0:
        return []
    rows = [part.shape[0] for part in parts]
    return [sum(rows[:i]) for i in range(1, len(rows))]


def _pack(part: Typed) -> tuple[int, ...]:
    _check_first_time("PackInt4", part)
    _check_dtype("PackInt4 of", part, ("int8",))
    if len(part.shape) < 2 or part.shape[-1] % 2:
        raise LoadError(f"PackInt4 of {part.text()}: give a matrix with an even number of columns, two to a byte")
    return (*part.shape[:-1], part.shape[-1] // 2)


def _scale(node: QuantizeFp8 | RequantizeUe8m0, made: Typed) -> tuple[tuple[int, ...], str]:
    if isinstance(node, RequantizeUe8m0):
        return block_counts(made.shape, node.block), "float8_e8m0fnu"
    return ((1,) if node.per == "tensor" else made.shape[:-1]), "float32"


def _check_dtype(what: str, part: Typed, dtypes: Sequence[str]) -> None:
    if part.dtype not in dtypes:
        raise LoadError(f"{what} {part.text()}: it takes {', '.join(dtypes)}")


def _check_first_time(kind: str, part: Typed) -> None:
    """LoadError if something under `part` has been quantised or packed already: scales would be applied twice."""
    for node in nodes_of(part.node):
        if isinstance(node, (QuantizeFp8, RequantizeUe8m0, PackInt4)):
            raise LoadError(f"{kind} of {part.text()}: it is the result of {label_of(node)} already; take one of them")
