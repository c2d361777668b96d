"""What the chosen steps need of this interpreter and machine: said before the first one, not by each as it fails."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Collection

BUILD_MODULES = ("pip", "scikit_build_core", "nanobind")
COMPILERS = ("c++", "g++", "clang++")
TESTS = ("gpu-tests", "litmus")
CHECKS = ("ranks", "llama", "numbers", "faults", "nccl")


def lacking(steps: Collection[str], builds: bool) -> list[str]:
    """Modules and tools by name; `builds`: the package comes from the build step, not from what is installed."""
    modules = list(BUILD_MODULES) if "build" in steps else []
    if not {"build", *TESTS, *CHECKS}.isdisjoint(steps):
        modules.append("torch")
    if not set(TESTS).isdisjoint(steps):
        modules.append("pytest")
    found = [name for name in modules if not is_there(name)]
    if "build" in steps:
        if shutil.which("cmake") is None and not is_there("cmake"):
            found.append("cmake")
        if "CXX" not in os.environ and not any(map(shutil.which, COMPILERS)):
            found.append("a C++ compiler")
    if not builds and "torch" not in found and not set(CHECKS).isdisjoint(steps) and not is_there("graphshard._core"):
        found.append("graphshard, which --no-build takes as it is installed")
    return found


def is_there(module: str) -> bool:
    """Whether the interpreter would find `module`."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it lies in
        return False
