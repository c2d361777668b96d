"""Every litmus test of csrc/tests, a case each: over the host driver, and over the vendor's where one can be loaded."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from built import SOURCES, build

import graphshard._core

HOST_LIBRARY = Path(graphshard._core.__file__).parent / "lib" / "libgraphshard_hostcuda.so"
MACHINE_CANNOT = 3
LIMIT_S = 300  # the program itself gives each test 120 s


def litmus_names() -> list[str]:
    """The names in the sources; one that begins with _ is a part of another test."""
    pattern = re.compile(r"^(?:HOST_)?LITMUS\(([a-z]\w*)\)", re.MULTILINE)
    return [name for path in sorted(SOURCES.glob("*.cpp")) for name in pattern.findall(path.read_text())]


@pytest.fixture(scope="session")
def program() -> Path:
    """The litmus program."""
    return build("graphshard_litmus") / "graphshard_litmus"


def run(program: Path, library: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, library, *arguments], capture_output=True, text=True, timeout=LIMIT_S)


def check(done: subprocess.CompletedProcess[str]) -> None:
    if done.stdout.startswith("skipped"):
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, f"exit {done.returncode}: {done.stdout}{done.stderr}"


@pytest.fixture(scope="session")
def cuda_library(program: Path) -> str:
    """The vendor's driver, or a skip with what is in the way."""
    library = "libcuda.so.1"
    done = run(program, library, "errors_have_names")
    if done.returncode == MACHINE_CANNOT:
        pytest.skip(f"no CUDA driver: {done.stderr.strip()}")
    return library


def test_the_program_lists_what_its_sources_define(program: Path) -> None:
    done = subprocess.run([program, "--list"], capture_output=True, text=True, timeout=LIMIT_S)
    assert sorted(done.stdout.split()) == sorted(litmus_names())


@pytest.mark.parametrize("name", litmus_names())
def test_host(program: Path, name: str) -> None:
    check(run(program, str(HOST_LIBRARY), name))


@pytest.mark.gpu
@pytest.mark.parametrize("name", litmus_names())
def test_cuda(program: Path, cuda_library: str, name: str) -> None:
    check(run(program, cuda_library, name))


def test_bad_requests_are_named(program: Path, tmp_path: Path) -> None:
    unknown = run(program, str(HOST_LIBRARY), "no_such_test")
    assert unknown.returncode == 2 and "no_such_test" in unknown.stderr
    nothing = run(program, str(tmp_path / "libnothing.so"), "errors_have_names")
    assert nothing.returncode == MACHINE_CANNOT and "libnothing.so" in nothing.stderr


def test_only_the_seam_is_exported() -> None:
    """Nothing of the host driver may shadow a symbol of the process: CUDA's names stay inside."""
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("no nm to read symbols with")
    listed = subprocess.run([nm, "-D", "--defined-only", str(HOST_LIBRARY)], capture_output=True, text=True, check=True)
    names = {line.split()[-1] for line in listed.stdout.splitlines()}
    assert {"cuGetProcAddress_v2", "cuGetProcAddress", "gshost_version"} <= names
    assert {name for name in names if not name.startswith("gshost_")} == {"cuGetProcAddress_v2", "cuGetProcAddress"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["handoffs_of_64_bytes_are_whole", "handoffs_of_4_kib_are_whole"])
def test_ten_million_handoffs(program: Path, name: str) -> None:
    """No payload torn or stale behind its flag."""
    done = subprocess.run(
        [program, HOST_LIBRARY, name, "--handoffs", "10000000"], capture_output=True, text=True, timeout=2400
    )
    check(done)
