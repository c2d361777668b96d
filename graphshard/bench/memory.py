"""What a process holds, as the kernel counts it: a page shared by two processes counts half for each (PSS)."""

from __future__ import annotations

import ctypes
import gc
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Pss:
    """Proportional set size: `anon_bytes` private heap and stacks, `shmem_bytes` windows, `file_bytes` mapped files."""

    total_bytes: int
    anon_bytes: int
    shmem_bytes: int
    file_bytes: int


def read_pss() -> Pss:
    """This process's PSS now. Summed over processes that share memory, each shared page counts once."""
    fields = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        name, _, value = line.partition(":")
        if value.endswith("kB"):
            fields[name] = int(value.split()[0]) * 1024
    return Pss(fields["Pss"], fields.get("Pss_Anon", 0), fields.get("Pss_Shmem", 0), fields.get("Pss_File", 0))


def settle() -> None:
    """Give back what is free, so that a reading counts what is held: collect garbage, trim the heap."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl has no need of it
    if trim is not None:
        trim(0)
