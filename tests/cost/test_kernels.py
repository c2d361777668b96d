"""Times of single operations, held to published ones and to the arithmetic in their docstrings."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_models import machine

from graphshard.core.errors import SpecError
from graphshard.cost.hardware import Measured
from graphshard.cost.kernels import (
    cached_gemm_us,
    collective_us,
    gather_us,
    gemm_us,
    gemms_us,
    memory_share,
    stream_us,
)
from graphshard.cost.published import GB300_O_PROJ_US, GB300_TOLERANCE, O_PROJ, hardware

MIB = 2**20


@pytest.mark.parametrize(("tokens", "published_us"), GB300_O_PROJ_US)
def test_gemms_meet_the_published_calibration(tokens: int, published_us: float) -> None:
    us = gemm_us(tokens, *O_PROJ, "bfloat16", hardware("gb300"))
    assert us == pytest.approx(published_us, rel=GB300_TOLERANCE)


@pytest.mark.parametrize(("mib", "published_gb_per_s"), [(2, 168), (8, 268), (32, 308), (128, 323)])
def test_activation_collectives_meet_the_published_ones_on_h100(mib: int, published_gb_per_s: float) -> None:
    """8 GPUs, symmetric kernels, bus bandwidth by full size; within 3 %."""
    us = collective_us(mib * MIB, 8, hardware("h100"))
    assert mib * MIB * 7 / 8 / us / 1e3 == pytest.approx(published_gb_per_s, rel=0.03)


def test_a_full_gather_of_k3_takes_what_the_published_rates_say() -> None:
    """48.79 GiB over 8 ranks: 80 ms at 570 GB/s, 65.5 at 700; 124 at 370. Between these, in 93 units."""
    unit = int(48.79 * 2**30) // 93
    assert 65.5 < 93 * gather_us(unit, 8, "pull", hardware("b200")) / 1e3 < 80
    assert 121 < 93 * gather_us(unit, 8, "pull", hardware("h100")) / 1e3 < 143  # 380 to 320 GB/s


def test_a_gather_is_t0_and_the_larger_side() -> None:
    spec = machine()
    assert gather_us(4000, 4, "pull", spec) == pytest.approx(3.0 + max(3000 / 0.4e9, 8000 / 1e9) * 1e6)
    assert gather_us(4000, 4, "nccl", spec) == pytest.approx(5.0 + 8.0)  # the memory's side is the larger one
    fast = replace(spec, memory_bytes_per_s=1e12)
    assert gather_us(4000, 4, "pull", fast, other_traffic=0.5) == pytest.approx(3.0 + 15.0)
    # in slices: shorter pieces, and a collective for each weight
    assert gather_us(4000, 4, "pull", spec, num_slices=3) == gather_us(4000, 4, "pull", spec)
    assert gather_us(4000, 4, "nccl", spec, num_slices=3) == pytest.approx(15.0 + 8.0)
    assert gather_us(4000, 1, "pull", fast) == pytest.approx(3.0 + 0.008)


def test_on_a_host_the_own_chunk_comes_the_same_way() -> None:
    assert gather_us(4000, 4, "pull", replace(machine(), kind="host")) == pytest.approx(3.0 + 10.0)


def test_measured_times_go_first() -> None:
    entries = (
        Measured("gemm", (1, 2, 3, "float32"), 7.0),
        Measured("gemm_cached", (1, 2, 3, "float32"), 5.0),
        Measured("gather", ("pull", 4096, 2), 9.0),
        Measured("collective", (64, 2), 4.0),
    )
    spec = replace(machine(), measured=entries)
    assert gemm_us(1, 2, 3, "float32", spec) == 7.0 and gemm_us(2, 2, 3, "float32", spec) != 7.0
    assert cached_gemm_us(1, 2, 3, "float32", spec) == 5.0
    assert gather_us(4096, 2, "pull", spec) == 9.0 and gather_us(4096, 2, "nccl", spec) != 9.0
    assert collective_us(64, 2, spec) == 4.0


def test_a_cached_weight_costs_less() -> None:
    spec = replace(machine(), cache_bytes=2**20, cache_bytes_per_s=1e10)
    assert cached_gemm_us(1, 100, 100, "float32", spec) < gemm_us(1, 100, 100, "float32", spec)
    assert cached_gemm_us(1, 100, 100, "float32", machine()) == gemm_us(1, 100, 100, "float32", machine())


def test_grouped_gemms_read_each_matrix_once() -> None:
    spec = machine()
    assert gemms_us(8, 64, 64, "bfloat16", 4.0, spec) > gemms_us(8, 64, 64, "bfloat16", 1.0, spec)
    packed = gemms_us(8, 64, 64, "float4_e2m1fn_x2", 4.0, spec)  # values of 4 bits
    assert packed < gemms_us(8, 64, 64, "bfloat16", 4.0, spec)


def test_what_a_gather_leaves_of_the_memory() -> None:
    share = memory_share(hardware("b200"))
    assert share == pytest.approx(1 - 2 * 650 / 8000)
    assert memory_share(machine()) == pytest.approx(0.2) and memory_share(replace(machine(), kind="host")) == 1.0
    assert memory_share(machine(memory_bytes_per_s=1e8)) == 0.1
    assert stream_us(1e6, 0.0, hardware("b200"), share) > stream_us(1e6, 0.0, hardware("b200"))


def test_what_cannot_be() -> None:
    with pytest.raises(SpecError, match="a gather over 0 ranks: there is at least 1"):
        gather_us(1, 0, "pull", machine())
    with pytest.raises(SpecError, match=r"other_traffic is 1\.0: it is a share of the link"):
        gather_us(1, 2, "pull", machine(), other_traffic=1.0)
