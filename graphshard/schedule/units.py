"""Which weights are sharded, and which of them one gather restores together.

Policies: `layer` (all sharded weights of a layer), `weight` (each alone), `bytes:CAP` (whole weights of a layer, in the
order in which they are read, up to CAP; a larger weight is alone). Weights outside the layers group by neighbourhood.

With `slice_blocks` the weights of a block are one unit, whatever the policy: a step that computes on slices leaves out
its gather as a whole, which it could not if other weights came with it. That holds as well where they cannot be sliced,
so that units are the same for any number of ranks. A block of which a weight stays resident is no block here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from graphshard.core.errors import SpecError
from graphshard.core.patterns import first_match
from graphshard.core.plan import Unit, WeightDecision, refuse_sharded
from graphshard.core.sizes import format_bytes, parse_bytes
from graphshard.core.slices import why_not_sliced
from graphshard.core.specs import BlockSpec, ModelSpec, WeightSpec

DEFAULT_MIN_SHARD_BYTES = 64 * 1024
"""Norms and biases stay resident: a gather of less costs more than its bytes."""

TOO_SMALL = "is below min_shard_bytes"

Stay = tuple[int, int]
"""Segments `[begin, end)` for which something is needed without a far gap."""


@dataclass(frozen=True, slots=True)
class UnitRules:
    """What may be sharded. `include` and `exclude` are shell patterns over weight names.

    A weight that `include` names is sharded wherever it is read and however small it is; with any `include` pattern
    the weights that none names stay resident. What the model keeps (`ModelSpec.kept`) is resident where there is none.
    `exclude` wins over all. What no plan may shard (`ModelSpec.why_whole`) is resident; to include it is an error.
    """

    policy: str = "layer"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    min_shard_bytes: int = DEFAULT_MIN_SHARD_BYTES
    outside_layers: bool = False
    slice_blocks: bool = False
    """Weights of blocks lie in slices where they can. `min_shard_bytes` is asked of a block's weights together."""
    world_size: int = 1
    """For slices: over so many ranks."""


def unit_cap(policy: str) -> float:
    """Bytes up to which weights share a unit; SpecError with the known policies."""
    if policy == "layer":
        return math.inf
    if policy == "weight":
        return 0
    kind, _, cap = policy.partition(":")
    if kind != "bytes" or not cap:
        raise SpecError(f"unknown unit policy {policy!r}; known are layer, weight, bytes:CAP (as in bytes:4MiB)")
    return parse_bytes(cap)


def choose_units(model: ModelSpec, rules: UnitRules) -> tuple[tuple[WeightDecision, ...], tuple[Unit, ...]]:
    """Decide every weight of `model`, in its order, and group the sharded ones into units, in reading order.

    Raises:
        SpecError: unknown policy, a pattern that matches no weight, or one that includes what stays whole.
    """
    cap = unit_cap(rules.policy)
    _check_patterns(model, rules)
    reading = _Reading(model, model.blocks if rules.slice_blocks else ())
    reading.drop_blocks(reading.resident(model, rules))
    resident = reading.resident(model, rules)  # without its block a weight may be too small
    sharded = [weight for weight in model.weights if weight.name not in resident]
    units = _group(reading, sharded, cap, rules.world_size)
    unit_of = {name: unit.index for unit in units for name in unit.weights}
    decisions = tuple(
        WeightDecision(
            weight.name, unit_of.get(weight.name), resident.get(weight.name) or reading.why_sharded(weight, units)
        )
        for weight in model.weights
    )
    return decisions, units


def place_units(model: ModelSpec, units: Sequence[Unit]) -> tuple[WeightDecision, ...]:
    """Decide every weight of `model` as `units`, given by somebody else, have it.

    Raises:
        SpecError: a unit names a weight that the model does not have, that no segment reads, or that stays whole, or
            is sliced and not a block's.
    """
    refuse_sharded(model, units)
    blocks = {block.weights for block in model.blocks}
    for unit in units:
        if unit.is_sliced and unit.weights not in blocks:
            raise SpecError(
                f"unit {unit.index} ({unit.name}) is sliced, and {model.name} has no block of the weights "
                f"{', '.join(unit.weights)}: slice what a block lists, columns first"
            )
    reading = _Reading(model)
    unit_of: dict[str, int] = {}
    for unit in units:
        for name in unit.weights:
            if not reading.readers.get(name):
                why = "no segment reads it" if name in reading.readers else f"{model.name} has no such weight"
                raise SpecError(
                    f"unit {unit.index} ({unit.name}) has the weight {name}: {why}; give this model's units"
                )
            unit_of[name] = unit.index
    return tuple(
        WeightDecision(
            weight.name,
            unit_of.get(weight.name),
            reading.why_sharded(weight, units)
            if weight.name in unit_of
            else model.why_whole.get(weight.name, "no unit that was given has it"),
        )
        for weight in model.weights
    )


def keep_all(model: ModelSpec, reason: str) -> tuple[WeightDecision, ...]:
    """Every weight resident, for one and the same reason, where there is no stronger one."""
    return tuple(
        WeightDecision(weight.name, None, model.why_whole.get(weight.name, reason)) for weight in model.weights
    )


def unit_stays(model: ModelSpec, units: Sequence[Unit]) -> list[tuple[int, int, int]]:
    """(unit, begin, end) of every residency, by begin, then by unit. Far apart readers make two residencies."""
    reading = _Reading(model)
    found = []
    for unit in units:
        readers = sorted({reader for name in unit.weights for reader in reading.readers[name]})
        found += [(unit.index, begin, end) for begin, end in reading.stays(readers)]
    return sorted(found, key=lambda stay: (stay[1], stay[0]))


def explain_blocks(
    model: ModelSpec, decisions: Sequence[WeightDecision], units: Sequence[Unit], world_size: int
) -> tuple[str, ...]:
    """For each block of `model`, in order: one sentence on whether it is sliced, and why if it is not."""
    reasons = {decision.weight: decision.reason for decision in decisions if decision.unit is None}
    by_weights = {unit.weights: unit for unit in units}
    return tuple(f"{block.name}: {_explain(model, block, reasons, by_weights, world_size)}" for block in model.blocks)


def _explain(
    model: ModelSpec,
    block: BlockSpec,
    resident: Mapping[str, str],
    by_weights: Mapping[tuple[str, ...], Unit],
    world_size: int,
) -> str:
    unit = by_weights.get(block.weights)
    if unit is not None and unit.is_sliced:
        rows = model.weight(block.weights[0]).shape[0]
        return f"sliced, each of {world_size} ranks keeps {rows // world_size} of {rows} rows of each weight"
    whole = [name for name in block.weights if name in resident]
    if whole:
        # a small weight follows from another one that is resident: alone it is too small
        kept = min(whole, key=lambda name: TOO_SMALL in resident[name])
        return f"not sliced: {kept} stays resident ({resident[kept]})"
    why = why_not_sliced([model.weight(name) for name in block.weights], world_size)
    return f"not sliced: {why or 'its weights are not one sliced unit'}"


class _Reading:
    """Who reads what, where a run of segments of one layer ends, and which weights belong to a block."""

    def __init__(self, model: ModelSpec, blocks: Sequence[BlockSpec] = ()) -> None:
        self.blocks = {name: block for block in blocks for name in block.weights}
        self.block_bytes = {block.name: sum(model.weight(name).num_bytes for name in block.weights) for block in blocks}
        self.segments = model.segments
        self.why_kept, self.why_whole = model.why_kept, model.why_whole
        self.position = {weight.name: index for index, weight in enumerate(model.weights)}
        self.readers: dict[str, list[int]] = {weight.name: [] for weight in model.weights}
        self.runs: list[int] = []  # by segment; a run is a stretch of segments of one layer
        for index, segment in enumerate(model.segments):
            for name in dict.fromkeys(segment.reads):
                self.readers[name].append(index)
            same = index > 0 and model.segments[index - 1].layer == segment.layer
            self.runs.append(self.runs[-1] + (not same) if self.runs else 0)
        self.behind = {name: block for block in blocks for name in self._read_behind(model, block)}

    def _read_behind(self, model: ModelSpec, block: BlockSpec) -> list[str]:
        """Biases that are first read inside `block`: in slices no gather of theirs can be waited for there."""
        others = [name for name in block.finish.reads if name not in block.weights]
        return [
            name
            for name in others
            if len(model.weight(name).shape) < 2
            and all(block.begin < reader < block.end for reader in self.readers[name])
        ]

    def stays(self, readers: Sequence[int]) -> list[Stay]:
        """Split sorted `readers` where a whole run of other segments lies between two of them."""
        found: list[Stay] = []
        for reader in readers:
            if found and self.runs[reader] - self.runs[found[-1][1] - 1] <= 1:
                found[-1] = (found[-1][0], reader + 1)
            else:
                found.append((reader, reader + 1))
        return found

    def layers(self, name: str) -> set[int | None]:
        return {self.segments[reader].layer for reader in self.readers[name]}

    def home(self, name: str) -> tuple[str, int]:
        """Weights with equal homes may share a unit: a block, a layer, a stretch outside the layers, or only itself."""
        if name in self.blocks:
            return ("block", self.blocks[name].begin)
        layers = self.layers(name)
        runs = {self.runs[reader] for reader in self.readers[name]}
        layer = next(iter(layers))
        if len(layers) == 1 and layer is not None:
            return ("layer", layer)
        if len(layers) == 1 and len(runs) == 1:
            return ("run", min(runs))
        return ("weight", self.position[name])

    def resident(self, model: ModelSpec, rules: UnitRules) -> dict[str, str]:
        """The weights of `model` that are kept whole, and why."""
        return {weight.name: reason for weight in model.weights if (reason := self.why_resident(weight, rules))}

    def why_resident(self, weight: WeightSpec, rules: UnitRules) -> str:
        """The reason for which `weight` is kept whole; empty if it is sharded."""
        name, size = weight.name, weight.num_bytes
        if size == 0:
            return "has no bytes"
        if name in self.why_whole:
            self._refuse_included(name, rules)
            return self.why_whole[name]
        if not self.readers[name]:
            return "no segment reads it"
        excluded = first_match(name, rules.exclude)
        if excluded:
            return f"excluded by {excluded}"
        if rules.include:
            return "" if first_match(name, rules.include) else "no include pattern names it"
        if name in self.why_kept:
            return self.why_kept[name]
        if name in self.behind:
            return f"read by {self.behind[name].finish.path}, behind what a block computes in slices"
        layers = self.layers(name)
        readers = [self.segments[reader] for reader in self.readers[name]]
        if len(layers) > 1 and len(self.stays(self.readers[name])) > 1:
            return f"read far apart, by {readers[0].path} and {readers[-1].path}: a unit would be gathered twice"
        if None in layers and not rules.outside_layers:
            return f"outside the layers, read by {next(s.path for s in readers if s.layer is None)}"
        if name in self.blocks:
            size = self.block_bytes[self.blocks[name].name]
        if size < rules.min_shard_bytes:
            return f"{format_bytes(size)} {TOO_SMALL} {format_bytes(rules.min_shard_bytes)}"
        return ""

    def drop_blocks(self, resident: Iterable[str]) -> None:
        """Forget blocks that lack a weight: what is left of them is grouped as any other weights."""
        lacking = {self.blocks[name].name for name in resident if name in self.blocks}
        self.blocks = {name: block for name, block in self.blocks.items() if block.name not in lacking}
        self.behind = {name: block for name, block in self.behind.items() if block.name not in lacking}

    def _refuse_included(self, name: str, rules: UnitRules) -> None:
        """SpecError if a pattern wants to shard the weight `name`, which stays whole."""
        included = first_match(name, rules.include)
        if included and not first_match(name, rules.exclude):
            raise SpecError(
                f"include pattern {included!r} names the weight {name}, which stays whole: it is "
                f"{self.why_whole[name]}; say exclude=({name!r},) beside it, or include less"
            )

    def why_sharded(self, weight: WeightSpec, units: Sequence[Unit]) -> str:
        readers = self.readers[weight.name]
        paths = [self.segments[reader].path for reader in (readers[0], readers[-1])]
        where = paths[0] if len(readers) == 1 else f"{paths[0]} to {paths[1]}"
        return f"{format_bytes(weight.num_bytes)} read by {where}"


def _group(reading: _Reading, weights: Sequence[WeightSpec], cap: float, world_size: int) -> tuple[Unit, ...]:
    """Weights of equal homes, in the order in which they are first read, greedily up to `cap` bytes a unit."""
    by_home: dict[tuple[str, int], list[WeightSpec]] = {}
    for weight in sorted(weights, key=lambda w: (reading.readers[w.name][0], reading.position[w.name])):
        by_home.setdefault(reading.home(weight.name), []).append(weight)
    groups: list[tuple[str, list[WeightSpec], bool]] = []
    for (kind, number), members in by_home.items():
        if kind == "block":
            block = reading.blocks[members[0].name]
            members.sort(key=lambda weight: block.weights.index(weight.name))
            groups.append((block.name, members, not why_not_sliced(members, world_size)))
            continue
        parts = _parts(members, cap)
        whole = f"layers.{number}" if kind == "layer" and len(parts) == 1 and cap == math.inf else ""
        groups += [(whole or _unit_name(part), part, False) for part in parts]
    groups.sort(
        key=lambda group: min((reading.readers[weight.name][0], reading.position[weight.name]) for weight in group[1])
    )
    return tuple(
        Unit(index, name, tuple(weight.name for weight in part), is_sliced)
        for index, (name, part, is_sliced) in enumerate(groups)
    )


def _parts(members: Sequence[WeightSpec], cap: float) -> list[list[WeightSpec]]:
    """`members` in order, as many together as `cap` bytes hold."""
    parts: list[list[WeightSpec]] = []
    filled = 0
    for weight in members:
        if parts and filled + weight.num_bytes <= cap:
            parts[-1].append(weight)
            filled += weight.num_bytes
        else:
            parts.append([weight])
            filled = weight.num_bytes
    return parts


def _unit_name(part: Sequence[WeightSpec]) -> str:
    first, last = part[0].name, part[-1].name
    return first if len(part) == 1 else f"{first}..{last}"


def _check_patterns(model: ModelSpec, rules: UnitRules) -> None:
    for pattern in (*rules.include, *rules.exclude):
        if not any(fnmatchcase(weight.name, pattern) for weight in model.weights):
            example = model.weights[0].name if model.weights else "none at all"
            raise SpecError(f"pattern {pattern!r} matches no weight of {model.name}; its names look like {example}")
