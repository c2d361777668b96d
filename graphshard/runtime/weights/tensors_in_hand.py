"""Torch tensors in hand as a store: bytes by name, whatever their strides and device."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from graphshard.core.errors import LoadError
from graphshard.load.store import TensorEntry


class TensorsInHand:
    """Tensors that somebody else owns. Each is read row by row, as if it were contiguous."""

    def __init__(self, tensors: Mapping[str, Tensor], as_stored: Collection[str] = ()) -> None:
        """Nothing is read yet.

        Args:
            tensors: by name; each holds all its bytes itself.
            as_stored: names whose bytes are read as they lie in memory, gaps between strided rows included.

        Raises:
            LoadError: something else is among them; reading its memory would end the process.
        """
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
        why = _why_unreadable(tensor)
        if why is not None:
            raise LoadError(f"{name} {why}: give a plain tensor that holds all its bytes")
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


def _why_unreadable(given: object) -> str | None:
    """Why the bytes of `given` are not to be had from its storage; None if they are."""
    if not isinstance(given, Tensor):
        return f"is a {type(given).__name__}, no tensor"
    if type(given).__torch_dispatch__ is not Tensor.__torch_dispatch__ or given.is_nested:
        kind = "nested tensor" if given.is_nested else type(given).__name__
        return f"is a {kind}, which keeps its bytes elsewhere (a DTensor has full_tensor())"
    if given.device.type == "meta":
        return "is on the meta device, and has no bytes"
    if given.layout is not torch.strided:
        return f"has the layout {given.layout}"
    last = sum((size - 1) * stride for size, stride in zip(given.shape, given.stride(), strict=True))
    end = (given.storage_offset() + last + 1) * given.element_size()
    there = given.untyped_storage().nbytes()
    if given.numel() and end > there:
        return f"has lost its memory: {there} bytes are left of {end}"
    return None


def _stored_bytes(tensor: Tensor, begin: int, end: int) -> Tensor:
    """Bytes `[begin, end)` from `tensor`'s first element on, as they lie in its storage."""
    at = tensor.storage_offset() * tensor.element_size() + begin
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), at, (end - begin,), (1,))
