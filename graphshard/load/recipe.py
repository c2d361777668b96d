"""Recipes: how a weight is made of a checkpoint's tensors, as a tree of plain data.

The leaves read tensors of the store by name; what comes out is written into a weight's own memory. A recipe never reads
a weight, so there is no way to apply one to what it has made; and a tensor that comes already quantised or packed is
refused by its dtype (see `recipe_types`), so no scale is applied twice.

Shapes are counted in elements as they are stored: one `float4_e2m1fn_x2` is two values, and so is a `uint8` that holds
two int4. A weight without a recipe is read under its own name; two weights may read one tensor (tied weights).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar, get_args

from graphshard.core.errors import SpecError
from graphshard.core.sizes import dtype_bits

Value = TypeVar("Value")
ScalePer = Literal["tensor", "channel"]

FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2")
"""What `QuantizeFp8` can make."""


@dataclass(frozen=True, slots=True)
class Read:
    """The tensor `name` of the store, as it is."""

    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise SpecError(f"Read({self.name!r}): a tensor's name is a text that is not empty")


@dataclass(frozen=True, slots=True)
class Concat:
    """`parts` one after the other along `dim`; all have one dtype, and one size along every other dimension.

    A part without dimensions (a scalar scale) counts as one of shape [1].
    """

    parts: tuple[Recipe, ...]
    dim: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", _listed("Concat of", self.parts))
        if not self.parts:
            raise SpecError("Concat has no parts; give at least one")
        for part in self.parts:
            _check_node("Concat", part)
        _check_dim("Concat", self.dim)


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements `[begin, end)` of `part` along `dim`."""

    part: Recipe
    dim: int
    begin: int
    end: int

    def __post_init__(self) -> None:
        _check_node("Slice", self.part)
        _check_dim("Slice", self.dim)
        if not _is_size(self.begin) or not _is_size(self.end) or self.begin > self.end:
            raise SpecError(f"Slice of [{self.begin!r}, {self.end!r}): give whole numbers with 0 <= begin <= end")


@dataclass(frozen=True, slots=True)
class Transpose:
    """`part` of two dimensions, [m, n], as [n, m]."""

    part: Recipe

    def __post_init__(self) -> None:
        _check_node("Transpose", self.part)


@dataclass(frozen=True, slots=True)
class Cast:
    """The values of `part` as `dtype`, rounded to nearest even; the only node that converts.

    Of a NaN nothing but that it is one is kept. Floats are not cast to integers.
    """

    part: Recipe
    dtype: str

    def __post_init__(self) -> None:
        _check_node("Cast", self.part)
        dtype_bits(self.dtype)  # raises SpecError with the known names


@dataclass(frozen=True, slots=True)
class Reinterpret:
    """The same bytes as `part`, seen as `shape` elements of `dtype`."""

    part: Recipe
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        _check_node("Reinterpret", self.part)
        object.__setattr__(self, "shape", _listed("Reinterpret as", self.shape))
        if not all(map(_is_size, self.shape)):
            raise SpecError(f"Reinterpret as {self.shape}: sizes are whole numbers from 0 on")
        dtype_bits(self.dtype)


@dataclass(frozen=True, slots=True)
class QuantizeFp8:
    """`part` (float32, bfloat16 or float16) as FP8; `ScaleOf` this node is what to multiply it by.

    `per` "tensor" has one float32 scale, [1], its amax combined over all ranks' rows; "channel" has one for each row:
    the shape of `part` without its last dimension.
    """

    part: Recipe
    per: ScalePer
    dtype: str = "float8_e4m3fn"

    def __post_init__(self) -> None:
        _check_node("QuantizeFp8", self.part)
        if self.per not in get_args(ScalePer):
            raise SpecError(f"QuantizeFp8 per {self.per!r}: known are {', '.join(get_args(ScalePer))}")
        if self.dtype not in FP8_DTYPES:
            raise SpecError(f"QuantizeFp8 to {self.dtype!r}: known are {', '.join(FP8_DTYPES)}")


@dataclass(frozen=True, slots=True)
class RequantizeUe8m0:
    """FP8 `weight` [n, k] with one float32 `scale` for each block, requantised to scales that are powers of two.

    `scale` is [ceil(n / block[0]), ceil(k / block[1])]; so is `ScaleOf` this node, in `float8_e8m0fnu`.
    """

    weight: Recipe
    scale: Recipe
    block: tuple[int, int] = (128, 128)

    def __post_init__(self) -> None:
        _check_node("RequantizeUe8m0", self.weight)
        _check_node("RequantizeUe8m0", self.scale)
        object.__setattr__(self, "block", _listed("RequantizeUe8m0 with blocks of", self.block))
        if len(self.block) != 2 or not all(_is_size(size) and size > 0 for size in self.block):
            raise SpecError(f"RequantizeUe8m0 with blocks of {self.block}: give two whole numbers from 1 on")


@dataclass(frozen=True, slots=True)
class PackInt4:
    """`part` of int8 values from -8 to 7, two to a uint8: the even column in the low four bits, [..., k / 2]."""

    part: Recipe

    def __post_init__(self) -> None:
        _check_node("PackInt4", self.part)


@dataclass(frozen=True, slots=True)
class ScaleOf:
    """The scale that goes with what `node` makes: a weight of its own."""

    node: QuantizeFp8 | RequantizeUe8m0

    def __post_init__(self) -> None:
        if not isinstance(self.node, (QuantizeFp8, RequantizeUe8m0)):
            raise SpecError(f"ScaleOf({self.node!r}): only QuantizeFp8 and RequantizeUe8m0 have a scale")


Recipe: TypeAlias = (
    Read | Concat | Slice | Transpose | Cast | Reinterpret | QuantizeFp8 | RequantizeUe8m0 | PackInt4 | ScaleOf
)
Recipes: TypeAlias = Mapping[str, Recipe]
"""Recipes by the name of the weight they make."""


def recipe_for(recipes: Recipes, weight: str) -> Recipe:
    """The recipe of `weight`: its own, or a read under its own name.

    Raises:
        SpecError: what stands there is no recipe.
    """
    found = recipes.get(weight, Read(weight))
    _check_node(f"recipe {weight!r}", found)
    return found


def parts_of(recipe: Recipe) -> tuple[Recipe, ...]:
    """The nodes right under `recipe`, in the order of its fields."""
    match recipe:
        case Read():
            return ()
        case Concat(parts):
            return parts
        case RequantizeUe8m0(weight, scale):
            return weight, scale
        case ScaleOf(node):
            return (node,)
        case _:
            return (recipe.part,)


def nodes_of(recipe: Recipe) -> Iterator[Recipe]:
    """`recipe` and all nodes under it, parts before what is made of them."""
    for part in parts_of(recipe):
        yield from nodes_of(part)
    yield recipe


def reads_of(recipe: Recipe) -> tuple[str, ...]:
    """The names of the tensors that `recipe` reads, each once, in the order of the tree."""
    return tuple(dict.fromkeys(node.name for node in nodes_of(recipe) if isinstance(node, Read)))


def label_of(recipe: Recipe) -> str:
    """A node in a message: its kind, and the first tensor it reads."""
    if isinstance(recipe, Read):
        return recipe.name
    names = reads_of(recipe)
    return f"{type(recipe).__name__} of {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _check_node(kind: str, part: object) -> None:
    if not isinstance(part, get_args(Recipe)):
        raise SpecError(f"{kind} of {part!r}: a part is a node of a recipe; write Read({part!r}) for a tensor")


def _listed(what: str, values: Iterable[Value]) -> tuple[Value, ...]:
    if not isinstance(values, Iterable):
        raise SpecError(f"{what} {values!r}: give several, in a list or a tuple")
    return tuple(values)


def _check_dim(kind: str, dim: object) -> None:
    if not _is_size(dim):
        raise SpecError(f"{kind} along dim {dim!r}: give a whole number from 0 on")


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
