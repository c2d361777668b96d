"""Times of single operations, in us: gemms, gathers of units, collectives of activations.

A measured time of exactly this operation goes before its formula.
"""

from __future__ import annotations

from math import hypot

from graphshard.core.errors import SpecError
from graphshard.core.sizes import dtype_bits
from graphshard.cost.hardware import HardwareSpec

ACTIVATION_BITS = 16
"""Of a gemm's input and output where its weights are narrower."""
MIN_MEMORY_SHARE = 0.1
"""Left to compute, whatever the link can do."""
PACKED_BITS = {"float4_e2m1fn_x2": 4}
"""Bits of one value where torch counts two as one element; n and k count values."""


def value_bits(dtype: str) -> int:
    """Bits of one value of a gemm's operand."""
    return PACKED_BITS.get(dtype) or dtype_bits(dtype)


def gemm_us(m: int, n: int, k: int, dtype: str, hardware: HardwareSpec, memory_share: float = 1.0) -> float:
    """Time of `[m, k] x [n, k].T` with `memory_share` of the memory's rate; its weight lies in device memory."""
    measured = hardware.look_up("gemm", m, n, k, dtype)
    return measured if measured is not None else gemms_us(m, n, k, dtype, 1.0, hardware, memory_share)


def cached_gemm_us(m: int, n: int, k: int, dtype: str, hardware: HardwareSpec) -> float:
    """The same with the weight in a cache that its gather has just filled."""
    measured = hardware.look_up("gemm_cached", m, n, k, dtype)
    if measured is not None:
        return measured
    if not hardware.cache_bytes_per_s:
        return gemm_us(m, n, k, dtype, hardware)
    weight_us = n * k * value_bits(dtype) / 8 / hardware.cache_bytes_per_s * 1e6
    other_us = _activation_bytes(m, n, k, dtype) / _memory_rate(hardware, 1.0) * 1e6
    return hardware.kernel_us + hypot(weight_us + other_us, _flops_us(m, n, k, dtype, hardware))


def gemms_us(
    m: int, n: int, k: int, dtype: str, num_matrices: float, hardware: HardwareSpec, memory_share: float = 1.0
) -> float:
    """Time of one grouped gemm over `num_matrices` weights of `[n, k]` that share m rows; one matrix is a plain gemm.

    t = kernel + sqrt(t_memory^2 + t_flops^2): a roofline with a round corner, since near it a gemm has too few tiles to
    keep both sides busy. Against GB300_O_PROJ_US it is within 12 %, a sharp corner (the larger of both) within 30 %.
    """
    weight_bytes = num_matrices * n * k * value_bits(dtype) / 8
    memory_us = (weight_bytes + _activation_bytes(m, n, k, dtype)) / _memory_rate(hardware, memory_share) * 1e6
    return hardware.kernel_us + hypot(memory_us, _flops_us(m, n, k, dtype, hardware))


def stream_us(num_bytes: float, flops: float, hardware: HardwareSpec, memory_share: float = 1.0) -> float:
    """A kernel that reads and writes `num_bytes` of memory and computes in bfloat16: attention, a state's update."""
    peak = hardware.flops("bfloat16") * hardware.gemm_efficiency
    return hardware.kernel_us + hypot(num_bytes / _memory_rate(hardware, memory_share), flops / peak) * 1e6


def gather_us(
    num_bytes: int,
    world_size: int,
    transport: str,
    hardware: HardwareSpec,
    other_traffic: float = 0.0,
    *,
    num_slices: int = 1,
) -> float:
    """Time to restore a unit of `num_bytes` from `world_size` chunks, all ranks at once.

    t0 + the larger of: (N-1)/N of the bytes over the link, de-rated by the chunk's size and by `other_traffic`, the
    share of the link that others use; and the memory's side: the slot is written (N/N), the own chunk and the peers'
    copies of it are read (N/N). On a host the own chunk comes the same way as the others. A chunk of `num_slices` comes
    in so many copies, and under `nccl` by so many collectives, each with a t0.

    Raises:
        SpecError: no rank, an unknown transport, or no link left.
    """
    if world_size < 1:
        raise SpecError(f"a gather over {world_size} ranks: there is at least 1")
    if not 0 <= other_traffic < 1:
        raise SpecError(f"other_traffic is {other_traffic!r}: it is a share of the link, from 0 to below 1")
    link = hardware.link(transport)
    measured = hardware.look_up("gather", transport, num_bytes, world_size)
    if measured is not None:
        return measured
    chunk = num_bytes // world_size
    remote = num_bytes if hardware.kind == "host" else num_bytes - chunk
    rate = link.bytes_per_s * hardware.derating(chunk // num_slices) * (1 - other_traffic)
    memory_s = 0.0 if hardware.kind == "host" else 2 * num_bytes / hardware.memory_bytes_per_s
    return link.t0_us * (num_slices if transport == "nccl" else 1) + max(remote / rate, memory_s) * 1e6


def memory_share(hardware: HardwareSpec) -> float:
    """What gathers at full rate leave of the memory's rate to compute.

    Slots are written and peers read this rank's chunks. A host's share is in `overlap_compute`, which is measured.
    """
    if hardware.kind == "host":
        return 1.0
    rate = max(link.bytes_per_s for link in hardware.links)
    return max(MIN_MEMORY_SHARE, 1.0 - 2 * rate / hardware.memory_bytes_per_s)


def collective_us(num_bytes: float, world_size: int, hardware: HardwareSpec) -> float:
    """An all-gather or reduce-scatter of activations, `num_bytes` whole: t0 + (N-1)/N of it over the link."""
    if world_size == 1:
        return 0.0
    measured = hardware.look_up("collective", int(num_bytes), world_size)
    if measured is not None:
        return measured
    remote = num_bytes * (world_size - 1) / world_size
    return hardware.activation_t0_us + remote / hardware.activation_bytes_per_s * 1e6


def _activation_bytes(m: int, n: int, k: int, dtype: str) -> float:
    return m * (n + k) * max(value_bits(dtype), ACTIVATION_BITS) / 8


def _memory_rate(hardware: HardwareSpec, share: float) -> float:
    return hardware.memory_bytes_per_s * hardware.memory_efficiency * share


def _flops_us(m: int, n: int, k: int, dtype: str, hardware: HardwareSpec) -> float:
    return 2.0 * m * n * k / (hardware.flops(dtype) * hardware.gemm_efficiency) * 1e6
