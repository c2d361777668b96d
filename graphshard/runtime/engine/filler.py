"""Redistribution: rows of each rank become flat chunks of all ranks, one weight and one temporary window at a time.

Ranks stage their rows of a weight in a window that peers map, a stripe at a time; each copies what its own chunk lacks.
A weight's rows are given up as soon as everybody has them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial

import torch
from torch import nn

from graphshard._core import Memory
from graphshard.comm.checksums import checksum_of
from graphshard.comm.group import Group
from graphshard.comm.windows import WindowTable
from graphshard.core.layout import chunk_pieces
from graphshard.core.specs import ModelSpec
from graphshard.device.base import Device
from graphshard.runtime.attach.source import ModuleSource, weight_hash
from graphshard.runtime.compiled import Compiled
from graphshard.runtime.engine.rows import RowSlice
from graphshard.runtime.memory import RuntimeMemory
from graphshard.runtime.weights.replicated import check_replicated
from graphshard.runtime.weights.report import LoadedWeight, LoadReport, kept_bytes_of

MAX_WINDOW_BYTES = 16 << 20
"""Of a stripe: larger slices are redistributed in several."""

_WINDOW = "rows"


class RowFiller:
    """Fills from rows (see `runtime.weights.fill.Filler`), and from the module's whole weights where it keeps those."""

    def __init__(
        self, rows: Mapping[str, RowSlice], parameters: Mapping[str, nn.Parameter], device: Device, group: Group
    ) -> None:
        """`parameters`: all weights of the model, those that are kept by `rows` included."""
        self._rows, self._parameters = rows, parameters
        self._whole = ModuleSource({name: weight for name, weight in parameters.items() if name not in rows})
        self._device, self._group = device, group
        self._rows_bytes = sum(slice_.parameter.nbytes for slice_ in rows.values())
        self._window_bytes = 0
        self._window: Memory | None = None
        self._windows: WindowTable | None = None
        self._report: LoadReport | None = None
        self.num_released = 0

    def prepare(self, compiled: Compiled, group: Group) -> None:
        """See Filler. Only what is replicated is sharded: weights that this module holds whole are compared."""
        sharded = [name for unit in compiled.plan.units for name in unit.weights if name not in self._rows]
        check_replicated(group, sharded, lambda name: weight_hash(self._parameters[name]), may_differ=True)

    def fill(self, compiled: Compiled, group: Group, memory: RuntimeMemory) -> list[int]:
        """See Filler."""
        started = time.monotonic()
        try:
            self._open_window(compiled.model)
            checksums = self._fill(compiled, memory)
        finally:
            self._close_window()
        self._report = self._reported(compiled, time.monotonic() - started)
        return checksums

    @property
    def report(self) -> LoadReport:
        """See Filler."""
        assert self._report is not None, "nothing was filled"
        return self._report

    def _fill(self, compiled: Compiled, memory: RuntimeMemory) -> list[int]:
        model, checksums = compiled.model, []
        for unit in compiled.layout.units:
            pieces = {piece.weight: piece for piece in chunk_pieces(unit, self._group.rank)}
            with memory.writing_shard(unit.chunk_offset, unit.chunk_bytes) as chunk:
                for view in unit.views:
                    piece = pieces.get(view.weight)
                    begin, end, at = (0, 0, 0) if piece is None else piece[1:]
                    self._bring(model, view.weight, begin, chunk[at : at + end - begin])
                checksums.append(checksum_of(chunk))
        for view in compiled.layout.resident:
            with memory.writing_resident(view) as resident:
                self._bring(model, view.weight, 0, resident)
        return checksums

    def _bring(self, model: ModelSpec, name: str, begin: int, out: memoryview) -> None:
        """Write bytes `[begin, begin + len(out))` of weight `name` into `out`, and give this rank's own up."""
        slice_, agree = self._rows.get(name), self._group.agree
        if slice_ is None:
            spec = model.weight(name)
            agree(f"load of {name}", lambda: self._whole.read_into(spec, begin, out))
            self._whole.release([name])
        else:
            transfer = _Transfer(slice_, model.weight(name).num_bytes, begin, out, self._group)
            for stripe in range(transfer.num_stripes(self._window_bytes)):
                agree(f"rows of {name}", partial(self._stage, transfer, stripe))
                agree(f"copy of {name}", partial(self._copy, transfer, stripe))
            del transfer  # it holds the rows
            slice_.release()
        self.num_released += 1

    def _stage(self, transfer: _Transfer, stripe: int) -> None:
        """Show peers a stripe of this rank's rows; what this rank itself needs of them needs no window."""
        if stripe == 0:
            transfer.take_own()
        if self._window is not None:
            shown = transfer.own[stripe * self._window_bytes :][: self._window_bytes]
            memoryview(self._window).cast("B")[: len(shown)] = shown

    def _copy(self, transfer: _Transfer, stripe: int) -> None:
        if self._windows is not None:
            for rank in transfer.peers:
                window = memoryview(self._windows.window(_WINDOW, rank)).cast("B")
                transfer.copy_from(rank, stripe * self._window_bytes, window[: self._window_bytes])

    def _open_window(self, model: ModelSpec) -> None:
        """As large as the largest slice of any rank, up to a stripe (collective)."""
        cuts = [(slice_.spec.cut, model.weight(name)) for name, slice_ in self._rows.items()]
        most = max((cut.most_rows * (weight.num_bytes // cut.num_rows) for cut, weight in cuts), default=0)
        if self._group.world_size > 1 and most:
            size = self._window_bytes = min(most, MAX_WINDOW_BYTES)
            self._window = self._group.agree("temporary window", lambda: self._device.allocate(size, exportable=True))
            self._windows = WindowTable(self._device, self._group)
            self._windows.register({_WINDOW: self._window})

    def _close_window(self) -> None:
        if self._windows is not None:
            self._windows.close()
        self._windows = self._window = None

    def _reported(self, compiled: Compiled, seconds: float) -> LoadReport:
        kept = kept_bytes_of(compiled.layout, self._group.rank)
        weights = tuple(
            LoadedWeight(
                weight.name,
                "rows: redistributed" if weight.name in self._rows else self._whole.way(weight.name),
                weight.num_bytes,
                kept[weight.name],
            )
            for weight in compiled.model.weights
        )
        return LoadReport(weights, self._whole.num_bytes_read, 0, self._rows_bytes + self._window_bytes, seconds)


class _Transfer:
    """One weight on its way: `own` are this rank's rows, `out` is where bytes from `begin` on are wanted."""

    def __init__(self, slice_: RowSlice, num_bytes: int, begin: int, out: memoryview, group: Group) -> None:
        cut = slice_.spec.cut
        self._bounds = [bound * (num_bytes // cut.num_rows) for bound in cut.bounds]
        self._slice, self._begin, self._out, self._rank = slice_, begin, out, group.rank
        self.own = memoryview(b"")
        first = group.rank + 1  # ranks begin with different peers
        self.peers = [(first + i) % group.world_size for i in range(group.world_size - 1)]

    def num_stripes(self, window_bytes: int) -> int:
        """Stripes in which the largest slice passes a window; one if there is none."""
        most = max(end - begin for begin, end in zip(self._bounds, self._bounds[1:], strict=False))
        return max(1, -(-most // window_bytes)) if window_bytes else 1

    def take_own(self) -> None:
        """Take this rank's rows, and copy what is wanted of them."""
        rows = self._slice.standing()
        if rows.numel():
            self.own = rows.reshape(-1).view(torch.uint8).numpy().data
        self.copy_from(self._rank, 0, self.own)

    def copy_from(self, rank: int, at: int, shown: memoryview) -> None:
        """What is wanted of `shown`, which begins `at` bytes into rank `rank`'s rows."""
        source = self._bounds[rank] + at
        first = max(source, self._begin)
        last = min(source + len(shown), self._bounds[rank + 1], self._begin + len(self._out))
        if first < last:
            self._out[first - self._begin : last - self._begin] = shown[first - source : last - source]
