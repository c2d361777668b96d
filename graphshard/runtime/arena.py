"""Memory for the temporaries of recorded segments: one bump pointer over blocks that all graphs share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphshard.core.sizes import align_up
from graphshard.runtime.memory import BufferRow

ALIGNMENT_BYTES = 64
"""What torch's own CPU allocator gives: the bits of a gemm may depend on its operands' alignment."""

DEFAULT_BLOCK_BYTES = 4 * 2**20


class Arena:
    """Where recorded temporaries lie. Reset at the start of each recording, so segments reuse each other's memory.

    Tapes of one arena overwrite each other's temporaries: never replay two of them at once. Record the largest step
    shape first; smaller ones then fit into its blocks. A block lives as long as a tape, or the arena, refers to it.
    """

    def __init__(self, block_bytes: int = DEFAULT_BLOCK_BYTES) -> None:
        """Blocks of at least `block_bytes` are reserved on demand, at capture; a replay reserves nothing."""
        self._block_bytes = block_bytes
        self._blocks: list[Tensor] = []
        self._block = 0
        self._used = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.numel() for block in self._blocks)

    def rows(self) -> list[BufferRow]:
        """Its blocks; one that is there stays where it is."""
        return [BufferRow.of(f"arena {i}", "arena", block) for i, block in enumerate(self._blocks)]

    def reset(self) -> None:
        """Start again at the first block: what was taken before may now be overwritten."""
        self._block = 0
        self._used = 0

    def owns(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies in one of the blocks."""
        storage = tensor.untyped_storage()._cdata
        return any(block.untyped_storage()._cdata == storage for block in self._blocks)

    def take(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of that shape on fresh memory, aligned to `ALIGNMENT_BYTES`, with no defined contents."""
        block, begin = self._reserve(_extent(size, stride) * dtype.itemsize)
        tensor = torch.empty(0, dtype=dtype)
        return tensor.set_(block.untyped_storage(), begin // dtype.itemsize, tuple(size), tuple(stride))

    def _reserve(self, num_bytes: int) -> tuple[Tensor, int]:
        """Block and first byte of `num_bytes` unused bytes."""
        while self._block < len(self._blocks):
            block = self._blocks[self._block]
            begin = align_up(block.data_ptr() + self._used, ALIGNMENT_BYTES) - block.data_ptr()
            if begin + num_bytes <= block.numel():
                self._used = begin + num_bytes
                return block, begin
            self._block += 1
            self._used = 0
        self._blocks.append(torch.empty(max(self._block_bytes, num_bytes + ALIGNMENT_BYTES), dtype=torch.uint8))
        return self._reserve(num_bytes)


def _extent(size: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last of a tensor."""
    if 0 in size:
        return 0
    return 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
