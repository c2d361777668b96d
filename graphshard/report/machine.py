"""What a figure was measured on: enough to tell whether two rows may be compared."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

Facts = dict[str, object]

PACKAGES = ("graphshard", "torch", "transformers", "numpy")


def machine_facts() -> Facts:
    """Cores this process may use, processor, memory, kernel and versions; imports none of the packages it names."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_name(),
        "l3_bytes": _l3_bytes(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def _cpu_name() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _l3_bytes() -> int | None:
    """The last-level cache that core 0 sees; None where the kernel does not say."""
    text = _read("/sys/devices/system/cpu/cpu0/cache/index3/size").strip()
    return int(text.removesuffix("K")) * 1024 if text.endswith("K") else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
