"""Which NCCL is used: on `host` our own, on `cuda` the copy that is mapped already (torch's), else the wheel's."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from graphshard.comm.nccl_gates import not_available
from graphshard.device.base import Device
from graphshard.device.host import library_path

HOST_LIBRARY = "libgraphshard_hostnccl.so"
_WHEEL_LIBRARY = Path("lib") / "libnccl.so.2"
_MAPPED = re.compile(r"libnccl\.so[.\d]*( \(deleted\))?")


def find_library(device: Device) -> Path:
    """The library for `device`.

    Raises:
        CommError: there is none, or two different copies are mapped into this process.
    """
    if device.driver.is_host:
        path = library_path().parent / HOST_LIBRARY
        if not path.is_file():
            raise not_available(f"the host's NCCL was not found at {path}: reinstall graphshard")
        return path
    return choose_library(mapped_libraries(Path("/proc/self/maps").read_text()), wheel_folders())


def choose_library(mapped: Sequence[Path], wheels: Iterable[Path]) -> Path:
    """The one mapped copy, else the first wheel's.

    Two copies in one process have a state each: torch's communicators would live in one, ours in the other.
    """
    if len(mapped) > 1:
        names = ", ".join(map(str, mapped))
        raise not_available(f"{len(mapped)} copies of NCCL are mapped into this process ({names}): keep one of them")
    if mapped:
        return mapped[0]
    for folder in wheels:
        if (folder / _WHEEL_LIBRARY).is_file():
            return folder / _WHEEL_LIBRARY
    raise not_available("no libnccl.so.2 is mapped, and no wheel has one: pip install nvidia-nccl-cu13, or -cu12")


def mapped_libraries(maps: str) -> list[Path]:
    """The copies of NCCL in the text of /proc/self/maps, each once, in the order of their addresses."""
    found: dict[Path, None] = {}
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and _MAPPED.fullmatch(fields[5].rpartition("/")[2]):
            found[Path(fields[5].removesuffix(" (deleted)"))] = None
    return list(found)


def wheel_folders() -> list[Path]:
    """Where the `nvidia-nccl` wheels keep their files: `nvidia` is a namespace package."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:  # there is no package `nvidia` at all
        return []
    return [] if spec is None else [Path(place) for place in spec.submodule_search_locations or ()]
