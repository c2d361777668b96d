"""What stands in a prepared module when it is finalized: its spec, and the rows that came into being by processing."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from graphshard.comm.group import Group
from graphshard.core.errors import ProgramError, SpecError
from graphshard.device.base import Device
from graphshard.runtime.attach.layers import LayerStack
from graphshard.runtime.attach.source import weight_hash
from graphshard.runtime.attach.spec import ModuleSpec, dtype_name, module_spec
from graphshard.runtime.engine.rows import RowSlice
from graphshard.runtime.engine.stock import RowRules, RowSpec, first_match, following, leader_of


@dataclass(frozen=True)
class Standing:
    """A module whose weights are loaded and processed."""

    spec: ModuleSpec
    rows: Mapping[str, RowSlice]
    new: Mapping[str, Tensor]
    """Parameters and buffers beside weights by rows that processing made, and that no rank may have alone."""

    def text(self) -> list[str]:
        """What must be alike on all ranks, one weight a line."""
        return [f"{weight.name} {weight.dtype}{list(weight.shape)}" for weight in self.spec.model.weights]


def standing_of(
    module: nn.Module,
    stack: LayerStack,
    rows: Mapping[str, RowSlice],
    before: Collection[str],
    rules: RowRules,
    rank: int,
    device: Device,
) -> Standing:
    """What stands there now. Local; changes nothing.

    Args:
        module: as `prepare` got it.
        stack: its layers.
        rows: the weights by rows.
        before: names of the parameters and buffers that `prepare` found.
        rules: as `prepare` got them.
        rank: this one.
        device: where rows are.

    Raises:
        LoadError, ProgramError: a weight is not loaded, or is no longer this rank's rows.
        SpecError: as `module_spec`; what follows another weight's rows does not fit.
    """
    _refuse_replaced(module, stack)
    found = {name: row.standing() for name, row in rows.items()}
    late = dict(_late_followers(module, rows, before, rules, rank, device))
    every = {**rows, **late}
    found |= {name: row.parameter.detach() for name, row in late.items()}
    shapes = {name: (row.spec.cut.num_rows, *found[name].shape[1:]) for name, row in every.items()}
    spec = module_spec(module, stack, whole_shapes=shapes)
    for name in every:
        if name not in spec.parameters:
            why = spec.kept.get(name, "is known under another name now")
            raise ProgramError(
                f"weight {name} cannot be sharded as post-load processing left it: it {why}; make a plain parameter of "
                f"its rows, or keep it whole with exclude=[{name!r}]"
            )
    _refuse_idle(spec, every, rules)
    return Standing(spec, every, dict(_new_tensors(module, stack, every, before, rules)))


def _refuse_replaced(module: nn.Module, stack: LayerStack) -> None:
    """ProgramError if another layer stands in the place of one that `prepare` found: its calls would gather nothing."""
    inside = dict(module.named_modules(remove_duplicate=False))
    for names, layer in zip(stack.names, stack.layers, strict=True):
        other = [name for name in names if inside.get(name) is not layer]
        if other:
            raise ProgramError(
                f"layer {other[0]} is not the {type(layer).__name__} that prepare() found: there is "
                f"{type(inside[other[0]]).__name__ if other[0] in inside else 'nothing'} in its place now; change "
                "layers before prepare(), or what is inside them afterwards"
            )


def refuse_unlike(group: Group, what: str, lines: Sequence[str]) -> None:
    """Compare what ranks are about to do, a line each (collective).

    Raises:
        SpecError: on every rank, naming the first line that differs.
    """
    told: list[Any] = [value for value, _ in group.all_gather(list(lines), name=what)]
    for rank, theirs in enumerate(told):
        for index in range(max(len(theirs), len(told[0]))):
            pair = [lines[index] if index < len(lines) else "nothing" for lines in (told[0], theirs)]
            if pair[0] != pair[1]:
                raise SpecError(
                    f"{what}: rank 0 has {pair[0]}, rank {rank} has {pair[1]}; all ranks make the same module, "
                    "and process their rows alike"
                )


def refuse_unlike_loads(group: Group, rows: Mapping[str, RowSlice]) -> None:
    """Only what is replicated is sharded: each rank was given the same tensors, as far as samples tell (collective).

    Raises:
        SpecError: on every rank, naming the first weight and part that differ.
    """
    mine = {f"{name}, {part}": print_ for name, row in rows.items() for part, print_ in row.prints.items()}
    told: list[Any] = [value for value, _ in group.all_gather(mine, name="loaded tensors")]
    for what in dict.fromkeys(what for theirs in told for what in theirs):
        if len({theirs.get(what) for theirs in told}) > 1:
            name = what.rpartition(", ")[0]
            raise SpecError(
                f"weight {what}: ranks were given unlike tensors, so it is not replicated, and rows of unlike weights "
                f"make none. Load the same on all ranks, by the same parts, or keep it whole with exclude=[{name!r}]"
            )


def refuse_differing(group: Group, new: Mapping[str, Tensor]) -> None:
    """What processing made beside rows is equal on all ranks, or is itself rows (collective).

    Raises:
        SpecError: on every rank, naming the first that differs.
    """
    mine = group.agree("new weights", lambda: {name: weight_hash(tensor) for name, tensor in new.items()})
    told: list[Any] = [value for value, _ in group.all_gather(mine, name="new weights")]
    for name in dict.fromkeys(name for theirs in told for name in theirs):
        if len({theirs.get(name) for theirs in told}) > 1:
            raise SpecError(
                f"{name} was made by post-load processing and differs between ranks. If it has a row for each (or "
                f"for each 128) of the weight beside it, make it a parameter and say follow={{{name!r}: 1}}; "
                "one scale for a whole weight is made from combined_amax(); fuse by loading parts of a merged weight "
                "(blocks=), since the rows of three weights are not the rows of their concatenation; and what ranks "
                "are to have unlike, such as experts, is excluded by exclude="
            )


def _late_followers(
    module: nn.Module,
    rows: Mapping[str, RowSlice],
    before: Collection[str],
    rules: RowRules,
    rank: int,
    device: Device,
) -> Iterator[tuple[str, RowSlice]]:
    """Parameters that did not exist at `prepare`, and hold a row for each so many of the rows beside them."""
    specs: dict[str, RowSpec] = {name: row.spec for name, row in rows.items()}
    for name, parameter in module.named_parameters():
        every = first_match(name, rules.follow)
        if every is None or name in before:
            continue
        leader = leader_of(name, specs)
        if leader is None:
            continue
        cut = leader.cut.followed(name, every)
        begin, end = cut.rows_of(rank)
        if not parameter.dim() or parameter.shape[0] != end - begin:
            raise SpecError(
                f"parameter {name} is {list(parameter.shape)}, and follows this rank's rows of {leader.name} with one "
                f"for each {every}: it would have {end - begin}; correct follow= or what makes it"
            )
        spec = following(name, (cut.num_rows, *parameter.shape[1:]), dtype_name(parameter), leader, every)
        yield name, RowSlice(spec, module, [name], rank, device, is_loaded=True)


def _refuse_idle(spec: ModuleSpec, rows: Mapping[str, RowSlice], rules: RowRules) -> None:
    followers = [name for name, row in rows.items() if row.spec.leader is not None]
    for pattern in rules.follow:
        if rows and not any(fnmatchcase(name, pattern) for name in followers):
            raise SpecError(
                f"follow: pattern {pattern!r} matches no parameter beside a weight that is kept by rows, of "
                f"{len(spec.parameters)} parameters inside the layers"
            )


def _new_tensors(
    module: nn.Module,
    stack: LayerStack,
    rows: Mapping[str, RowSlice],
    before: Collection[str],
    rules: RowRules,
) -> Iterator[tuple[str, Tensor]]:
    """What is new inside the layers, buffers only beside rows. What is excluded may differ: experts, say."""
    layers = tuple(f"{name}." if name else "" for names in stack.names for name in names)
    homes = {name.rpartition(".")[0] for name in rows}
    buffers = ((name, buffer) for name, buffer in module.named_buffers() if name.rpartition(".")[0] in homes)
    for name, tensor in (*module.named_parameters(), *buffers):
        is_new = name not in before and name not in rows and name.startswith(layers)
        if is_new and not any(fnmatchcase(name, pattern) for pattern in rules.exclude):
            yield name, tensor
