"""Rank processes forked from one that has imported torch: a start takes 0.05 s of CPU instead of 1.5 s.

`install()` puts `popen` in the place of `subprocess.Popen` in `graphshard.comm.launch`. A rank is then a grandchild of
the server, handed to the process that asked for it (a "subreaper" for that moment), which is its parent as it would be
of a process started by exec: it waits for it, and the kernel ends the rank with it. What is another program, or needs
an environment that counts at exec only, is started by `subprocess.Popen`. The server stands from the beginning, so that
no test takes it for something left behind, and imports when the first rank is asked for.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

PRELOADED = (
    "numpy",
    "torch",
    "pytest",
    "graphshard",
    "graphshard.comm.rejoin",
    "graphshard.comm.rendezvous",
    "graphshard.comm.rank_main",
    "graphshard.models.kimi_k3.model",
    "graphshard.models.llama",
    "graphshard.bench.decode",
)
AT_EXEC = ("LD_", "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "MALLOC_", "GLIBC_", "ATEN_", "TORCH_", "PYTHON")
"""Beginnings of variables that are read when a program or a library starts."""
BUT = ("PYTHONPATH", "TORCHELASTIC_RUN_ID")
START_S = 60.0
_RANK_MAIN = [sys.executable, "-m", "graphshard.comm.rank_main"]
_PR_SET_CHILD_SUBREAPER = 36


class Forked:
    """What `launch` uses of a `Popen`."""

    def __init__(self, pid: int, stdout: IO[bytes] | None, stderr: IO[bytes] | None) -> None:
        self.pid, self.stdout, self.stderr = pid, stdout, stderr
        self.returncode: int | None = None
        self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                os.close(self._pidfd)
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.poll() is None:
            ended = select.poll()  # select() takes no descriptor beyond 1023
            ended.register(self._pidfd, select.POLLIN)
            ended.poll(None if timeout is None else timeout * 1e3)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Server:
    """A process that forks ranks; one for each process of tests."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._lock = threading.Lock()
        self.environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        command = [sys.executable, __file__, str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=self.environment)
        theirs.close()
        self._socket.settimeout(START_S)

    def why_not(self, command: Sequence[str], env: Mapping[str, str]) -> str:
        """Why `command` must be started by exec; empty if it need not be."""
        if list(command[:3]) != _RANK_MAIN:
            return "another program"
        names = {name for name in {*env, *self.environment} if name.startswith(AT_EXEC) and name not in BUT}
        unlike = sorted(name for name in names if env.get(name) != self.environment.get(name))
        return f"other {', '.join(unlike)}" if unlike else ""

    def fork(self, command: Sequence[str], env: Mapping[str, str], fds: Sequence[int]) -> int:
        """The pid of a child of this process that runs `command` with standard streams and a result pipe `fds`."""
        message = json.dumps({"command": list(command[3:]), "env": dict(env), "parent": os.getpid()}).encode()
        with self._lock:
            _set_subreaper(True)
            try:
                socket.send_fds(self._socket, [len(message).to_bytes(4, "little")], list(fds))
                self._socket.sendall(message)
                told = self._socket.recv(4, socket.MSG_WAITALL)
            finally:
                _set_subreaper(False)
        assert len(told) == 4, "the fork server has ended"
        return int.from_bytes(told, "little")

    def close(self) -> None:
        self._socket.close()
        self._process.wait(10)


def install() -> None:
    """Have `graphshard.comm.launch` start ranks of this process so, from now on."""
    from graphshard.comm import launch

    server = Server()
    atexit.register(server.close)
    launch.subprocess = _Subprocess(server)  # type: ignore[assignment]


class _Subprocess:
    """The module `subprocess`, with another `Popen`."""

    def __init__(self, server: Server) -> None:
        self.Popen = functools.partial(popen, server)

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)


def popen(
    server: Server, command: Sequence[str], *, env: Mapping[str, str], pass_fds: Sequence[int], **options: Any
) -> Any:
    """As `subprocess.Popen`, for what `launch` asks of it."""
    if server.why_not(command, env):
        return subprocess.Popen(command, env=env, pass_fds=pass_fds, **options)
    ours: list[IO[bytes] | None] = []
    with contextlib.ExitStack() as stack:
        null = os.open(os.devnull, os.O_RDONLY)
        stack.callback(os.close, null)
        fds = [null]
        for name, inherited in (("stdout", 1), ("stderr", 2)):
            if options.get(name) is None:
                fds.append(inherited)
                ours.append(None)
            else:
                read_end, write_end = os.pipe()
                stack.callback(os.close, write_end)
                fds.append(write_end)
                ours.append(os.fdopen(read_end, "rb", 0))
        pid = server.fork(command, env, [*fds, *pass_fds])
    return Forked(pid, *ours)


def _set_subreaper(is_on: bool) -> None:
    if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(is_on), 0, 0, 0) != 0:
        raise OSError("prctl(PR_SET_CHILD_SUBREAPER) failed")


# --- in the server ---


def serve(connection: socket.socket) -> dict[str, Any] | None:
    """Fork for each request; returns it in the rank, and None when the connection is closed."""
    is_ready = False
    while True:
        head, fds, _, _ = socket.recv_fds(connection, 4, 8)
        if len(head) < 4:
            return None
        request: dict[str, Any] = json.loads(connection.recv(int.from_bytes(head, "little"), socket.MSG_WAITALL))
        if not is_ready:
            _import_all()
            is_ready = True
        middle = os.fork()
        if middle == 0 and _second_fork(connection, request["parent"]):
            connection.close()
            return request | {"fds": fds}
        os.waitpid(middle, 0)
        for fd in fds:
            os.close(fd)


def _second_fork(connection: socket.socket, parent: int) -> bool:
    """True in the rank, once it is the child of `parent`; the process between the two ends."""
    if os.fork() != 0:
        os._exit(0)
    deadline = time.monotonic() + START_S
    while os.getppid() != parent:
        if time.monotonic() > deadline:
            os._exit(1)  # `parent` has ended
        time.sleep(0.0005)
    connection.sendall(os.getpid().to_bytes(4, "little"))
    return True


def _import_all() -> None:
    """What ranks share: its pages are written by none of them, reference counts aside."""
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def become(request: dict[str, Any]) -> list[str]:
    """Take on what a started program has: environment, streams, paths; returns its arguments."""
    *streams, result = request["fds"]
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    arguments: list[str] = list(request["command"])
    at = arguments.index("--result-fd") + 1
    arguments[at] = str(result)
    return arguments


def main() -> int:
    """The server, and each rank it becomes."""
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    if request is None:
        return 0
    from graphshard.comm import rank_main

    sys.argv = [rank_main.__file__, *become(request)]
    return rank_main.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
