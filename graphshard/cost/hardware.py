"""What the cost model knows of a machine: rates, fixed costs, and for each number where it comes from.

`hardware("b200")` gives a published machine, `load_hardware(path)` one that was measured (`graphshard calibrate`) or
written by hand. Rates are bytes or operations per second, costs microseconds, of one GPU (or, on a host, one rank).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from math import isfinite, log2
from typing import Literal

from graphshard.core.errors import SpecError
from graphshard.core.sizes import format_bytes

HardwareKind = Literal["cuda", "host"]
MeasuredWhat = Literal["gemm", "gemm_cached", "gather", "collective", "segment", "segment_cached"]
"""gemm (m, n, k, dtype) with its weight in memory, or `gemm_cached`: in a cache that a gather has just filled ·
gather (transport, num_bytes, world_size) · collective (num_bytes, world_size) of activations ·
segment, segment_cached (digest of the ModelSpec, segment, batch_size, tokens_per_sequence), whole."""

WIDER: dict[str, tuple[str, ...]] = {
    "float4_e2m1fn_x2": ("float8_e4m3fn", "bfloat16"),
    "float8_e4m3fn": ("bfloat16",),
    "float8_e5m2": ("float8_e4m3fn", "bfloat16"),
    "float8_e4m3fnuz": ("float8_e4m3fn", "bfloat16"),
    "float8_e5m2fnuz": ("float8_e4m3fn", "bfloat16"),
    "int8": ("float8_e4m3fn", "bfloat16"),
    "float16": ("bfloat16",),
    "bfloat16": ("float16", "float32"),
    "uint8": ("float8_e4m3fn", "bfloat16"),
}
"""What a dtype is computed in where the machine has no rate for it: unpacked first, or one of equal width."""


@dataclass(frozen=True, slots=True)
class Link:
    """A transport's gathers: `bytes_per_s` into one GPU, one direction, and `t0_us` for the first byte."""

    transport: str
    bytes_per_s: float
    t0_us: float


@dataclass(frozen=True, slots=True)
class Measured:
    """One measured time. It goes before any formula."""

    what: MeasuredWhat
    key: tuple[int | str, ...]
    us: float


@dataclass(frozen=True)
class HardwareSpec:
    """One machine. `sources` has an entry for every other field that is a number or a table."""

    name: str
    kind: HardwareKind
    memory_bytes: int
    memory_bytes_per_s: float
    """Of the device memory (HBM), one GPU; on a host, what one rank gets while all ranks work."""
    memory_efficiency: float
    """The share of it that a gemm's weight streams at."""
    links: tuple[Link, ...]
    derate: tuple[tuple[int, float], ...]
    """(chunk bytes, share of the link's rate), by size; linear in the logarithm between entries, constant outside."""
    activation_bytes_per_s: float
    """Of activation collectives over the link, one direction."""
    activation_t0_us: float
    peak_flops: tuple[tuple[str, float], ...]
    """By dtype of the operands, dense."""
    gemm_efficiency: float
    """The share of it that large gemms reach."""
    kernel_us: float
    """From the end of one kernel of a graph to the next one's full speed."""
    launch_us: float
    launch_us_per_node: float
    """Of a graph, on the host."""
    max_domain: int
    """GPUs that can map each other's memory."""
    overlap_compute: float = 1.0
    """Compute takes this times as long while a gather runs (beyond its share of the memory on a GPU)."""
    overlap_copy: float = 1.0
    """A gather takes this times as long while compute runs."""
    cache_bytes: int = 0
    """A unit up to this size is read from a cache that its gather filled, if one core did both; 0: never."""
    cache_bytes_per_s: float = 0.0
    measured: tuple[Measured, ...] = ()
    sources: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        self._check_numbers()
        for name, least in (("overlap_compute", 1.0), ("overlap_copy", 1.0)):
            if getattr(self, name) < least:
                raise SpecError(f"hardware {self.name}: {name} is {getattr(self, name)!r}; it starts at {least}")
        for name in ("memory_efficiency", "gemm_efficiency"):
            if getattr(self, name) > 1:
                raise SpecError(f"hardware {self.name}: {name} is {getattr(self, name)!r}; it is a share, at most 1")
        if not self.links or not self.peak_flops:
            raise SpecError(f"hardware {self.name}: links and peak_flops each need an entry")
        sizes = [size for size, _ in self.derate]
        if sizes != sorted(set(sizes)) or not all(0 < share <= 1 for _, share in self.derate):
            raise SpecError(
                f"hardware {self.name}: derate needs rising sizes and shares in (0, 1], not {self.derate!r}"
            )
        if len(self._measured) != len(self.measured):
            raise SpecError(f"hardware {self.name}: an entry of `measured` is there twice")

    def link(self, transport: str) -> Link:
        """The link of `transport`; SpecError with the known ones."""
        for link in self.links:
            if link.transport == transport:
                return link
        known = ", ".join(link.transport for link in self.links)
        raise SpecError(f"hardware {self.name} has no figures for transport {transport!r}; known are {known}")

    def flops(self, dtype: str) -> float:
        """Peak operations per second with operands of `dtype`, or of what it is computed in; SpecError if unknown."""
        peaks = dict(self.peak_flops)
        for name in (dtype, *WIDER.get(dtype, ())):
            if name in peaks:
                return peaks[name]
        raise SpecError(f"hardware {self.name} has no gemm rate for {dtype!r}; known are {', '.join(peaks)}")

    def derating(self, chunk_bytes: int) -> float:
        """The share of the link's rate that chunks of this size reach.

        From each entry to the next it is linear in the size's logarithm: with a jump, a smaller gather would take
        longer than a larger one.
        """
        table = self.derate
        at = bisect_right(table, chunk_bytes, key=lambda entry: entry[0])
        if at == len(table):
            return table[-1][1] if table else 1.0
        if at == 0:
            return table[0][1]
        (low, first), (high, last) = table[at - 1], table[at]
        return first + (last - first) * (log2(chunk_bytes / low) / log2(high / low))

    def look_up(self, what: MeasuredWhat, *key: int | str) -> float | None:
        """The measured time of exactly this, in us; None if there is none."""
        return self._measured.get((what, key))

    def source(self, name: str) -> str:
        """Where field `name`'s number comes from; empty if nothing says so."""
        return dict(self.sources).get(name, "")

    @cached_property
    def _measured(self) -> Mapping[tuple[str, tuple[int | str, ...]], float]:
        return {(one.what, one.key): one.us for one in self.measured}

    def __str__(self) -> str:
        links = ", ".join(f"{link.transport} {link.bytes_per_s / 1e9:.0f} GB/s" for link in self.links)
        return f"{self.name}: {format_bytes(self.memory_bytes)} at {self.memory_bytes_per_s / 1e9:.0f} GB/s, {links}"

    def _check_numbers(self) -> None:
        may_be_zero = {"cache_bytes", "cache_bytes_per_s", "launch_us", "launch_us_per_node", "kernel_us"}
        numbers = {one.name: getattr(self, one.name) for one in fields(self) if one.type in ("int", "float")}
        for link in self.links:
            numbers[f"links.{link.transport}.bytes_per_s"] = link.bytes_per_s
            numbers[f"links.{link.transport}.t0_us"] = link.t0_us
            may_be_zero.add(f"links.{link.transport}.t0_us")
        numbers |= {f"peak_flops.{dtype}": rate for dtype, rate in self.peak_flops}
        may_be_zero |= {"activation_t0_us"} | {f"measured {one.key}" for one in self.measured}
        numbers |= {f"measured {one.key}": one.us for one in self.measured}
        for name, value in numbers.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value)
            if not is_number or value < 0 or (value == 0 and name not in may_be_zero):
                raise SpecError(f"hardware {self.name}: {name} is {value!r}; it is a number above 0")


def _is_finite(value: float) -> bool:
    try:
        return isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False
