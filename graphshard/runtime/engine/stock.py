"""Which weights of a module are kept by rows until `finalize`, and how each is cut; decided before anything changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from torch import nn

from graphshard.core.counts import some_of
from graphshard.core.errors import SpecError
from graphshard.core.specs import WeightSpec
from graphshard.runtime.attach.layers import LayerStack
from graphshard.runtime.attach.spec import ModuleSpec, module_spec
from graphshard.runtime.engine.cut import Blocks, RowCut, ShardId, block_rows, followed_blocks
from graphshard.schedule.units import DEFAULT_MIN_SHARD_BYTES, UnitRules, choose_units

Value = TypeVar("Value")


@dataclass(frozen=True)
class RowRules:
    """What the caller of `prepare` asked for. Names are matched by shell patterns; the first that matches counts."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    min_shard_bytes: int = DEFAULT_MIN_SHARD_BYTES
    row_multiple: int | Mapping[str, int] = 1
    blocks: Mapping[str, Blocks] = field(default_factory=dict)
    follow: Mapping[str, int] = field(default_factory=dict)

    def plan_choices(self) -> dict[str, Any]:
        """What of this a plan is to keep to; nothing where nothing was asked for."""
        asked = {"include": self.include, "exclude": self.exclude, "min_shard_bytes": self.min_shard_bytes}
        return {name: value for name, value in asked.items() if value != RowRules.__dataclass_fields__[name].default}


@dataclass(frozen=True, slots=True)
class RowSpec:
    """A weight that is kept by rows: as its module declares it, `shape` whole, and how ranks and parts cut it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    cut: RowCut
    blocks: Mapping[ShardId, tuple[int, int]]
    """Rows of each part that is loaded on its own; none if only the whole is."""
    leader: str | None = None
    """The weight whose rows this one's belong to, if it follows one."""

    def text(self) -> str:
        """What must be alike on all ranks."""
        return f"{self.name} {self.dtype}{list(self.shape)} rows {list(self.cut.bounds)} blocks {dict(self.blocks)}"


@dataclass(frozen=True)
class Stock:
    """A module as `prepare` found it."""

    spec: ModuleSpec
    rows: Mapping[str, RowSpec]
    blocks: Mapping[str, Mapping[ShardId, tuple[int, int]]]
    """Rows of the parts of weights that stay whole."""

    def text(self) -> list[str]:
        """What must be alike on all ranks, one weight a line."""
        whole = [f"{name} blocks {dict(blocks)}" for name, blocks in self.blocks.items()]
        return [*(row.text() for row in self.rows.values()), *whole]


def take_stock(module: nn.Module, stack: LayerStack, rules: RowRules, world_size: int) -> Stock:
    """What `rules` make of the module's parameters; changes nothing.

    Raises:
        SpecError: as `module_spec`; a pattern that matches nothing; blocks, scales or cuts that do not fit.
    """
    spec = module_spec(module, stack, meta_allowed=True)
    names = [name for name, _ in module.named_parameters()]
    _check_patterns(names, rules)
    asked = UnitRules("layer", rules.include, rules.exclude, rules.min_shard_bytes)
    decisions, _ = choose_units(spec.model, asked)
    sharded = [decision.weight for decision in decisions if decision.unit is not None]
    weights = {weight.name: weight for weight in spec.model.weights}
    leaders = {name: (weights[name].shape, weights[name].dtype) for name in sharded if _has_rows(weights[name])}
    followers = {name: every for name in weights if (every := first_match(name, rules.follow)) is not None}
    rows: dict[str, RowSpec] = {}
    for name, (shape, dtype) in leaders.items():
        if name not in followers:
            multiple = rules.row_multiple
            every = (first_match(name, multiple) or 1) if isinstance(multiple, Mapping) else multiple
            blocks = first_match(name, rules.blocks)
            parts = {} if blocks is None else block_rows(name, shape[0], blocks)
            rows[name] = RowSpec(name, shape, dtype, RowCut.of(shape[0], world_size, every), parts)
    for name, every in followers.items():
        leader = leader_of(name, rows)
        if leader is not None:
            rows[name] = following(name, weights[name].shape, weights[name].dtype, leader, every)
    whole = {
        name: block_rows(name, parameter.shape[0] if parameter.dim() else 0, blocks)
        for name, parameter in module.named_parameters()
        if name not in rows and (blocks := first_match(name, rules.blocks)) is not None
    }
    return Stock(spec, rows, whole)


def leader_of(name: str, rows: Mapping[str, RowSpec]) -> RowSpec | None:
    """The matrix by rows that shares its module with `name`; None if there is none.

    Raises:
        SpecError: there are several.
    """
    module = name.rpartition(".")[0]
    beside = [row for row in rows.values() if row.leader is None and row.name.rpartition(".")[0] == module]
    found = [row for row in beside if len(row.shape) > 1]
    if len(found) > 1:
        raise SpecError(
            f"weight {name} is to follow the rows of the matrix beside it, and there are several: "
            f"{', '.join(row.name for row in found)}; leave it out of follow="
        )
    return found[0] if found else None


def following(name: str, shape: Sequence[int], dtype: str, leader: RowSpec, every: int) -> RowSpec:
    """`name` of the whole `shape`, with a row for each `every` rows of `leader`.

    Raises:
        SpecError: it has another number of rows, or ranks part the leader inside one.
    """
    cut = leader.cut.followed(name, every)
    if not shape or shape[0] != cut.num_rows:
        raise SpecError(
            f"weight {name} is {list(shape)}: with a row for each {every} rows of {leader.name} {list(leader.shape)} "
            f"it would have {cut.num_rows}; correct follow="
        )
    blocks = followed_blocks(leader.blocks, every, leader.cut.num_rows)
    return RowSpec(name, tuple(shape), dtype, cut, blocks, leader.name)


def first_match(name: str, patterns: Mapping[str, Value]) -> Value | None:
    """The value of the first pattern that matches."""
    return next((value for pattern, value in patterns.items() if fnmatchcase(name, pattern)), None)


def _has_rows(weight: WeightSpec) -> bool:
    return bool(weight.shape) and weight.strides is None


def _check_patterns(names: Sequence[str], rules: RowRules) -> None:
    multiples = rules.row_multiple if isinstance(rules.row_multiple, Mapping) else {"*": rules.row_multiple}
    for what, numbers in (("row_multiple", multiples), ("follow", rules.follow)):
        for pattern, number in numbers.items():
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise SpecError(f"{what} {number!r} for {pattern} is refused: give a whole number of rows from 1 on")
    # what follow= names may come into being after loading: finalize() looks again
    for what, patterns in (("row_multiple", list(multiples)), ("blocks", list(rules.blocks))):
        idle = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]
        if idle:
            raise SpecError(
                f"{what}: pattern {idle[0]!r} matches none of the {len(names)} parameters: {some_of(names, 4)}"
            )
