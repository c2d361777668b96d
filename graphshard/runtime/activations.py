"""The memory of tensor-parallel blocks: the buffers `tp.*`, reserved once for the largest step shape.

staging   `tp.tokens` and `tp.partial`, which peers read: a window under pull
private   `tp.gathered`, what partial sums of peers are copied to (pull), and `tp.summed`

All blocks share them, and all step shapes: no two run at once. A block's own segments see them at its own sizes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from graphshard.comm.activations import ActPlace
from graphshard.comm.alignment import JointStep
from graphshard.core.program import Program
from graphshard.core.sizes import align_up, num_bytes
from graphshard.core.specs import BlockSpec, ModelSpec, StepShape
from graphshard.device.base import Device
from graphshard.runtime.device_bytes import device_bytes
from graphshard.runtime.memory import BufferRow, torch_dtype

_ALIGNMENT_BYTES = 256
_STAGED = ("tokens", "partial")
_PRIVATE = ("gathered", "received", "summed")


def joint_step(shape: StepShape, program: Program) -> JointStep | None:
    """What ranks post of a step with tensor-parallel blocks; None if it has none."""
    if not program.blocks:
        return None
    return JointStep(shape.batch_size, shape.tokens_per_sequence, tuple(block.index for block in program.blocks))


class ActivationMemory:
    """The buffers of all blocks that are tensor-parallel at some step shape. Never moved."""

    def __init__(
        self, device: Device, model: ModelSpec, programs: Mapping[StepShape, Program], world_size: int
    ) -> None:
        """Reserve for the largest of them.

        Raises:
            DeviceError: the device has too little free memory.
        """
        self.world_size = world_size
        self._blocks = {
            (shape, block.index): _Sizes(model.blocks[block.index], shape, world_size)
            for shape, program in programs.items()
            for block in program.blocks
        }
        self._headers = {shape: _header(shape, program) for shape, program in programs.items()}
        self._areas = {
            name: max(align_up(sizes.num_bytes(name), _ALIGNMENT_BYTES) for sizes in self._blocks.values())
            for name in (*_STAGED, *_PRIVATE)
        }
        self.staging = device.allocate(sum(self._areas[name] for name in _STAGED), exportable=True)
        self.private = device.allocate(sum(self._areas[name] for name in _PRIVATE))
        self._bytes: dict[str, Tensor] = {}
        for memory, names in ((self.staging, _STAGED), (self.private, _PRIVATE)):
            rest = device_bytes(device, memory)
            for name in names:
                self._bytes[name], rest = rest[: self._areas[name]], rest[self._areas[name] :]

    @property
    def places(self) -> tuple[ActPlace, ...]:
        """Of all blocks at all step shapes."""
        return tuple(self.place(shape, block) for shape, block in self._blocks)

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        """The step shapes with tensor-parallel blocks."""
        return tuple({shape: None for shape, _ in self._blocks})

    def place(self, shape: StepShape, block: int) -> ActPlace:
        """Where the activations of `block` lie in steps of `shape`."""
        sizes = self._blocks[shape, block]
        addresses = {name: self._bytes[name].data_ptr() for name in (*_STAGED, *_PRIVATE)}
        return ActPlace(
            **addresses,
            token_bytes=sizes.num_bytes("tokens"),
            partial_bytes=sizes.num_bytes("summed"),
            num_elements=sizes.num_tokens * sizes.spec.width_out,
            dtype=sizes.spec.dtype,
            header=self._headers[shape],
        )

    def buffers(self, shape: StepShape) -> dict[str, dict[str, Tensor]]:
        """What the segments of blocks see as `tp.*` in steps of `shape`, by their paths."""
        found: dict[str, dict[str, Tensor]] = {}
        for (of, _), sizes in self._blocks.items():
            if of == shape:
                views = {f"tp.{name}": self._view(sizes, name) for name in (*_STAGED, "gathered", "summed")}
                found |= {segment.path: views for segment in sizes.spec.sliced_segments}
        return found

    def summing(self, shape: StepShape, block: int) -> Callable[[], None]:
        """What adds the partial sums of all ranks, in their order: `add_in_order`."""
        sizes = self._blocks[shape, block]
        return partial(add_in_order, self._view(sizes, "received"), self._view(sizes, "summed"))

    def rows(self) -> Iterator[BufferRow]:
        """The two allocations, as graphs see them."""
        for name, memory in (("tp.staging", self.staging), ("tp.private", self.private)):
            yield BufferRow(name, "memory", memory.address, memory.num_bytes)

    @torch.inference_mode(False)  # a view made in that mode could not be written outside of it
    def _view(self, sizes: _Sizes, name: str) -> Tensor:
        count = sizes.num_bytes(name)
        return self._bytes[name][:count].view(torch_dtype(sizes.spec.dtype)).view(sizes.shape(name))


def add_in_order(received: Tensor, summed: Tensor) -> None:
    """`summed` = received[0] + received[1] + ..., one after another, the same bits on every rank.

    Narrow floating-point numbers are added in float32 and rounded once: so the result depends on the number of ranks as
    little as the partial sums do.
    """
    is_narrow = received.dtype in (torch.bfloat16, torch.float16)
    total = received[0].to(torch.float32) if is_narrow else received[0].clone()
    for rank in range(1, received.shape[0]):
        total += received[rank]
    summed.copy_(total)


@dataclass(frozen=True)
class _Sizes:
    """The shapes of one block's activations at one step shape."""

    spec: BlockSpec
    step_shape: StepShape
    world_size: int

    @property
    def num_tokens(self) -> int:
        return self.step_shape.batch_size * self.step_shape.tokens_per_sequence

    def shape(self, name: str) -> tuple[int, ...]:
        all_tokens = self.world_size * self.num_tokens
        return {
            "tokens": (self.num_tokens, self.spec.width_in),
            "gathered": (all_tokens, self.spec.width_in),
            "partial": (all_tokens, self.spec.width_out),
            "received": (self.world_size, self.num_tokens, self.spec.width_out),
            "summed": (self.num_tokens, self.spec.width_out),
        }[name]

    def num_bytes(self, name: str) -> int:
        return num_bytes(self.shape(name), self.spec.dtype, None)


def _header(shape: StepShape, program: Program) -> int:
    """What ranks write beside their entry flags: equal on all that run this program at this step shape."""
    return zlib.crc32(f"{shape} {program.digest}".encode()) or 1
