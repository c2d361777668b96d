"""Everything of a module that a checkpoint may fill, by name: weights by rows, and weights whole."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches

from torch import Tensor, nn

from graphshard.core.counts import some_of
from graphshard.core.errors import LoadError
from graphshard.device.base import Device
from graphshard.runtime.engine.cut import ShardId
from graphshard.runtime.engine.rows import RowSlice
from graphshard.runtime.engine.stock import Stock
from graphshard.runtime.engine.whole import WholeWeight


class Ledger:
    """The account of one rank's loading."""

    def __init__(self, module: nn.Module, stock: Stock, unwritten: Collection[str], rank: int, device: Device) -> None:
        """`unwritten`: names of what has memory that nobody has written to."""
        names: dict[str, list[str]] = {}
        self._first_names: dict[str, str] = {}
        seen: dict[int, str] = {}
        tensors: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
        buffers = module.named_buffers(remove_duplicate=False)
        tensors |= {name: tensor for name, tensor in buffers if _is_saved(module, name)}
        for name, tensor in tensors.items():
            first = seen.setdefault(id(tensor), name)
            self._first_names[name] = first
            names.setdefault(first, []).append(name)
        self.rows = {name: RowSlice(row, module, names[name], rank, device) for name, row in stock.rows.items()}
        self.whole = {
            name: WholeWeight(name, module, dict(stock.blocks.get(name, {})), is_unwritten=name in unwritten)
            for name in names
            if name not in self.rows
        }

    def load(self, name: str, tensor: Tensor, shard_id: ShardId | None) -> None:
        """Load `tensor` as (a part of) the parameter or buffer `name`; a tied one under any of its names.

        Raises:
            LoadError: no such name, or as `RowSlice.load` and `WholeWeight.load`.
            ProgramError: as `RowSlice.load`.
        """
        first = self._first_names.get(name)
        if first is None:
            near = get_close_matches(str(name), self._first_names, n=3) or [some_of(list(self._first_names), 4)]
            raise LoadError(
                f"nothing is called {name!r} among {len(self._first_names)} parameters and buffers; there is "
                f"{', '.join(near)}. A part of a merged weight is loaded under the weight's name, with its shard id"
            )
        try:
            (self.rows.get(first) or self.whole[first]).load(tensor, shard_id)
        except LoadError as error:
            if name == first:
                raise
            raise LoadError(f"{name} is tied to {first}: {error}") from error

    def loads_by_parts(self) -> Mapping[str, nn.Parameter]:
        """The parameters that need a weight loader of ours: those by rows, and merged ones."""
        merged = {name: weight.tensor for name, weight in self.whole.items() if weight.parts.is_merged}
        found: dict[str, Tensor | None] = {**{name: row.parameter for name, row in self.rows.items()}, **merged}
        return {name: parameter for name, parameter in found.items() if isinstance(parameter, nn.Parameter)}

    def refuse_incomplete(self) -> None:
        """LoadError that lists all weights which are known not to be complete."""
        weights: list[RowSlice | WholeWeight] = [*self.rows.values(), *self.whole.values()]
        wrong = [why for weight in weights if (why := weight.why_incomplete())]
        if wrong:
            shown = "".join(f"\n  {line}" for line in wrong[:_MOST]) + ("\n  ..." if len(wrong) > _MOST else "")
            raise LoadError(
                f"{len(wrong)} of {len(weights)} weights not loaded: call their weight_loader, "
                f"or load() with their name{shown}"
            )

    def text(self) -> str:
        """How many weights were loaded in which way, in a line."""
        begun = sum(weight.parts.is_begun for weight in self.whole.values())
        return (
            f"loaded {len(self.rows)} weights by rows and {begun} whole; {len(self.whole) - begun} others are the "
            "module's own, or were loaded by its own loaders"
        )


_MOST = 20


def _is_saved(module: nn.Module, name: str) -> bool:
    path, _, attribute = name.rpartition(".")
    return attribute not in module.get_submodule(path)._non_persistent_buffers_set
