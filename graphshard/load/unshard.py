"""Shard files made into a plain checkpoint: whole weights by name in one safetensors file, a few MiB at a time."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from graphshard.core.errors import SpecError
from graphshard.core.layout import WeightView
from graphshard.core.sizes import num_bytes
from graphshard.core.specs import WeightSpec
from graphshard.load.atomic_file import AtomicFile
from graphshard.load.shard_reader import ShardReader
from graphshard.load.writer import safetensors_header


def unshard(reader: ShardReader, path: Path) -> int:
    """Write the weights of `reader` to the file `path`, which appears when it is whole. Returns its bytes.

    The format holds contiguous tensors alone: a weight with strides is made one, in memory.

    Raises:
        SpecError: something lies at `path`.
        LoadError: a shard file is corrupt, or the format has no name for a weight's dtype.
        DeviceError: the file cannot be written.
    """
    if path.exists() or path.is_symlink():
        raise SpecError(f"{path} exists, and would be lost: give a new name for the checkpoint")
    layout = reader.manifest.layout
    specs = [replace(spec, strides=None) for spec in reader.manifest.weights]
    header = safetensors_header(path, specs, {"format": "pt"})
    begins, end = {}, len(header)
    for spec in specs:
        begins[spec.name] = end
        end += spec.num_bytes
    with AtomicFile(path, end) as file:
        file.write(0, header)
        for unit in layout.units:
            weights = [_Weight(view, begins[view.weight], file) for view in unit.views]
            for begin, piece in reader.unit(unit.unit):
                for weight in weights:
                    weight.add(begin - weight.view.offset, piece)
        for index, view in enumerate(layout.resident):
            weight = _Weight(view, begins[view.weight], file)
            for begin, piece in reader.resident(index):
                weight.add(begin, piece)
        file.commit()
    return end


class _Weight:
    """A weight on its way to `file_begin` of the file. One with strides is kept until it is whole."""

    def __init__(self, view: WeightView, file_begin: int, file: AtomicFile) -> None:
        self.view, self._begin, self._file = view, file_begin, file
        self._stored = None if view.strides is None else bytearray(view.num_bytes)

    def add(self, begin: int, data: memoryview) -> None:
        """`data` lies at byte `begin` of the weight, or before or after it; it is given in order."""
        first, last = max(0, begin), min(self.view.num_bytes, begin + len(data))
        if first >= last:
            return
        part = data[first - begin : last - begin]
        if self._stored is None:
            self._file.write(self._begin + first, part)
            return
        self._stored[first:last] = part
        if last == self.view.num_bytes:
            self._file.write(self._begin, contiguous_bytes(self.view, self._stored))
            self._stored = None


def contiguous_bytes(spec: WeightSpec | WeightView, stored: bytearray) -> bytes:
    """The bytes of the weight `spec` row by row, from those that are `stored` with its strides."""
    assert spec.strides is not None
    item = num_bytes(spec.shape, spec.dtype, None) // max(1, math.prod(spec.shape))
    elements = np.frombuffer(stored, dtype=np.dtype((np.void, item)))
    strides = [stride * item for stride in spec.strides]
    return np.lib.stride_tricks.as_strided(elements, spec.shape, strides).tobytes()
