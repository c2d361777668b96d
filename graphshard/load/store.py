"""Tensors by name whose bytes are read by ranges: files on disk, or tensors in hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from graphshard.core.sizes import num_bytes


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a store: `shape` in elements of `dtype` (torch's name without `torch.`).

    `strides` (elements) are None for rows one after the other; else its bytes are those from its first to its last
    element, as they are stored.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes from the first to the last element."""
        return num_bytes(self.shape, self.dtype, self.strides)


class TensorStore(Protocol):
    """Where tensors come from. Several threads may read from one store at once."""

    @property
    def where(self) -> str:
        """What errors call it: a path, or `the tensors given`."""

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """All its tensors, by name."""

    def read_into(self, name: str, begin: int, out: memoryview) -> None:
        """Write bytes `[begin, begin + len(out))` of tensor `name` into `out`, whose items are bytes.

        Raises:
            LoadError: they cannot be read, or there are fewer than when the store was opened.
        """

    def identity(self) -> str | None:
        """Equal on two ranks of one machine only if they read the very same bytes; None if that is not known.

        Raises:
            LoadError: the store's bytes were changed or replaced since it was opened.
        """

    def release(self, names: Iterable[str]) -> None:
        """These tensors will not be read again: the store may give up its own copies."""

    @property
    def num_bytes_read(self) -> int:
        """Bytes that `read_into` has brought so far; headers do not count."""


def tensor_bytes(store: TensorStore, name: str) -> bytearray:
    """All bytes of tensor `name`, in memory of their own."""
    data = bytearray(store.entries[name].num_bytes)
    store.read_into(name, 0, memoryview(data))
    return data
