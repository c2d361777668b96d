"""Machines by their published numbers, and the ranges in which others have measured what no data sheet says."""

from __future__ import annotations

import difflib
from dataclasses import replace

from graphshard.core.errors import SpecError
from graphshard.cost.hardware import HardwareSpec, Link

MiB = 2**20

LINK_RANGES: dict[str, tuple[float, float]] = {"nvlink4": (320e9, 380e9), "nvlink5": (570e9, 700e9)}
"""Bytes per second that copy-engine gathers were seen to reach, one direction."""
DERATE_RANGE = (0.40, 0.65)
"""Of that, with chunks below 16 MiB."""
GATHER_T0_RANGE_US = (10.0, 25.0)
"""Floor of a copy-engine gather: none is published; two flag barriers and N copies."""

GB300_O_PROJ_US: tuple[tuple[int, float], ...] = (
    (128, 31.9),
    (256, 35.9),
    (512, 66.6),
    (1024, 102.0),
    (2048, 197.0),
    (4096, 407.0),
    (8192, 893.0),
)
"""(tokens, us) of Kimi K3's o_proj (n 7168, k 12288) in a graph, as published for a GB300. No dtype is given; the first
row is 5.5 TB/s of weights in bfloat16, 69 % of the data sheet, and could not be less than that in another."""
O_PROJ = (7168, 12288)
GB300_TOLERANCE = 0.12
"""The formula, with one memory and one gemm efficiency, meets each row within this share of it."""

_BARRIERS = (
    "inferred: no floor is published for captured copy-engine gathers; 10-25 us for N copies, more with barriers"
)
_EFFICIENCY = "fitted to the published o_proj times on GB300 (GB300_O_PROJ_US), within 12 % at every row"
_DERATE = "inferred from published gathers by size: 0.4-0.65 of the rate below 16 MiB a chunk"
_LAUNCH = "published for a laptop's RTX 5070 Ti: 15 us and 0.58 us a node"
_OVERLAP = "published: moving collectives from SMs to copy engines gave 2.4 %; clocks drop while both run"
_KERNEL = "inferred: gap between dependent kernels of one graph, 1-3 us"
_COMMON_SOURCES = {
    "memory_efficiency": _EFFICIENCY,
    "gemm_efficiency": _EFFICIENCY,
    "derate": _DERATE,
    "kernel_us": _KERNEL,
    "launch_us": _LAUNCH,
    "launch_us_per_node": _LAUNCH,
    "overlap_compute": _OVERLAP,
    "overlap_copy": "assumed: copy engines are bound by the link, not by what the SMs leave of the memory",
    "cache_bytes": "assumed: a unit is larger than what a copy engine leaves in L2",
    "cache_bytes_per_s": "not used without cache_bytes",
}
_LINK_OF = {"h100": "nvlink4", "h200": "nvlink4", "b200": "nvlink5", "gb200": "nvlink5", "gb300": "nvlink5"}
_NVLINK = {
    "nvlink4": (350e9, 328e9, 5.3),
    "nvlink5": (650e9, 700e9, 5.3),
}
"""Gathers; activation collectives and their floor, us."""
_NVLINK_SOURCES = {
    "nvlink4": {
        "links": f"middle of the published 320-380 GB/s of 450; t0 {_BARRIERS}",
        "activation_bytes_per_s": "fitted to 8xH100 symmetric-kernel all-gathers of 2-128 MiB: 168, 268, 308, 323 GB/s",
        "activation_t0_us": "the same fit",
    },
    "nvlink5": {
        "links": f"inside the published 570-700 GB/s of 900; t0 {_BARRIERS}",
        "activation_bytes_per_s": "8xB200's published all-gathers rise to 703 GB/s at 470 MB",
        "activation_t0_us": "taken from the symmetric kernels' fit on H100: none is published here",
    },
}


def _gpu(
    name: str,
    memory_mib: int,
    memory_tb_per_s: float,
    teraflops: dict[str, float],
    max_domain: int,
    sheet: str,
) -> HardwareSpec:
    link = _LINK_OF[name]
    link_rate, activation_rate, activation_t0_us = _NVLINK[link]
    return HardwareSpec(
        name=name,
        kind="cuda",
        memory_bytes=memory_mib * MiB,
        memory_bytes_per_s=memory_tb_per_s * 1e12,
        memory_efficiency=0.85,
        links=(Link("pull", link_rate, 12.0), Link("nccl", link_rate, 20.0)),
        derate=((1 * MiB, 0.40), (8 * MiB, 0.65), (16 * MiB, 1.0)),
        activation_bytes_per_s=activation_rate,
        activation_t0_us=activation_t0_us,
        peak_flops=tuple((dtype, rate * 1e12) for dtype, rate in teraflops.items()),
        gemm_efficiency=0.72,
        kernel_us=2.0,
        launch_us=15.0,
        launch_us_per_node=0.58,
        max_domain=max_domain,
        overlap_compute=1.02,
        sources=tuple(
            sorted(
                {
                    **_COMMON_SOURCES,
                    **_NVLINK_SOURCES[link],
                    "memory_bytes": f"what nvidia-smi reports: {memory_mib} MiB",
                    "memory_bytes_per_s": sheet,
                    "peak_flops": f"{sheet}, dense",
                    "max_domain": sheet,
                }.items()
            )
        ),
    )


PUBLISHED: dict[str, HardwareSpec] = {
    spec.name: spec
    for spec in (
        _gpu(
            "h100",
            81559,
            3.35,
            {"bfloat16": 989.4, "float8_e4m3fn": 1978.9, "float32": 66.9},
            8,
            "NVIDIA H100 SXM data sheet",
        ),
        _gpu(
            "h200",
            143771,
            4.8,
            {"bfloat16": 989.4, "float8_e4m3fn": 1978.9, "float32": 66.9},
            8,
            "NVIDIA H200 SXM data sheet",
        ),
        _gpu(
            "b200",
            183359,
            8.0,
            {"bfloat16": 2250.0, "float8_e4m3fn": 4500.0, "float4_e2m1fn_x2": 9000.0, "float32": 75.0},
            8,
            "NVIDIA DGX B200 data sheet, an eighth of it",
        ),
        _gpu(
            "gb200",
            189471,
            8.0,
            {"bfloat16": 2500.0, "float8_e4m3fn": 5000.0, "float4_e2m1fn_x2": 10000.0, "float32": 80.0},
            72,
            "NVIDIA GB200 NVL72 data sheet, a 72nd of it",
        ),
        _gpu(
            "gb300",
            284208,
            8.0,
            {"bfloat16": 2500.0, "float8_e4m3fn": 5000.0, "float4_e2m1fn_x2": 15000.0, "float32": 80.0},
            72,
            "NVIDIA GB300 NVL72 data sheet, a 72nd of it",
        ),
    )
}


def published_ends(machine: HardwareSpec) -> tuple[HardwareSpec, HardwareSpec] | None:
    """A published machine where least hides and where most does; None for any other machine.

    Least: the slowest published gathers, and gemms as much faster as GB300_TOLERANCE allows. Most: the reverse.
    """
    if machine != PUBLISHED.get(machine.name):
        return None
    low, high = LINK_RANGES[_LINK_OF[machine.name]]
    faster = 1 + GB300_TOLERANCE
    return _moved(machine, low, faster), _moved(machine, high, 1 / faster)


def _moved(machine: HardwareSpec, link_bytes_per_s: float, faster: float) -> HardwareSpec:
    return replace(
        machine,
        links=tuple(replace(link, bytes_per_s=link_bytes_per_s) for link in machine.links),
        memory_efficiency=machine.memory_efficiency * faster,
        gemm_efficiency=machine.gemm_efficiency * faster,
    )


def hardware(name: str) -> HardwareSpec:
    """The published machine called `name`; SpecError with the nearest names otherwise."""
    spec = PUBLISHED.get(name.lower()) if isinstance(name, str) else None
    if spec is not None:
        return spec
    known = ", ".join(PUBLISHED)
    if name == "host":
        raise SpecError(
            f"hardware host is measured, not published: give the file of `graphshard calibrate`, or {known}"
        )
    near = difflib.get_close_matches(str(name).lower(), PUBLISHED, n=2, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise SpecError(
        f"unknown hardware {name!r}: {hint}known are {known}, or a file as `graphshard calibrate` writes it"
    )
