"""The memory of one runtime: shard window, slots, resident weights and buffers, all reserved at once and never moved.

shards    this rank's chunks, exportable: peers copy from it
slots     gathered units, private
resident  whole weights, private
borrowed  whole weights of another runtime of this rank, in that one's memory
buffers   inputs, outputs, caches and activations; step shapes share them (steps never overlap)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NoReturn

import torch
from torch import Tensor

from graphshard._core import Memory
from graphshard.comm.transport import WindowUse
from graphshard.core.errors import DeviceError, SpecError
from graphshard.core.layout import Layout, UnitLayout, WeightView
from graphshard.core.sizes import align_up
from graphshard.core.specs import BufferRole, BufferSpec, StepShape
from graphshard.device.base import Device
from graphshard.runtime.device_bytes import device_bytes, read_bytes, writing_bytes

if TYPE_CHECKING:
    from graphshard.runtime.activations import ActivationMemory

BUFFER_ALIGNMENT_BYTES = 256


@dataclass(frozen=True)
class BufferRow:
    """One line of the table of everything a graph can see."""

    name: str
    role: str
    address: int
    num_bytes: int
    dtype: str = "uint8"
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()

    @staticmethod
    def of(name: str, role: str, tensor: Tensor) -> BufferRow:
        """The row of a tensor."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        return BufferRow(name, role, tensor.data_ptr(), tensor.numel() * tensor.element_size(), dtype, shape, strides)


class NamedBuffers(dict[str, Tensor]):
    """Static tensors by name, whose bytes are written and read; a name stands for the same memory for good.

    An unknown name is a KeyError that lists the known ones; another tensor in the place of one is a SpecError.
    """

    def __missing__(self, name: object) -> Tensor:
        raise KeyError(f"no buffer {name!r} here; known: {', '.join(self) or 'none'}")

    def _refuse(self, *arguments: object, **named: object) -> NoReturn:
        raise SpecError(
            "steps read and write these buffers where they lie, and would not see another tensor: write into the one "
            "that is here, as in inputs['tokens'].copy_(tokens)"
        )

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse


class RuntimeMemory:
    """All memory of a runtime. Tensors are views that keep their allocation alive."""

    def __init__(
        self,
        device: Device,
        layout: Layout,
        buffers: Mapping[StepShape, Sequence[BufferSpec]],
        allocate: Callable[[WindowUse, int], Memory] | None = None,
    ) -> None:
        """Reserve for `layout` and for the buffers of all step shapes.

        Args:
            device: where.
            layout: how many bytes of shards, slots and resident weights.
            buffers: by step shape.
            allocate: where shards and slots come from (`TransportOpening.allocate`); the device if nobody says.

        Raises:
            DeviceError: the device has too little free memory; nothing was reserved.
            SpecError: step shapes disagree about a buffer.
        """
        self._buffer_specs = {shape: tuple(specs) for shape, specs in buffers.items()}
        self._buffer_offsets, buffer_bytes = _buffer_offsets(self._buffer_specs)
        sizes = {
            "shards": layout.shard_bytes,
            "slots": layout.slot_bytes,
            "resident weights": layout.resident_bytes,
            "buffers": buffer_bytes,
        }
        _refuse_if_too_large(device, sizes)
        self.layout = layout
        self.borrowed: Mapping[str, Tensor] = {}
        """Weights of another runtime, by name: its views, which keep its memory mapped."""
        self.activations: ActivationMemory | None = None
        """What tensor-parallel blocks have beside that; set by whoever reserves it."""
        allocate = allocate or (lambda use, num_bytes: device.allocate(num_bytes, exportable=use == "shards"))
        self.shards = allocate("shards", layout.shard_bytes) if layout.shard_bytes else None
        self.slots = allocate("slots", layout.slot_bytes) if layout.slot_bytes else None
        self._shard_bytes = device_bytes(device, self.shards)
        self._slot_bytes = device_bytes(device, self.slots)
        self._resident_bytes = device_bytes(device, _allocate(device, layout.resident_bytes))
        self._buffer_bytes = device_bytes(device, _allocate(device, buffer_bytes))

    @property
    def is_staged(self) -> bool:
        """Whether what is written passes through other memory of the host: see `writing_bytes`."""
        return any(one.device.type != "cpu" for one in (self._shard_bytes, self._resident_bytes))

    def slot(self, slot: int) -> Tensor:
        """The bytes of `slot` (uint8)."""
        place = self.layout.slots[slot]
        return self._slot_bytes[place.offset : place.offset + place.num_bytes]

    def is_in_slots(self, tensor: Tensor) -> bool:
        """Whether `tensor` begins in a slot, whose bytes are another weight's a moment later."""
        begin = 0 if self.slots is None else self.slots.address
        return begin <= tensor.data_ptr() < begin + self.layout.slot_bytes

    def slot_address(self, slot: int) -> int:
        """Where `slot` begins."""
        assert self.slots is not None
        return self.slots.address + self.layout.slots[slot].offset

    def writing_shard(self, begin: int, num_bytes: int) -> AbstractContextManager[memoryview]:
        """`num_bytes` of this rank's chunks from `begin` on, to be written in the block: for the loader only."""
        return writing_bytes(self._shard_bytes[begin : begin + num_bytes])

    def gathered(self, view: WeightView, slot: int) -> Tensor:
        """The weight `view` of a unit that lies in `slot`."""
        return weight_tensor(self.slot(slot), view)

    def sliced(self, unit: UnitLayout, view: WeightView) -> Tensor:
        """This rank's slice `view` of a weight, where it is kept."""
        return weight_tensor(self._shard_bytes[unit.chunk_offset : unit.chunk_offset + unit.chunk_bytes], view)

    def resident(self, view: WeightView) -> Tensor:
        """The resident weight `view`."""
        return weight_tensor(self._resident_bytes, view)

    def private(self, view: WeightView, slot: int | None) -> Tensor:
        """A copy of the weight `view` that lies in `slot` (None: resident)."""
        return private_weight(self._resident_bytes if slot is None else self.slot(slot), view)

    def writing(
        self, area: Literal["shards", "resident"], begin: int, num_bytes: int
    ) -> AbstractContextManager[memoryview]:
        """`num_bytes` of this rank's chunks, or of its resident weights, to be written in the block: for updates."""
        memory = self._shard_bytes if area == "shards" else self._resident_bytes
        return writing_bytes(memory[begin : begin + num_bytes])

    def chunk(self, unit: UnitLayout) -> memoryview:
        """This rank's chunk of `unit`, as it is now, on the host."""
        return read_bytes(self._shard_bytes[unit.chunk_offset : unit.chunk_offset + unit.chunk_bytes])

    def resident_bytes(self, view: WeightView) -> memoryview:
        """The bytes of the resident weight `view`, as they are now, on the host."""
        return read_bytes(self._resident_bytes[view.offset : view.offset + view.num_bytes])

    def writing_resident(self, view: WeightView) -> AbstractContextManager[memoryview]:
        """The bytes of the resident weight `view`, to be written in the block: for the loader only."""
        return writing_bytes(self._resident_bytes[view.offset : view.offset + view.num_bytes])

    @torch.inference_mode(False)  # a view made in that mode could not be written outside of it
    def buffers(self, shape: StepShape, role: BufferRole | None = None) -> NamedBuffers:
        """The buffers (of one role) as a step of `shape` sees them: caches by their first `batch_size` rows."""
        tensors: dict[str, Tensor] = {}
        for spec in self._buffer_specs[shape]:
            if role is not None and spec.role != role:
                continue
            begin = self._buffer_offsets[spec.name]
            tensor = self._buffer_bytes[begin : begin + spec.num_bytes].view(torch_dtype(spec.dtype)).view(spec.shape)
            tensors[spec.name] = tensor[: shape.batch_size] if spec.role == "cache" else tensor
        return NamedBuffers(tensors)

    def buffer_table(self) -> tuple[BufferRow, ...]:
        """Everything a captured graph can see, by address."""
        rows = [
            BufferRow(name, "memory", memory.address, memory.num_bytes)
            for name, memory in (("shards", self.shards), ("slots", self.slots))
            if memory is not None
        ]
        if self._resident_bytes.numel():
            rows.append(BufferRow("resident", "memory", self._resident_bytes.data_ptr(), self._resident_bytes.numel()))
        largest: dict[str, BufferSpec] = {}
        for specs in self._buffer_specs.values():
            for spec in specs:
                if spec.name not in largest or spec.num_bytes > largest[spec.name].num_bytes:
                    largest[spec.name] = spec
        base = self._buffer_bytes.data_ptr()
        for name, spec in largest.items():
            rows.append(BufferRow(name, spec.role, base + self._buffer_offsets[name], spec.num_bytes))
        if self.activations is not None:
            rows += self.activations.rows()
        return tuple(sorted(rows, key=lambda row: row.address))

    @contextmanager
    def unchanged_buffers(self) -> Iterator[None]:
        """All buffers hold afterwards what they held before, whatever the block did to them."""
        snapshot = self.snapshot_buffers()
        try:
            yield
        finally:
            self.restore_buffers(snapshot)

    def snapshot_buffers(self) -> Tensor | None:
        """What all buffers hold, to be put back after compute was recorded on them; None, not a copy, for zeros."""
        return self._buffer_bytes.clone() if self._buffer_bytes.any() else None

    def restore_buffers(self, snapshot: Tensor | None) -> None:
        """Put a snapshot back."""
        if snapshot is None:
            self._buffer_bytes.zero_()
        else:
            self._buffer_bytes.copy_(snapshot)


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype called `name`; SpecError if this torch has none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise SpecError(f"torch {torch.__version__} has no dtype {name!r}: keep the weight as uint8 bytes")
    return dtype


def weight_tensor(base: Tensor, view: WeightView) -> Tensor:
    """The weight `view` as a tensor over the bytes `base`, with the strides it was stored with."""
    flat = base[view.offset : view.offset + view.num_bytes].view(torch_dtype(view.dtype))
    if view.strides is None:
        return flat.view(view.shape)
    return flat.as_strided(view.shape, view.strides, flat.storage_offset())


def private_weight(base: Tensor, view: WeightView) -> Tensor:
    """The weight `view` of the bytes `base` on memory of its own, with the strides it was stored with."""
    return weight_tensor(base[view.offset : view.offset + view.num_bytes].clone(), replace(view, offset=0))


def _allocate(device: Device, num_bytes: int) -> Memory | None:
    return device.allocate(num_bytes) if num_bytes else None


def _buffer_offsets(specs: Mapping[StepShape, Sequence[BufferSpec]]) -> tuple[dict[str, int], int]:
    """Where each buffer begins, and the size of all: each is as large as its largest step shape makes it."""
    sizes: dict[str, int] = {}
    caches: dict[str, BufferSpec] = {}
    for shape, declared in specs.items():
        for spec in declared:
            if spec.role == "cache" and caches.setdefault(spec.name, spec) != spec:
                raise SpecError(
                    f"cache {spec.name} has shape {spec.shape} at step shape {shape} and "
                    f"{caches[spec.name].shape} at another: declare it for the largest step shape"
                )
            sizes[spec.name] = max(sizes.get(spec.name, 0), spec.num_bytes)
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += align_up(size, BUFFER_ALIGNMENT_BYTES)
    return offsets, end


def _refuse_if_too_large(device: Device, sizes: Mapping[str, int]) -> None:
    need, free = sum(sizes.values()), device.driver.free_bytes
    if need > free:
        parts = " + ".join(f"{size / 2**30:.2f} {name}" for name, size in sizes.items() if size)
        raise DeviceError(
            f"not enough memory on {device.name}: {need / 2**30:.2f} GiB are needed ({parts}), "
            f"{free / 2**30:.2f} GiB are free; nothing was reserved. Use more ranks, fewer step shapes, a shorter cache"
        )
