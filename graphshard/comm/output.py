"""What rank processes write: result pipes are collected, the output of ranks other than 0 is passed on, prefixed."""

from __future__ import annotations

import os
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
        self._stop_read, self._stop_write = os.pipe()
        self._deadline = float("inf")
        self._thread = threading.Thread(target=self._run, name="graphshard-ranks-output", daemon=True)
        self._is_finished = False

    def add(self, rank: int, result_fd: int, process: subprocess.Popen[bytes]) -> None:
        """Read `process`'s pipes; before `start`."""
        self._results[rank] = _Pipe(result_fd, rank, None)
        self._open.append(self._results[rank])
        for stream, passed_to in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if stream is not None:
                self._open.append(_Pipe(stream.fileno(), rank, passed_to, stream))

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def finish(self, timeout_s: float) -> None:
        """Read to the end of all pipes, but for at most `timeout_s` (a rank's own child may hold one open)."""
        if self._is_finished:
            return
        self._is_finished = True
        self._deadline = time.monotonic() + timeout_s
        os.write(self._stop_write, b"x")
        if self._thread.is_alive():
            self._thread.join()
        for pipe in self._open:
            pipe.close()
        self._open.clear()
        os.close(self._stop_read)
        os.close(self._stop_write)

    def result(self, rank: int) -> tuple[bytes, float]:
        """What `rank` wrote to its result pipe, and when that pipe ended (monotonic seconds)."""
        pipe = self._results[rank]
        return bytes(pipe.buffer), pipe.ended or time.monotonic()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._stop_read, selectors.EVENT_READ, None)
            for pipe in self._open:
                selector.register(pipe.fd, selectors.EVENT_READ, pipe)
            while self._open and time.monotonic() < self._deadline:
                timeout_s = None if self._deadline == float("inf") else self._deadline - time.monotonic()
                for key, _ in selector.select(timeout_s):
                    if key.data is None:
                        selector.unregister(self._stop_read)  # from now on `_deadline` bounds the wait
                    elif not self._read(key.data):
                        selector.unregister(key.data.fd)
                        self._open.remove(key.data)
                        key.data.close()

    def _read(self, pipe: _Pipe) -> bool:
        """Take what is there; False at the end."""
        data = os.read(pipe.fd, _READ_BYTES)
        pipe.buffer += data
        if pipe.passed_to is None:
            if not data:
                pipe.ended = time.monotonic()
            return bool(data)
        end = pipe.buffer.rfind(b"\n") + 1 if data else len(pipe.buffer)
        text = bytes(pipe.buffer[:end]).decode(errors="replace")
        del pipe.buffer[:end]
        for line in text.splitlines():
            print(f"[rank {pipe.rank}/{self._world_size}] {line}", file=pipe.passed_to, flush=True)
        return bool(data)
