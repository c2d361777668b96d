"""Faults of sizes, dtypes, alignment and padding (G): gathers move bytes, and every byte comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_model import ByteModel, self_naming
from byte_steps import compile_bytes, wrong_after
from fault_tools import alone, with_run
from order_rig import TIMEOUT_S
from ranks import run_on_ranks
from torch import Tensor
from verify_cases import model_of, plan_of

import graphshard
from graphshard._core import Calls, DriverError, Memory, OpList, Stream
from graphshard.comm.group import Group, LocalGroup
from graphshard.comm.pull import PullTransport
from graphshard.core.layout import Layout, UnitLayout, build_layout
from graphshard.core.specs import BufferSpec, ModelSpec, SegmentSpec, StepShape, WeightSpec
from graphshard.device import open_device
from graphshard.load.writer import write_safetensors
from graphshard.runtime.bind import POISON, Hooks
from graphshard.runtime.memory import RuntimeMemory
from graphshard.runtime.model import Segment, StepState

STEP = StepShape(1)


class TypedModel:
    """Each layer reads weights of given (dtype, shape) whose bytes name themselves; outputs are those bytes."""

    def __init__(self, layers: Sequence[Sequence[tuple[str, tuple[int, ...]]]], *, name: str = "typed") -> None:
        self.name, self.weights, segments = name, [], []
        for layer, weights in enumerate(layers):
            specs = [WeightSpec(f"{name}.{layer}.w{i}", shape, dtype) for i, (dtype, shape) in enumerate(weights)]
            self.weights += specs
            reads = tuple(spec.name for spec in specs)
            segments.append(Segment(SegmentSpec("all", layer, reads), partial(self._show, specs)))
        self.segments = tuple(segments)
        self.addresses: dict[str, set[int]] = {}

    def spec(self) -> ModelSpec:
        return ModelSpec(self.name, tuple(self.weights), tuple(segment.spec for segment in self.segments))

    def buffers(self, shape: StepShape) -> tuple[BufferSpec, ...]:
        return tuple(BufferSpec(f"out:{w.name}", (w.num_bytes,), "uint8", "output") for w in self.weights)

    def raw(self, weight: WeightSpec) -> Tensor:
        """The weight's bytes: special values first (every pattern of 16 bits), then bytes that name themselves."""
        patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.uint8)
        return torch.cat([patterns, self_naming(self.name, weight.name, weight.num_bytes)])[: weight.num_bytes]

    def tensors(self) -> dict[str, Tensor]:
        """Tensors of the weights' own dtypes."""
        return {w.name: self.raw(w).clone().view(getattr(torch, w.dtype)).view(w.shape) for w in self.weights}

    def wrong(self, outputs: dict[str, Tensor], version: int = 0) -> list[str]:
        return [w.name for w in self.weights if not torch.equal(outputs[f"out:{w.name}"], self.raw(w))]

    def _show(self, weights: Sequence[WeightSpec], state: StepState) -> None:
        for weight in weights:
            tensor = state.weight(weight.name)
            self.addresses.setdefault(weight.name, set()).add(tensor.data_ptr())
            assert (tuple(tensor.shape), str(tensor.dtype)) == (weight.shape, f"torch.{weight.dtype}")
            state.buffer(f"out:{weight.name}").copy_(tensor.reshape(-1).view(torch.uint8))


def steps_of(group: Group, model: Any, **choices: Any) -> list[str]:
    """A step eagerly, then two replays: what was wrong."""
    with compile_bytes(group, model, **({"units": "layer", "prefetch_depth": 1} | choices)) as runtime:
        acts = (lambda: runtime.run(1), runtime.graph(1).replay, runtime.graph(1).replay)
        return [line for act in acts for line in wrong_after(runtime, model, act)]


# --- empty and odd sizes ---


def odd_sizes(group: Group, units: str, transport: str) -> list[str]:
    n = group.world_size
    sizes = [0, 1, n - 1, n, n + 1, 16 * n - 1]
    layers = [[size] for size in sizes] + [[], sizes, [0, 0]]
    model = ByteModel(layers)
    with_no_weights = Segment(SegmentSpec("nothing", 6, ()), lambda state: None)
    model.segments = (*model.segments[:6], with_no_weights, *model.segments[6:])
    zero_rows = WeightSpec("bytes.8.zero_rows", (0, 7), "uint8")
    model.weights.append(zero_rows)
    last = model.segments[-1].spec
    model.segments = (*model.segments, Segment(replace(last, name="rows", reads=(zero_rows.name,)), lambda state: None))
    tensors = {**model.tensors(), zero_rows.name: torch.empty(0, 7, dtype=torch.uint8)}
    wrong = []
    for head in ("inside", "tail"):
        choices: dict[str, Any] = {"units": units, "prefetch_depth": 1, "head": head, "transport": transport}
        with compile_bytes(group, model, checkpoint=tensors, **choices) as runtime:
            resident = [d.weight for d in runtime.plan.decisions if d.unit is None]
            assert all(runtime.model.weight(name).num_bytes == 0 for name in resident)
            for act in (lambda: runtime.run(1), runtime.graph(1).replay, runtime.graph(1).replay):
                wrong += wrong_after(runtime, model, act)
            assert runtime.graph(1).num_nodes()["memcpy"] == n * len(runtime.plan.units), "and none for what is empty"
    return wrong


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_odd_sizes_come_back_whole(world_size: int, transport: str) -> None:
    """Weights of 0, 1, N-1, N, N+1 and 16N-1 bytes, layers without weights, tensors without rows."""
    for units in ("weight", "layer"):
        assert run_on_ranks(odd_sizes, world_size, units, transport) == [[]] * world_size


# --- alignment ---

MIXED = [
    ("uint8", (3,)),
    ("float32", ()),
    ("float8_e4m3fn", (5,)),
    ("bfloat16", (3, 1)),
    ("float4_e2m1fn_x2", (9,)),
    ("complex128", (2,)),
]


@pytest.mark.parametrize("alignment", [16, 256])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_views_are_aligned_in_every_slot_wherever_they_came_from(
    world_size: int, alignment: int, transport: str, tmp_path: Path
) -> None:
    """Odd lengths before wide elements, odd offsets in the file, chunk borders inside elements."""
    file = tmp_path / "odd.safetensors"
    plain = [entry for entry in MIXED if entry[0] not in ("float4_e2m1fn_x2", "complex128")]

    def rank(group: Group) -> list[str]:
        wrong = []
        for layer, checkpoint in ((MIXED, None), (plain, file)):
            model = TypedModel([layer] * 4)
            if checkpoint is not None and group.rank == 0:
                write_safetensors(file, model.weights, [model.raw(w).numpy().data for w in model.weights])
            group.barrier()
            source: Any = checkpoint or unaligned(model.tensors())
            choices = {"alignment_bytes": alignment, "head": "tail", "transport": transport}
            wrong += steps_of(group, model, checkpoint=source, **choices)
            for weight in model.weights:
                itemsize = getattr(torch, weight.dtype).itemsize
                assert all(address % max(16, itemsize) == 0 for address in model.addresses[weight.name])
            by_place: dict[str, set[int]] = {}
            for name, addresses in model.addresses.items():
                by_place.setdefault(name.rsplit(".", 1)[1], set()).update(addresses)
            assert all(len(addresses) >= 2 for addresses in by_place.values()), "in both slots"
            group.barrier()
        return wrong

    assert run_on_ranks(rank, world_size) == [[]] * world_size


def unaligned(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, those of bytes at odd addresses."""
    moved = {}
    for name, tensor in tensors.items():
        if tensor.element_size() == 1 and tensor.dtype == torch.uint8:
            raw = torch.empty(tensor.numel() + 1, dtype=torch.uint8)
            raw[1:] = tensor
            assert raw[1:].data_ptr() % 2 == 1
            moved[name] = raw[1:]
        else:
            moved[name] = tensor
    return moved


# --- padding ---


def padding(group: Group, poison: bool, transport: str) -> list[int]:
    """Checksums of every unit's gathered bytes, after making sure that what no weight covers is zero."""
    model = ByteModel([[1, 255, 257], [100], [3000, 1]])
    choices: dict[str, Any] = {"hooks": Hooks(poison=poison), "transport": transport}
    sums = []
    with compile_bytes(group, model, units="layer", prefetch_depth=1, **choices) as runtime:
        for act in (runtime.graph(1).replay, lambda: runtime.run(1), runtime.graph(1).replay):
            assert wrong_after(runtime, model, act) == []
        for residency in runtime.plan.residencies:
            unit = runtime.layout.units[residency.unit]
            if runtime.held[residency.slot] == residency.unit:
                gathered = runtime._memory.slot(residency.slot)[: unit.num_bytes]
                assert not gathered[outside(unit)].any(), "padding between and behind weights"
                sums.append(int(gathered.sum()))
        shard = torch.frombuffer(runtime._memory.shards, dtype=torch.uint8)
        covered = torch.zeros(len(shard), dtype=torch.bool)
        for unit in runtime.layout.units:
            begin, end = unit.chunk_offset, unit.chunk_offset + unit.chunk_bytes
            mine = outside(unit)[group.rank * unit.chunk_bytes : (group.rank + 1) * unit.chunk_bytes]
            assert not shard[begin:end][mine].any()
            covered[begin:end] = True
        assert not shard[~covered].any()
    return sums


def outside(unit: UnitLayout) -> Tensor:
    """Which bytes of a unit belong to no weight."""
    free = torch.ones(unit.num_bytes, dtype=torch.bool)
    for view in unit.views:
        free[view.offset : view.offset + view.num_bytes] = False
    return free


@pytest.mark.parametrize("world_size", [1, 3])
def test_padding_is_zero_in_shards_and_in_slots(world_size: int, transport: str) -> None:
    """Also after slots were poisoned, equal on all ranks and in all runs."""
    sums = [result for poison in (True, False) for result in run_on_ranks(padding, world_size, poison, transport)]
    assert len(sums[0]) >= 2 and all(other == sums[0] for other in sums)


# --- beyond 32 bits ---

BIG = [(1 << 31) - 1, 1 << 31, (1 << 32) + 16, 3 << 30, 5 << 30]


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_offsets_have_64_bits_in_layouts(world_size: int) -> None:
    """Units of up to 5 GiB, rank * chunk_bytes beyond 2^32; no memory is needed."""
    reads = [(unit,) for unit in range(len(BIG))]
    plan = plan_of(reads, BIG, world_size=world_size, prefetch_depth=1)
    layout = build_layout(model_of(reads, BIG), plan)
    assert layout.shard_bytes == sum(unit.chunk_bytes for unit in layout.units) > (15 << 30) // world_size
    for unit, size in zip(layout.units, BIG, strict=True):
        assert unit.num_bytes >= size and unit.views[0].num_bytes == size
        assert [copy.slot_offset for copy in unit.copies] == [rank * unit.chunk_bytes for rank in range(world_size)]
    assert layout.slots[-1].offset + layout.slots[-1].num_bytes == layout.slot_bytes >= 1 << 33


def small_behind_large(layout: Layout, memory: RuntimeMemory, group: Group) -> tuple[bytes, bytes]:
    """Gather the last unit, whose chunk and slot lie behind 2^32 bytes that nobody touches."""
    unit, slot = layout.units[-1], len(layout.slots) - 1
    truth = self_naming("big", "small", unit.num_bytes).numpy().tobytes()
    assert memory.shards is not None and unit.chunk_offset > 1 << 32 < layout.slots[slot].offset
    memoryview(memory.shards)[unit.chunk_offset : unit.chunk_offset + unit.chunk_bytes] = truth
    transport = PullTransport(open_device(), group, layout, memory.shards, [0] * len(layout.units))
    stream = Stream(open_device().driver)
    ops = []
    for copy in transport.copies(unit.unit, memory.slot_address(slot)):
        ops += [("fill", 0, copy.destination, POISON, copy.row_bytes), copy.bound(0)]
    op_list, calls = OpList(open_device().driver, [stream], 0, ops), Calls([])
    op_list.issue(calls)
    op_list.capture(calls).instantiate("cooperative", 1).launch(stream)
    assert stream.synchronize(TIMEOUT_S)
    gathered = memory.slot(slot)[: unit.num_bytes].numpy().tobytes()
    transport.close()
    return gathered, truth


@pytest.mark.slow  # the driver backs windows with memory when it maps them: more than 8 GiB
def test_offsets_have_64_bits_in_gathers() -> None:
    """Shard and slot windows of more than 4 GiB; the unit behind them is gathered."""
    sizes = [(1 << 32) + 4096, 5000]
    reads = [(unit,) for unit in range(2)]
    layout = build_layout(model_of(reads, sizes), plan_of(reads, sizes, world_size=1, prefetch_depth=1))
    free, needed = open_device().driver.free_bytes, layout.shard_bytes + layout.slot_bytes
    if free < 2 * needed:
        pytest.skip(f"needs twice {needed >> 20} MiB of free memory, {free >> 20} MiB are free")
    memory = RuntimeMemory(open_device(), layout, {})
    with LocalGroup(1) as groups:
        gathered, truth = small_behind_large(layout, memory, groups[0])
    assert gathered == truth


def test_sizes_beyond_32_bits_are_not_cut_off() -> None:
    """Cut to 32 bits, each of these would fit into the memory it names, and be accepted."""
    driver = open_device().driver
    memory, stream, wide = Memory(driver, 8192), Stream(driver), 1 << 32
    base = memory.address
    ops: list[tuple[object, ...]] = [
        ("copy", 0, base, base + 4096, wide + 16),
        ("copy", 0, base + wide, base, 16),
        ("copy", 0, base, base + wide, 16),
        ("fill", 0, base, 1, wide + 16),
        ("fill", 0, base + wide, 1, 16),
        ("copy2d", 0, base, wide, base + 4096, 16, 16, 2),
        ("copy2d", 0, base, 16, base + 4096, wide, 16, 2),
        ("copy2d", 0, base, 16, base + 4096, 16, 16, wide + 1),
        ("write_value", 0, base + wide, 1),
    ]
    for op in ops:
        with pytest.raises(DriverError, match="at op 0 of 1 on stream 0"):
            OpList(driver, [stream], 0, [op])
    with pytest.raises(DriverError, match=f"need {(1 << 52) + (1 << 32)} bytes"):
        Memory(driver, (1 << 52) + (1 << 32))


# --- dtypes ---

DTYPES = ["uint8", "int8", "bool", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
DTYPES += ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"]
DTYPES += ["uint16", "uint32", "complex64"]


def test_every_dtype_comes_back_bit_for_bit(transport: str) -> None:
    """All patterns of 8 and 16 bits, so every NaN's payload and both zeros; int4 pairs travel as uint8."""
    layers = [[(dtype, (70_000 // getattr(torch, dtype).itemsize,))] for dtype in DTYPES]
    for wrong in run_on_ranks(lambda group: steps_of(group, TypedModel(layers), transport=transport), 3):
        assert wrong == []


def test_special_values_keep_their_bits_through_a_segment() -> None:
    """What a segment reads of a slot is the stored value: signalling NaNs and -0 included."""
    words = torch.tensor([0x7F800001, 0xFFC12345, 0x80000000, 0x7FC00000, 1], dtype=torch.int64).to(torch.int32)
    model = ByteModel([[words.numel() * 4], [64]])
    seen: list[list[int]] = []

    def look(segment: Segment, state: StepState) -> None:
        segment.run(state)
        seen.append(state.weight("bytes.0.w0").view(torch.float32).view(torch.int32).clone().tolist())

    with_run(model, 0, look)
    tensors = {**model.tensors(), "bytes.0.w0": words.view(torch.uint8)}
    with alone(model, checkpoint=tensors, capture_sizes=[]) as runtime:
        runtime.run(1)
    assert seen == [words.tolist()]


def test_a_dtype_that_torch_lacks_is_refused_by_name() -> None:
    """What cannot be a tensor is said so before anything is reserved."""
    with pytest.raises(graphshard.SpecError, match=r"unknown dtype 'float3'; known are .*float4_e2m1fn_x2"):
        WeightSpec("w", (4,), "float3")
