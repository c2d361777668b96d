"""libgraphshard.so through ctypes, as a server in C sees it: every call runs without the GIL."""

from __future__ import annotations

import ctypes
from pathlib import Path

import graphshard._core

PACKAGE = Path(graphshard._core.__file__).parent
LIBRARY = PACKAGE / "lib" / "libgraphshard.so"

OK, DRIVER, CALL, STATE, NOT_FOUND, TIMEOUT = 0, 2, 4, 5, 6, 7


class Info(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("batch_size", ctypes.c_int64),
        ("tokens_per_sequence", ctypes.c_int64),
        ("stream", ctypes.c_void_p),
        ("num_inputs", ctypes.c_size_t),
        ("num_outputs", ctypes.c_size_t),
        ("has_prefetch", ctypes.c_int),
    )


class Tensor(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("address", ctypes.c_uint64), ("num_bytes", ctypes.c_uint64))


def load() -> ctypes.CDLL:
    api = ctypes.CDLL(str(LIBRARY))
    api.gs_last_error.restype = ctypes.c_char_p
    return api


class EmbeddedStep:
    """A reference to a step, taken by handle."""

    def __init__(self, handle: int) -> None:
        self.api, self.pointer = load(), ctypes.c_void_p()
        assert self.api.gs_step_open(ctypes.c_uint64(handle), ctypes.byref(self.pointer)) == OK, self.error
        self.info = Info(size=ctypes.sizeof(Info))
        assert self.api.gs_step_get_info(self.pointer, ctypes.byref(self.info)) == OK

    @property
    def error(self) -> str:
        return str(self.api.gs_last_error().decode())

    def buffer(self, kind: str, name: str) -> Tensor:
        tensor = Tensor()
        status = getattr(self.api, f"gs_step_{kind}")(self.pointer, name.encode(), ctypes.byref(tensor))
        assert status == OK, self.error
        return tensor

    def replay(self, stream: int | None = None) -> int:
        return int(self.api.gs_step_replay(self.pointer, ctypes.c_void_p(stream or self.info.stream)))

    def wait(self, timeout_s: float = 60.0) -> int:
        return int(self.api.gs_step_wait(self.pointer, ctypes.c_double(timeout_s)))

    def epoch(self) -> int:
        epoch = ctypes.c_uint64()
        assert self.api.gs_step_epoch(self.pointer, ctypes.byref(epoch)) == OK
        return epoch.value

    def release(self) -> None:
        self.api.gs_step_release(self.pointer)
