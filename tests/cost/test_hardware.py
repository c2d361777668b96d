"""Published machines and their sources, the file format, and sentences for what is unknown."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
from small_models import machine

from graphshard.core.errors import SpecError
from graphshard.cost.hardware import HardwareSpec, Link, Measured
from graphshard.cost.hardware_file import hardware_json, load_hardware, parse_hardware, save_hardware
from graphshard.cost.published import (
    DERATE_RANGE,
    GATHER_T0_RANGE_US,
    LINK_RANGES,
    PUBLISHED,
    hardware,
)

NVLINK = {"h100": "nvlink4", "h200": "nvlink4", "b200": "nvlink5", "gb200": "nvlink5", "gb300": "nvlink5"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_number_has_a_source_and_is_in_its_published_range(name: str) -> None:
    spec = hardware(name)
    plain = {"name", "kind", "measured", "sources"}
    for field in fields(HardwareSpec):
        assert field.name in plain or spec.source(field.name), f"{name}: {field.name} has no source"
    low, high = LINK_RANGES[NVLINK[name]]
    for link in spec.links:
        assert low <= link.bytes_per_s <= high
        assert GATHER_T0_RANGE_US[0] <= link.t0_us <= GATHER_T0_RANGE_US[1]
    for size, share in spec.derate:
        assert (DERATE_RANGE[0] <= share <= DERATE_RANGE[1]) if size < 16 * 2**20 else share == 1.0


def test_derating_rises_with_the_chunk() -> None:
    spec = hardware("b200")
    sizes = [2**p for p in range(10, 30)]
    shares = [spec.derating(size) for size in sizes]
    assert shares == sorted(shares) and shares[0] == 0.40 and shares[-1] == 1.0
    assert spec.derating(16 * 2**20) == 1.0 and 0.65 < spec.derating(12 * 2**20) < 1.0
    assert machine().derating(1) == 1.0


def test_unknown_hardware_is_one_sentence_with_the_nearest_names() -> None:
    with pytest.raises(SpecError, match=r"unknown hardware 'b100': did you mean .*b200.*known are h100"):
        hardware("b100")
    with pytest.raises(SpecError, match="hardware host is measured, not published: give the file of"):
        hardware("host")
    assert hardware("B200") is hardware("b200")


def test_a_file_is_a_round_trip(tmp_path: Path) -> None:
    measured = (Measured("gemm", (1, 576, 576, "float32"), 41.5), Measured("gather", ("pull", 4096, 2), 3.0))
    host = replace(
        machine(), kind="host", overlap_copy=1.4, cache_bytes=2**20, measured=measured, sources=(("a", "b"),)
    )
    for spec in (host, *PUBLISHED.values()):
        save_hardware(spec, tmp_path / "hardware.json")
        assert load_hardware(tmp_path / "hardware.json") == spec
    assert load_hardware(tmp_path / "hardware.json").look_up("gemm", 1, 2, 3, "float32") is None
    assert host.look_up("gemm", 1, 576, 576, "float32") == 41.5


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kind": "tpu"}, "kind is 'tpu'; known are cuda, host"),
        ({"speed": 1}, "unknown keys speed; known are name"),
        ({"memory_bytes": 10**400}, "memory_bytes is 1000000"),
        ({"memory_bytes": -1}, "memory_bytes is -1; it is a number above 0"),
        ({"memory_bytes": "8GiB"}, "memory_bytes is '8GiB'"),
        ({"links": [{"transport": "pull"}]}, "lacks 'bytes_per_s'"),
        ({"links": []}, "links and peak_flops each need an entry"),
        ({"derate": [[2, 0.5], [1, 0.4]]}, "derate needs rising sizes"),
        ({"gemm_efficiency": 1.5}, "gemm_efficiency is 1.5; it is a share"),
        ({"overlap_copy": 0.5}, "overlap_copy is 0.5; it starts at 1.0"),
        ({"measured": [{"what": "gem", "key": [1], "us": 1}]}, "an entry of 'gem'; known are gemm"),
        ({"format": "graphshard-hardware-9"}, "this version reads graphshard-hardware-1"),
    ],
)
def test_a_wrong_file_names_the_key(change: dict[str, object], says: str, tmp_path: Path) -> None:
    path = tmp_path / "hardware.json"
    path.write_text(json.dumps({**hardware_json(machine()), **change}))
    with pytest.raises(SpecError) as error:
        load_hardware(path)
    assert says in str(error.value) and str(path) in str(error.value)


def test_a_file_that_is_not_there_or_not_json(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot read the hardware file"):
        load_hardware(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("hello")
    with pytest.raises(SpecError, match="is not JSON"):
        load_hardware(tmp_path / "text.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(SpecError, match="holds a list"):
        load_hardware(tmp_path / "list.json")


def test_a_missing_key_is_named() -> None:
    content = hardware_json(machine())
    del content["kernel_us"]
    with pytest.raises(SpecError, match="the keys kernel_us are missing; `graphshard calibrate` writes all of them"):
        parse_hardware(content)


def test_unknown_transport_and_dtype_list_the_known() -> None:
    spec = hardware("h100")
    with pytest.raises(SpecError, match="no figures for transport 'ib'; known are pull, nccl"):
        spec.link("ib")
    with pytest.raises(SpecError, match="no gemm rate for 'complex64'; known are bfloat16"):
        spec.flops("complex64")
    assert spec.flops("float4_e2m1fn_x2") == spec.flops("float8_e4m3fn")  # unpacked first: Hopper has no 4-bit gemms
    assert spec.link("pull") == Link("pull", 350e9, 12.0)
