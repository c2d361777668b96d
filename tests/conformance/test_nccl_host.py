"""The host NCCL: the C++ tests of csrc/tests/nccl, a case each, with threads as ranks; and processes as ranks here."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import nccl_host_programs
import pytest
from built import SOURCES, build
from ranks import run_on_ranks, start_processes

DRIVER = nccl_host_programs.LIBRARIES / "libgraphshard_hostcuda.so"
NCCL = nccl_host_programs.LIBRARIES / "libgraphshard_hostnccl.so"
LIMIT_S = 300  # the program itself gives each test 240 s
ENTRY_POINTS = [
    "ncclAllGather",
    "ncclCommAbort",
    "ncclCommDestroy",
    "ncclCommFinalize",
    "ncclCommGetAsyncError",
    "ncclCommInitRankConfig",
    "ncclCommWindowDeregister",
    "ncclCommWindowRegister",
    "ncclGetErrorString",
    "ncclGetLastError",
    "ncclGetUniqueId",
    "ncclGetVersion",
    "ncclMemAlloc",
    "ncclMemFree",
    "ncclReduceScatter",
]


def case_names() -> list[str]:
    pattern = re.compile(r"^LITMUS\(([a-z]\w*)\)", re.MULTILINE)
    return [name for path in sorted((SOURCES / "nccl").glob("*.cpp")) for name in pattern.findall(path.read_text())]


@pytest.fixture(scope="session")
def program() -> Path:
    """The test program."""
    return build("graphshard_nccl_tests") / "nccl" / "graphshard_nccl_tests"


@pytest.mark.parametrize("name", case_names())
def test_threads_as_ranks(program: Path, name: str) -> None:
    done = subprocess.run([program, DRIVER, NCCL, name], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0 and done.stdout == f"ok {name}\n", f"exit {done.returncode}: {done.stdout}{done.stderr}"


def test_only_the_names_of_nccl_are_exported() -> None:
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("no nm to read symbols with")
    listed = subprocess.run([nm, "-D", "--defined-only", NCCL], capture_output=True, text=True, check=True)
    names = sorted(line.split()[-1] for line in listed.stdout.splitlines())
    assert names == ["gshost_nccl_stage", "gshost_nccl_stage_met", *ENTRY_POINTS]


@pytest.mark.parametrize("world_size", [2, 3])
def test_processes_as_ranks(world_size: int) -> None:
    """Eager and captured gathers are right; a captured one is N copies between two barriers of two nodes each."""
    for found in run_on_ranks(nccl_host_programs.gather_across_processes, world_size, mode="processes"):
        assert found["wrong"] == []
        assert {kind: n for kind, n in found["nodes"].items() if n} == {"memcpy": world_size, "batch_mem_op": 4}
        assert found["destroyed"] and found["left"] == 0


def test_a_killed_rank_is_named_and_leaves_nothing() -> None:
    """SIGKILL in the middle; the survivors know who, get free by an abort, and /dev/shm is as before."""
    before = sorted(path.name for path in Path("/dev/shm").iterdir())
    with start_processes(nccl_host_programs.outlive_a_killed_rank, 3) as ranks:
        results = ranks.wait(60.0)
    assert results[1].error == "was killed by SIGKILL"
    for rank in (0, 2):
        assert results[rank].error == "", results[rank].error
        found = results[rank].value
        # The other survivor's abort may be seen first.
        assert re.search(r"rank 1 is gone: its process \d+ has ended|rank \d has aborted", found["error"]), found
        assert found["aborted"] and found["drained"]
    assert any("rank 1 is gone" in results[rank].value["error"] for rank in (0, 2))
    assert sorted(path.name for path in Path("/dev/shm").iterdir()) == before


def test_a_captured_skip_between_processes() -> None:
    """Equal sizes and another unit; visible on both ranks, wrong bytes on none, no abort out of it."""
    found = run_on_ranks(nccl_host_programs.skip_a_captured_gather, 2, mode="processes")
    for rank in (0, 1):
        assert found[rank]["wrong"] == []
        assert f"rank {1 - rank} waits in a gather of 8192 bytes" in found[rank]["error"], found[rank]
        assert not found[rank]["aborted"] and not found[rank]["drained"]
