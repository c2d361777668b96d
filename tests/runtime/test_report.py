"""StepGraph.report in processes where cuda-python finds the host driver: what gathers are made of."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import report_programs
from ranks import entry_of, rank_environment

from graphshard.comm.launch import failure_text, run_ranks
from graphshard.core.errors import DeviceError
from graphshard.device import as_libcuda
from graphshard.device.as_libcuda import (
    LIBRARY_PATH,
    as_libcuda_folder,
    host_driver_environment,
    why_not_as_libcuda,
)
from graphshard.runtime.evidence.walk import why_no_walk

pytestmark = pytest.mark.skipif(why_not_as_libcuda() is not None, reason=str(why_not_as_libcuda()))
TIMEOUT_S = 60.0


def on_ranks(function: Callable[..., Any], world_size: int, *arguments: Any, env: dict[str, str] | None = None) -> Any:
    """What `function` returned on each of `world_size` rank processes that can walk graphs (unless `env` is given)."""
    more = host_driver_environment() if env is None else env
    entry, env = entry_of(function), {**rank_environment(), **more}
    results = run_ranks(entry, world_size, arguments=arguments, timeout_s=TIMEOUT_S, group_timeout_s=30.0, env=env)
    assert not failure_text(results), failure_text(results)
    return [result.value for result in results]


@pytest.mark.parametrize(("world_size", "num_copy_streams"), [(2, 1), pytest.param(3, 2, marks=pytest.mark.slow)])
def test_a_pulled_gather_is_a_copy_of_each_chunk_and_nothing_else(world_size: int, num_copy_streams: int) -> None:
    for rank, told in enumerate(on_ranks(report_programs.report, world_size, "pull", num_copy_streams, 0)):
        assert told["units"] == [0, 1, 2] and told["problems"] == []
        for gather, unit_bytes in zip(told["gathers"], told["unit_bytes"], strict=True):
            assert gather["nodes"] == {"memcpy": world_size}, "own chunk included, and no kernel"
            assert (gather["num_copies"], gather["num_bytes"]) == (world_size, unit_bytes)
        assert told["nodes"] == told["num_nodes_told"]
        assert told["nodes"]["memcpy"] == 3 * world_size, "all copies of the graph belong to gathers"
        assert (told["rank"], told["world_size"], told["transport"]) == (rank, world_size, "pull")
        assert told["launch"] is None and told["difference"] is None
        assert "no kernel nodes in 3 gathers" in told["text"] and "copy engine" not in told["text"]


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_an_nccl_gather_has_four_barrier_nodes_more(world_size: int) -> None:
    for told in on_ranks(report_programs.report, world_size, "nccl", 1, 3):
        for gather, unit_bytes in zip(told["gathers"], told["unit_bytes"], strict=True):
            assert sum(gather["nodes"].values()) == world_size + 4 and "kernel" not in gather["nodes"]
            assert (gather["num_copies"], gather["num_bytes"]) == (world_size, unit_bytes)
        assert told["nodes"] == told["num_nodes_told"] and told["difference"] is None
        assert told["launch"]["n"] == 3 and 0 < told["launch"]["p10_us"] <= told["launch"]["p90_us"]


def test_gathers_in_a_capture_of_torchs_are_told_from_its_kernels() -> None:
    (told,) = on_ranks(report_programs.captured_by_others, 1)
    assert told["nodes"]["host"] == told["num_segments"], "what torch would have as kernels"
    for gather, unit_bytes in zip(told["gathers"], told["unit_bytes"], strict=True):
        assert gather["nodes"] == {"memcpy": 2}, "neither they nor the tests' poison are the gather's"
        assert (gather["num_copies"], gather["num_bytes"]) == (2, unit_bytes)
    assert told["problems"] == [] and told["difference"] is None
    assert told["kinds"] == ["gather", "write"], "compute is not issued by the list"


def test_a_silent_fall_back_to_kernels_is_caught() -> None:
    for rank, told in enumerate(on_ranks(report_programs.fall_back, 2)):
        assert told["refused"].startswith(f"DeviceError: rank {rank}, step shape 1x1: unit 0 (op 0 ag_launch unit=0")
        assert "is a kernel" in told["refused"] and "strict=False reports it as a warning" in told["refused"]
        assert len(told["warned"]) == 1 and "unit 2" in told["warned"][0]
        assert len(told["problems"]) == told["num_kernels"] == 3
        assert told["claim"] == "kernel nodes in 3 of 3 gathers: units 0, 1, 2"
        assert "eager has gather unit=0" in told["difference"] and "graph has gather by a kernel" in told["difference"]


def test_without_the_variables_a_walk_is_refused_before_a_handle_is_passed() -> None:
    (told,) = on_ranks(report_programs.walk_without_the_name, 1, env={})
    assert told.startswith("DeviceError: a captured graph cannot be looked at: this process finds no libcuda.so.1")
    assert "graphshard.device.host_driver_environment()" in told


def test_another_driver_of_that_name_is_refused(tmp_path: Path) -> None:
    """A copy of the host driver is another library: its tables know nothing of our handles."""
    copy = tmp_path / "libcuda.so.1"
    copy.write_bytes((as_libcuda_folder().parent / "libgraphshard_hostcuda.so").read_bytes())
    (told,) = on_ranks(report_programs.walk_without_the_name, 1, env={LIBRARY_PATH: str(tmp_path)})
    assert "libcuda.so.1 is another library here than" in told and "take the folder that holds it out of" in told


def test_a_process_with_the_variables_has_the_host_driver_under_both_names() -> None:
    code = (
        "from graphshard.device import open_device, host_driver_environment\n"
        "from graphshard.runtime.evidence.walk import why_no_walk\n"
        "print(why_no_walk(open_device('host').driver), len(host_driver_environment()))"
    )
    environment = {**os.environ, **host_driver_environment({LIBRARY_PATH: "/somewhere"})}
    assert environment[LIBRARY_PATH].split(os.pathsep) == [str(as_libcuda_folder()), "/somewhere"]
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.stdout == "None 1\n", done.stderr


def test_a_vendors_driver_is_never_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(as_libcuda, "why_not_as_libcuda", lambda: "a vendor's libcuda.so.1 is installed here")
    with pytest.raises(DeviceError, match="a vendor's libcuda"):
        host_driver_environment()


def test_cuda_python_is_asked_for_by_name_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'cuda-bindings>=12.9'" in str(why_no_walk(None))  # type: ignore[arg-type]
