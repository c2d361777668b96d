"""The C++ test programs, built outside the package; tests that run at the same time build them one after the other."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "csrc" / "tests"
LIMIT_S = 300


def build(target: str) -> Path:
    """The build folder, with `target` up to date; a skip where there is nothing to build with."""
    folder = ROOT / "build" / "litmus"
    beside = Path(sys.executable).with_name("cmake")
    cmake = str(beside) if beside.exists() else shutil.which("cmake")
    if cmake is None:
        pytest.skip("no cmake to build C++ tests with")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for arguments in (
            ["-S", SOURCES, "-B", folder, f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_BUILD_TYPE=Release"],
            ["--build", folder, "--target", target, "--parallel", "2"],
        ):
            done = subprocess.run([cmake, *map(str, arguments)], capture_output=True, text=True, timeout=LIMIT_S)
            assert done.returncode == 0, done.stdout + done.stderr
    return folder
