"""What rank processes write: result pipes are collected, the output of ranks other than 0 is passed on, prefixed."""

from __future__ import annotations

import os
import queue
import selectors
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import IO, TextIO

_READ_BYTES = 1 << 16


@dataclass(slots=True)
class _Pipe:
    fd: int
    rank: int
    passed_to: TextIO | None
    """None for a result pipe."""
    owner: IO[bytes] | None = None
    buffer: bytearray = field(default_factory=bytearray)
    ended: float = 0.0
    at_end: threading.Event = field(default_factory=threading.Event)

    def close(self) -> None:
        if self.owner is not None:
            self.owner.close()
        else:
            os.close(self.fd)


class OutputPump:
    """Reads all pipes on one thread, so that no rank blocks on a full one. Rank 0 writes to our own stdout itself."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._results: dict[int, _Pipe] = {}
        self._open: list[_Pipe] = []
        self._added: queue.SimpleQueue[_Pipe] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe()
        self._deadline = float("inf")
        self._thread = threading.Thread(target=self._run, name="graphshard-ranks-output", daemon=True)
        self._is_finished = False

    def add(self, rank: int, result_fd: int, process: subprocess.Popen[bytes]) -> None:
        """Read `process`'s pipes from now on; its result takes the place of the one that `rank` had before."""
        self._results[rank] = _Pipe(result_fd, rank, None)
        self._added.put(self._results[rank])
        for stream, passed_to in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if stream is not None:
                self._added.put(_Pipe(stream.fileno(), rank, passed_to, stream))
        os.write(self._wake_write, b"+")

    @property
    def is_finished(self) -> bool:
        """Whether nothing more is read."""
        return self._is_finished

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def finish(self, timeout_s: float) -> None:
        """Read to the end of all pipes, but for at most `timeout_s` (a rank's own child may hold one open)."""
        if self._is_finished:
            return
        self._deadline = time.monotonic() + timeout_s
        self._is_finished = True
        os.write(self._wake_write, b"x")
        if self._thread.is_alive():
            self._thread.join()
        while not self._added.empty():
            self._open.append(self._added.get())
        for pipe in self._open:
            pipe.close()
        self._open.clear()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def wait_for_end(self, rank: int, timeout_s: float) -> None:
        """Return when all of `rank`'s result is here; or after `timeout_s`, as its own child may hold the pipe open."""
        self._results[rank].at_end.wait(timeout_s)

    def result(self, rank: int) -> tuple[bytes, float]:
        """What `rank` wrote to its result pipe, and when that pipe ended (monotonic seconds)."""
        pipe = self._results[rank]
        return bytes(pipe.buffer), pipe.ended or time.monotonic()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ, None)
            while not self._is_finished or (self._has_pipes() and time.monotonic() < self._deadline):
                timeout_s = max(0.0, self._deadline - time.monotonic()) if self._is_finished else None
                for key, _ in selector.select(timeout_s):
                    if key.data is None:
                        os.read(self._wake_read, _READ_BYTES)
                        self._take_added(selector)
                    elif not self._read(key.data):
                        selector.unregister(key.data.fd)
                        self._open.remove(key.data)
                        key.data.close()

    def _has_pipes(self) -> bool:
        return bool(self._open) or not self._added.empty()

    def _take_added(self, selector: selectors.BaseSelector) -> None:
        while not self._added.empty():
            pipe = self._added.get()
            self._open.append(pipe)
            selector.register(pipe.fd, selectors.EVENT_READ, pipe)

    def _read(self, pipe: _Pipe) -> bool:
        """Take what is there; False at the end."""
        data = os.read(pipe.fd, _READ_BYTES)
        pipe.buffer += data
        if pipe.passed_to is None:
            if not data:
                pipe.ended = time.monotonic()
                pipe.at_end.set()
            return bool(data)
        end = pipe.buffer.rfind(b"\n") + 1 if data else len(pipe.buffer)
        text = bytes(pipe.buffer[:end]).decode(errors="replace")
        del pipe.buffer[:end]
        for line in text.splitlines():
            print(f"[rank {pipe.rank}/{self._world_size}] {line}", file=pipe.passed_to, flush=True)
        return bool(data)
