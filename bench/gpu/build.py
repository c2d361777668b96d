"""Builds and installs the package offline into a folder of its own, and puts its tests beside it.

The checkout stays as it is. Rank processes and tests find the package and each other by that folder alone.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pip_output import PROGRESS, error_of

ROOT = Path(__file__).resolve().parents[2]
BESIDE = ("tests", "csrc", "cmake", "docs", "bench/gpu", "CMakeLists.txt", "pyproject.toml", "README.md")
"""What tests read of the checkout."""
TOOLKITS = ("/usr/local/cuda/include",)


def cuda_include() -> str:
    """The folder of cuda.h: a wheel's as the build finds it, else a toolkit's.

    Raises:
        RuntimeError: there is none.
    """
    done = subprocess.run(
        [sys.executable, ROOT / "cmake" / "find_cuda_headers.py"], capture_output=True, text=True, timeout=30
    )
    places = [done.stdout.strip()]
    nvcc = shutil.which("nvcc")
    if nvcc is not None:
        places.append(str(Path(nvcc).resolve().parents[1] / "include"))
    for place in [*places, *TOOLKITS]:
        if place and all((Path(place) / header).is_file() for header in ("cuda.h", "cudaTypedefs.h")):
            return place
    raise RuntimeError(f"no cuda.h with cudaTypedefs.h: looked for the cuda-runtime wheels and in {TOOLKITS}")


def install(work: Path) -> dict[str, Any]:
    """Install by pip, without isolation, dependencies or an index."""
    include = cuda_include()
    command = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--no-index", "--upgrade"]
    command += ["--disable-pip-version-check", "--root-user-action=ignore", "--target", str(work / "tree")]
    defines = {"GRAPHSHARD_CUDA_INCLUDE_DIR": include, "GRAPHSHARD_WERROR": "OFF"}  # whatever compiler is there
    command += ["-C", f"build-dir={work / 'build'}"]
    command += [part for name, value in defines.items() for part in ("-C", f"cmake.define.{name}={value}")]
    print("pip builds the package; --no-build takes the installed one", flush=True)
    lines: list[str] = []
    process = subprocess.Popen(  # the step has a limit
        [*command, "--verbose", str(ROOT)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line.rstrip())
        if PROGRESS.match(line):
            print(line.strip(), flush=True)
    if process.wait():
        print("\n".join(lines), flush=True)
        raise RuntimeError(f"pip ended with {process.returncode}: {error_of(lines)}")
    return {"cuda_include": include}


def copy_beside(work: Path) -> dict[str, Any]:
    """Tests, sources and settings beside the package."""
    ignore = shutil.ignore_patterns("__pycache__", "*.so", "build")
    for name in BESIDE:
        source, target = ROOT / name, work / "tree" / name
        if source.is_dir():
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(source, target, ignore=ignore)
        else:
            shutil.copy2(source, target)
    return {}


def imported(work: Path) -> dict[str, Any]:
    """Which package an interpreter gets that looks there first; an editable install's hook goes before any path."""
    ask = "import graphshard._core as c, torch; print(c.__file__); print(torch.__version__)"
    done = subprocess.run([sys.executable, "-c", ask], cwd=work / "tree", capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    place, torch_version = done.stdout.split()
    return {"imported_from": place, "is_the_build": Path(place).is_relative_to(work), "torch": torch_version}


def main() -> int:
    """Build, copy, import; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    row: dict[str, Any] = {"check": "build and install", "status": "running"}
    began = time.perf_counter()
    steps: tuple[Callable[[Path], dict[str, Any]], ...] = (install, copy_beside, imported)
    try:
        for step in steps:
            options.json.write_text(json.dumps({"step": "build", "rows": [row]}, indent=1) + "\n")
            row |= step(options.work)
        row["status"] = "passed"
    except (RuntimeError, OSError, ValueError, subprocess.SubprocessError) as error:
        row |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    row["seconds"] = round(time.perf_counter() - began, 1)
    options.json.write_text(json.dumps({"step": "build", "rows": [row]}, indent=1) + "\n")
    print(json.dumps(row))
    return 0 if row["status"] == "passed" else 1


if __name__ == "__main__":
    sys.exit(main())
