"""Torch tensors in hand as a store: bytes by name, whatever their strides and device."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from graphshard.load.store import TensorEntry


class TensorsInHand:
    """Tensors that somebody else owns. Each is read row by row, as if it were contiguous."""

    def __init__(self, tensors: Mapping[str, Tensor], as_stored: Collection[str] = ()) -> None:
        """`as_stored`: names whose bytes are read as they lie in memory, gaps between strided rows included."""
        self._tensors = tensors
        self._as_stored = frozenset(as_stored)
        self._entries = {name: self._entry(name, tensor) for name, tensor in tensors.items()}
        self._lock = threading.Lock()
        self._num_bytes_read = 0

    @property
    def where(self) -> str:
        """See TensorStore."""
        return f"the {len(self._tensors)} tensors given"

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """See TensorStore."""
        return self._entries

    def read_into(self, name: str, begin: int, out: memoryview) -> None:
        """See TensorStore. Tensors on a GPU are copied from there."""
        if len(out):  # numpy copies on one thread, and lets others run
            np.copyto(np.frombuffer(out, dtype=np.uint8), self._bytes(name, begin, begin + len(out)).cpu().numpy())
        with self._lock:
            self._num_bytes_read += len(out)

    def identity(self) -> None:
        """See TensorStore. Nothing but their bytes says whether two tensors are equal."""

    def release(self, names: Iterable[str]) -> None:
        """See TensorStore. The tensors are somebody else's."""

    @property
    def num_bytes_read(self) -> int:
        """See TensorStore."""
        return self._num_bytes_read

    def close(self) -> None:
        """Nothing is held open."""

    def _entry(self, name: str, tensor: Tensor) -> TensorEntry:
        strides = tuple(tensor.stride()) if name in self._as_stored and not tensor.is_contiguous() else None
        return TensorEntry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), strides)

    def _bytes(self, name: str, begin: int, end: int) -> Tensor:
        """Bytes `[begin, end)`, as uint8; a copy of the rows that hold them if the tensor is not contiguous."""
        tensor = self._tensors[name].detach().resolve_conj().resolve_neg()
        if tensor.is_contiguous() or name in self._as_stored:
            return _stored_bytes(tensor, begin, end)
        row_bytes = self._entries[name].num_bytes // tensor.shape[0]
        first, last = begin // row_bytes, -(-end // row_bytes)
        rows = tensor[first:last].contiguous()
        return _stored_bytes(rows, begin - first * row_bytes, end - first * row_bytes)


def _stored_bytes(tensor: Tensor, begin: int, end: int) -> Tensor:
    """Bytes `[begin, end)` from `tensor`'s first element on, as they lie in its storage."""
    at = tensor.storage_offset() * tensor.element_size() + begin
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), at, (end - begin,), (1,))
