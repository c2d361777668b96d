"""`fake_nccl.c`, compiled and loaded: an NCCL that hangs, fails or answers nonsense when told to."""

from __future__ import annotations

import ctypes
import subprocess
import time
from pathlib import Path

from device_helpers import TIMEOUT_S

from graphshard._core import Communicator, NcclLibrary

SOURCE = Path(__file__).with_name("fake_nccl.c")


def build(folder: Path, name: str = "libfakenccl.so", *options: str) -> Path:
    """Compile the fake into `folder`; `options` are the compiler's."""
    path = folder / name
    command = ["cc", "-shared", "-fPIC", "-D_GNU_SOURCE", "-pthread", *options, "-o", str(path), str(SOURCE)]
    subprocess.run(command, check=True, timeout=TIMEOUT_S)
    return path


def open_communicator(library: NcclLibrary, name: str = "weights", timeout_s: float = TIMEOUT_S) -> Communicator:
    """Rank 1 of 2; the fake waits for no other rank."""
    return Communicator(library, library.unique_id(), 2, 1, name, timeout_s)


class FakeNccl:
    """Steers the copy of the library at `path` that this process has loaded."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._library = ctypes.CDLL(self.path)  # the same copy: it is found by its path

    def reset(self) -> None:
        self._library.fake_reset()

    def hang(self, entry_point: str, together: int = 0) -> None:
        """The call does not return until `release`, or until it is made `together` times at once."""
        self._library.fake_hang(entry_point.encode(), together)

    def release(self) -> None:
        self._library.fake_release()

    def await_stuck(self) -> None:
        """Returns when a call hangs."""
        self._library.fake_await_stuck()

    def fail(self, entry_point: str, result: int) -> None:
        self._library.fake_fail(entry_point.encode(), result)

    def set_async(self, result: int) -> None:
        self._library.fake_set_async(result)

    def null_window(self, is_null: bool) -> None:
        self._library.fake_null_window(int(is_null))

    def misalign(self, num_bytes: int) -> None:
        self._library.fake_misalign(num_bytes)

    def calls(self) -> list[str]:
        """Calls so far, each with what it was given; "*" after the name where the main thread made it."""
        text = ctypes.create_string_buffer(1 << 16)
        self._library.fake_log(text, len(text))
        return text.value.decode().splitlines()

    def names(self) -> list[str]:
        return [call.split(" ", 1)[0].rstrip("*") for call in self.calls()]

    def has_called(self, entry_point: str) -> bool:
        """Whether it was called, or is within the limit: calls of background threads come when they come."""
        deadline = time.monotonic() + TIMEOUT_S
        while entry_point not in self.names():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True
