"""The host driver under the vendor's name, for tools that ask the loader for `libcuda.so.1` (cuda-python).

A process opts in when it starts, through LD_LIBRARY_PATH: the loader reads it once. The folder holds one library of no
code that needs the host driver by its own name, so whoever finds it gets the copy that graphshard has loaded. Nothing
here changes a running process or a shared environment.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path

from graphshard._core import Driver
from graphshard.core.errors import DeviceError
from graphshard.device.host import library_path

LIBRARY_PATH = "LD_LIBRARY_PATH"
SONAME = "libcuda.so.1"


def as_libcuda_folder() -> Path:
    """Where the host driver is installed under the name `libcuda.so.1`."""
    return library_path().parent / "as_libcuda"


def host_driver_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables for a process in which `libcuda.so.1` is graphshard's host driver; add them to its environment.

    Raises:
        DeviceError: the vendor's driver is installed, and must not be hidden; or graphshard's lacks the folder.
    """
    folder = as_libcuda_folder()
    if not (folder / SONAME).is_file():
        raise DeviceError(f"host: {SONAME} was not found in {folder}; reinstall graphshard")
    places = [place for place in environ.get(LIBRARY_PATH, "").split(os.pathsep) if place and place != str(folder)]
    reason = why_not_as_libcuda()
    if reason is not None:
        raise DeviceError(f"host: {reason}")
    return {LIBRARY_PATH: os.pathsep.join([str(folder), *places])}


def why_not_as_libcuda() -> str | None:
    """Why the host driver must not take the name `libcuda.so.1` in processes of this machine; None if it may."""
    try:
        found = ctypes.CDLL(SONAME)
    except OSError:
        return None
    if _address(found) == _address(ctypes.CDLL(str(library_path()))):
        return None  # this process was started with it
    return f"a vendor's {SONAME} is installed here, which the host driver must not hide; use device cuda"


def why_not_libcuda(driver: Driver) -> str | None:
    """Why handles of `driver` may not be given to tools that load `libcuda.so.1`: another library crashes on them.

    None if that name means the library that `driver` has loaded.
    """
    try:
        found = ctypes.CDLL(SONAME)
    except OSError:
        how = "start the process with the variables of graphshard.device.host_driver_environment()"
        return f"this process finds no {SONAME}, by which cuda-python knows a driver; {how}"
    if _address(found) == _address(ctypes.CDLL(driver.path)):
        return None
    return (
        f"{SONAME} is another library here than {driver.path}, whose graphs it cannot read; "
        f"take the folder that holds it out of {LIBRARY_PATH}"
    )


def _address(library: ctypes.CDLL) -> int | None:
    """Where `library` has the entry point through which all others are found."""
    return ctypes.cast(library.cuGetProcAddress_v2, ctypes.c_void_p).value
