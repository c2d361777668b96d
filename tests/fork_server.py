"""Ranks and commands forked from a process that has imported torch: a start takes 0.05 s of CPU instead of 1.5 s.

`install()` puts `popen` in the place of `subprocess.Popen` in `graphshard.comm.launch`; `start` is for commands, each
with a server of its own for its ranks. What is forked is a grandchild of the server, handed to the process that asked
for it (a "subreaper" for that moment), which is its parent as it would be of a process started by exec: it waits for
it, and the kernel ends a rank with it. What is another program, or needs an environment that counts at exec only, is
started by `subprocess.Popen`. The server stands from the beginning, so that no test takes it for something left behind,
and imports when it is first asked.
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
FOR_COMMANDS = ("rich.progress", "rich.table", "graphshard.cli", "graphshard.cli.ranks", "graphshard.cli.loading")
AT_EXEC = ("LD_", "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "MALLOC_", "GLIBC_", "ATEN_", "TORCH_", "PYTHON")
"""Beginnings of variables that are read when a program or a library starts."""
BUT = ("PYTHONPATH", "TORCHELASTIC_RUN_ID")
START_S = 60.0
_RANK, _COMMAND = "graphshard.comm.rank_main", "graphshard"
_PR_SET_CHILD_SUBREAPER = 36


class Forked:
    """What `launch` and tests use of a `Popen`."""

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

    def communicate(self, timeout: float | None = None) -> tuple[bytes, bytes]:
        """Both outputs, read to their ends."""
        found: dict[int, bytes] = {}
        streams = [stream for stream in (self.stdout, self.stderr) if stream is not None]

        def read(number: int, stream: IO[bytes]) -> None:
            found[number] = stream.read()
            stream.close()

        threads = [threading.Thread(target=read, args=pair, daemon=True) for pair in enumerate(streams)]
        for thread in threads:
            thread.start()
        self.wait(timeout)
        for thread in threads:
            thread.join(timeout)
        return found[0], found[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Server:
    """A process that forks ranks and commands; one for each process of tests, and for each command."""

    def __init__(
        self,
        connection: socket.socket,
        environment: Mapping[str, str],
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self._socket, self._process, self._lock = connection, process, threading.Lock()
        self._socket.settimeout(START_S)
        self.environment = environment

    @staticmethod
    def start(libraries: str | None = None) -> Server:
        """As another program: it shares nothing with this process. `libraries` is its LD_LIBRARY_PATH."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, __file__, str(theirs.fileno())]
        environment = _with_threads(os.environ) | ({} if libraries is None else {"LD_LIBRARY_PATH": libraries})
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        server = Server(ours, environment, process)
        atexit.register(server.close)
        return server

    def why_not(self, command: Sequence[str], env: Mapping[str, str]) -> str:
        """Why `command` must be started by exec; empty if it need not be."""
        if list(command[:2]) != [sys.executable, "-m"] or command[2] not in (_RANK, _COMMAND):
            return "another program"
        names = {name for name in {*env, *self.environment} if name.startswith(AT_EXEC) and name not in BUT}
        unlike = sorted(name for name in names if env.get(name) != self.environment.get(name))
        return f"other {', '.join(unlike)}" if unlike else ""

    def fork(self, command: Sequence[str], env: Mapping[str, str], fds: Sequence[int]) -> int:
        """The pid of a child of this process that runs `command` with standard streams and a result pipe `fds`."""
        program = {"program": command[2], "arguments": list(command[3:])}
        around = {"env": dict(env), "folder": os.getcwd(), "parent": os.getpid()}
        message = json.dumps(program | around).encode()
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
        if self._process is not None:
            self._process.wait(10)


def install(server: Server | None = None) -> None:
    """Have `graphshard.comm.launch` start ranks of this process so, from now on."""
    from graphshard.comm import launch

    server = server or Server.start()
    launch.subprocess = _Subprocess(server)  # type: ignore[assignment]


def start(command: Sequence[str]) -> Any:
    """`command` with its outputs in pipes; forked where that is the same."""
    from graphshard.comm import launch

    return launch.subprocess.Popen(
        command, env=_with_threads(os.environ), pass_fds=(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def start_by_exec(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """The same, sharing nothing: where memory is measured, or a start as users make it is what is tried."""
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def _with_threads(environment: Mapping[str, str]) -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", **environment}


class _Subprocess:
    """The module `subprocess`, with another `Popen`."""

    def __init__(self, server: Server) -> None:
        self.Popen = functools.partial(popen, _Servers(server))

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)


class _Servers:
    """One for each LD_LIBRARY_PATH: programs that find the host driver as libcuda need another."""

    def __init__(self, first: Server) -> None:
        self._by_path = {first.environment.get("LD_LIBRARY_PATH"): first}

    def server(self, env: Mapping[str, str]) -> Server:
        path = env.get("LD_LIBRARY_PATH")
        if path not in self._by_path:
            self._by_path[path] = Server.start(path)
        return self._by_path[path]


def popen(
    servers: _Servers, command: Sequence[str], *, env: Mapping[str, str], pass_fds: Sequence[int], **options: Any
) -> Any:
    """As `subprocess.Popen`, for what `launch` asks of it."""
    server = servers.server(env)
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
    """Fork for each request; returns it in the rank or command, and None when the connection is closed."""
    while True:
        head, fds, _, _ = socket.recv_fds(connection, 4, 8)
        if len(head) < 4:
            return None
        request: dict[str, Any] = json.loads(connection.recv(int.from_bytes(head, "little"), socket.MSG_WAITALL))
        _import_all(PRELOADED if request["program"] == _RANK else (*PRELOADED, *FOR_COMMANDS))
        middle = os.fork()
        if middle == 0 and _second_fork(connection, request["parent"]):
            connection.close()
            return request | {"fds": fds}
        os.waitpid(middle, 0)
        for fd in fds:
            os.close(fd)


def _second_fork(connection: socket.socket, parent: int) -> bool:
    """True in what is wanted, once it is the child of `parent`; the process between the two ends."""
    if os.fork() != 0:
        os._exit(0)
    deadline = time.monotonic() + START_S
    while os.getppid() != parent:
        if time.monotonic() > deadline:
            os._exit(1)  # `parent` has ended
        time.sleep(0.0005)
    connection.sendall(os.getpid().to_bytes(4, "little"))
    return True


def _import_all(names: Sequence[str]) -> None:
    """What all share: its pages are written by none of them, reference counts aside."""
    if all(name in sys.modules for name in names):
        return
    for name in names:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def become(request: dict[str, Any]) -> list[str]:
    """Take on what a started program has: environment, folder, streams, paths; returns its arguments."""
    for number, fd in enumerate(request["fds"][:3]):
        os.dup2(fd, number)
        os.close(fd)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - the program's own; the server's may be of another kind of file
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", 1, errors="backslashreplace", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["folder"])
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    arguments: list[str] = list(request["arguments"])
    if request["program"] == _RANK:
        arguments[arguments.index("--result-fd") + 1] = str(request["fds"][3])
    return arguments


def run(connection: socket.socket) -> int:
    """The server, and whatever it becomes."""
    request = serve(connection)
    if request is None:
        return 0
    arguments = become(request)
    if request["program"] == _RANK:
        from graphshard.comm import rank_main

        sys.argv = [rank_main.__file__, *arguments]
        return rank_main.main(arguments)
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        return _run_server_of_command(ours, theirs)
    theirs.close()
    install(Server(ours, _with_threads(os.environ)))
    from graphshard import __main__ as command
    from graphshard.cli import main

    sys.argv = [command.__file__, *arguments]
    main()
    return 0


def _run_server_of_command(ours: socket.socket, theirs: socket.socket) -> int:
    ours.close()
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)  # else whoever reads what the command writes waits for this process too
    os.close(null)
    return run(theirs)


if __name__ == "__main__":
    sys.exit(run(socket.socket(fileno=int(sys.argv[1]))))
