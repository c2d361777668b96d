"""Starting ranks as processes of this machine, with torchrun's environment variables.

A rank's death does not end the others (torchrun's agent would); the launcher's death ends all of them; a limit in time
ends those that are left, and only those.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from graphshard.comm.group import DEFAULT_TIMEOUT_S, new_job_name
from graphshard.comm.output import OutputPump
from graphshard.core import errors
from graphshard.core.counts import which_ranks
from graphshard.core.errors import CommError, GraphshardError, SpecError

_LOOK_S = 0.1  # how often all ranks are looked at
_LAST_OUTPUT_S = 2.0  # what ranks wrote before they ended is read for at most this long


@dataclass(frozen=True, slots=True)
class RankResult:
    """How a rank's process ended: with a `value`, an error, or a bare return code (negative: the signal)."""

    rank: int
    pid: int
    return_code: int
    value: Any = None
    error_type: str = ""
    error: str = ""
    """The message; empty if the rank returned."""
    traceback: str = ""
    ended_s: float = 0.0
    """Seconds after the start at which it fell silent: the first to fail is the one to look at."""

    @property
    def is_good(self) -> bool:
        """Whether the function returned."""
        return not self.error

    def line(self, world_size: int) -> str:
        """The result in a line, prefixed `[rank 3/8]`."""
        return f"[rank {self.rank}/{world_size}] {self.what}"

    @property
    def what(self) -> str:
        """The result in a line."""
        what = f"{self.error_type}: {self.error}" if self.error_type else self.error or "done"
        return what.splitlines()[0]


class RankProcesses:
    """Running rank processes. A context manager: leaving it ends those still running, and waits for them.

    Start it from a thread that outlives it: the kernel ends ranks when the thread that started them ends.
    """

    def __init__(
        self,
        entry: str,
        world_size: int,
        *,
        arguments: Sequence[object] = (),
        group_timeout_s: float | None = DEFAULT_TIMEOUT_S,
        env: Mapping[str, str] | None = None,
        run_id: str | None = None,
        master_port: int | None = None,
        num_threads: int = 1,
    ) -> None:
        """Start `world_size` processes that call `entry` (`package.module:function` or `file.py:function`).

        Args:
            entry: called as `function(group, *arguments)`.
            world_size: how many.
            arguments: the same for all ranks; JSON.
            group_timeout_s: limit of the group's waits; None calls `function(*arguments)` without a group.
            env: added to this process's environment.
            run_id: TORCHELASTIC_RUN_ID, by default a new name.
            master_port: MASTER_PORT, by default a free one.
            num_threads: OMP_NUM_THREADS, unless the environment sets it.
        """
        if world_size < 1:
            raise SpecError(f"cannot start {world_size} ranks: use 1 or more")
        self.world_size = world_size
        self._started = time.monotonic()
        self._pump = OutputPump(world_size)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._command = [sys.executable, "-m", "graphshard.comm.rank_main", entry]
        self._command += ["--arguments", json.dumps(list(arguments)), "--parent-pid", str(os.getpid())]
        if group_timeout_s is not None:
            self._command += ["--group-timeout-s", str(group_timeout_s)]
        self._environment = {"OMP_NUM_THREADS": str(num_threads), **os.environ, **(env or {})}
        self._environment |= {
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port() if master_port is None else master_port),
            "TORCHELASTIC_RUN_ID": run_id or new_job_name(),
        }
        try:
            for rank in range(world_size):
                self._processes.append(self._start(rank, self._command))
        except BaseException:
            self.close()
            raise
        self._pump.start()

    @property
    def pids(self) -> list[int]:
        """The processes' ids, by rank."""
        return [process.pid for process in self._processes]

    @property
    def job(self) -> str:
        """The name of the ranks' job (`Group.job`), or empty before a rank has its group."""
        told = (_told(self._pump.result(rank)[0]).get("job", "") for rank in range(self.world_size))
        return next((str(job) for job in told if job), "")

    def restart(self, rank: int, timeout_s: float = 10.0) -> RankResult:
        """Start a process anew for `rank`, which has ended or is about to; returns how it ended.

        The new process calls the same function with the same arguments; its group is that of a rank that came back
        (`rejoin_group`), which joins the ranks that still run.

        Raises:
            CommError: the rank still runs after `timeout_s`, the ranks had no group yet, or `wait` has collected them.
        """
        if self._pump.is_finished:
            raise CommError(f"rank {rank} cannot come back: all ranks were waited for; start all ranks anew")
        before = self._processes[rank]
        try:
            before.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise CommError(f"rank {rank} (pid {before.pid}) still runs: end it before it is started again") from None
        self._pump.wait_for_end(rank, _LAST_OUTPUT_S)
        result, job = self._result(rank, ""), self.job
        if not job:
            raise CommError(f"rank {rank} cannot come back: no rank had its group yet; start all ranks anew")
        self._processes[rank] = self._start(rank, [*self._command, "--rejoin", job])
        return result

    def signal(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to one rank, if it still runs."""
        self._processes[rank].send_signal(number)

    def wait(self, timeout_s: float, after_failure_s: float | None = None) -> list[RankResult]:
        """All ranks' results, by rank; those that still run `timeout_s` after the start are killed and say so.

        With `after_failure_s` they are also killed that long after a rank has failed: for ranks that need each other,
        where one may be stopped, or wait for a peer that never came.
        """
        late, limit = self._wait_for_ends(timeout_s, after_failure_s)
        for rank in late:
            self._processes[rank].kill()
            self._processes[rank].wait()
        self._pump.finish(_LAST_OUTPUT_S)
        return [self._result(rank, limit if rank in late else "") for rank in range(self.world_size)]

    def close(self) -> None:
        """End every rank that still runs, and wait for it. Idempotent."""
        for process in self._processes:
            process.kill()  # nothing happens to one that has ended: its pid is kept until the wait below
            process.wait()
        self._pump.finish(_LAST_OUTPUT_S)

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _wait_for_ends(self, timeout_s: float, after_failure_s: float | None) -> tuple[set[int], str]:
        """Ranks that have not ended in time, and in which time."""
        deadline, limit = self._started + timeout_s, f"within {timeout_s:.1f} s"
        running = set(range(self.world_size))
        while running:
            for rank in sorted(running):
                process = self._processes[rank]
                if process.poll() is None:
                    continue
                running.discard(rank)
                until = deadline if after_failure_s is None else time.monotonic() + after_failure_s
                if process.returncode and until < deadline:
                    deadline, limit = until, f"within {after_failure_s:.1f} s after rank {rank} had failed"
            left_s = deadline - time.monotonic()
            if not running or left_s <= 0:
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._processes[min(running)].wait(min(left_s, _LOOK_S))
        return running, limit

    def _start(self, rank: int, command: list[str]) -> subprocess.Popen[bytes]:
        read_end, write_end = os.pipe()
        process = None
        try:
            process = subprocess.Popen(
                [*command, "--result-fd", str(write_end)],
                env={**self._environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if rank else None,
                stderr=subprocess.PIPE if rank else None,
                pass_fds=[write_end],
            )
        finally:
            os.close(write_end)
            if process is None:
                os.close(read_end)
        self._pump.add(rank, read_end, process)
        return process

    def _result(self, rank: int, limit: str) -> RankResult:
        process = self._processes[rank]
        raw, ended = self._pump.result(rank)
        told = _told(raw)
        failure = told.get("error", {})
        error = failure.get("message", "") or failure.get("type", "")
        if limit:
            error = f"did not end {limit} and was killed (pid {process.pid})"
        elif "value" not in told and not failure:
            error = _exit_text(process.returncode)
        return RankResult(
            rank=rank,
            pid=process.pid,
            return_code=process.returncode,
            value=told.get("value"),
            error_type=failure.get("type", ""),
            error=error,
            traceback=failure.get("traceback", ""),
            ended_s=ended - self._started,
        )


def run_ranks(
    entry: str,
    world_size: int,
    *,
    arguments: Sequence[object] = (),
    timeout_s: float = 120.0,
    after_failure_s: float | None = None,
    group_timeout_s: float | None = DEFAULT_TIMEOUT_S,
    env: Mapping[str, str] | None = None,
    num_threads: int = 1,
) -> list[RankResult]:
    """Start ranks (see `RankProcesses`), wait for all of them and return their results, good or not, by rank."""
    with RankProcesses(
        entry,
        world_size,
        arguments=arguments,
        group_timeout_s=group_timeout_s,
        env=env,
        num_threads=num_threads,
    ) as ranks:
        return ranks.wait(timeout_s, after_failure_s)


def raise_first_failure(results: Sequence[RankResult]) -> None:
    """Raise the error of the rank that failed first, with its class if it is one of graphshard's; else return."""
    failed = sorted((result for result in results if not result.is_good), key=lambda result: result.ended_s)
    if not failed:
        return
    first = failed[0]
    kind, text = getattr(errors, first.error_type, None), first.error
    if not (isinstance(kind, type) and issubclass(kind, GraphshardError)):
        kind, text = CommError, f"{first.error_type}: {text}" if first.error_type else text
    ranks: dict[str, list[int]] = {}
    for result in failed:
        is_like_first = (result.error_type, result.error) == (first.error_type, first.error)
        ranks.setdefault(text if is_like_first else result.what, []).append(result.rank)
    raise kind("\n".join(f"[{which_ranks(sorted(which))}] {told}" for told, which in ranks.items()))


def failure_text(results: Sequence[RankResult]) -> str:
    """The rank that failed first in full, with its traceback, and a line for each other; empty if none failed."""
    failed = sorted((result for result in results if not result.is_good), key=lambda result: result.ended_s)
    if not failed:
        return ""
    lines = [failed[0].line(len(results)), failed[0].traceback.rstrip()]
    return "\n".join(line for line in lines + [result.line(len(results)) for result in failed[1:]] if line)


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _told(raw: bytes) -> dict[str, Any]:
    """What a rank told so far, a JSON object a line: its job, then its result."""
    told: dict[str, Any] = {}
    for line in raw.splitlines(keepends=True):
        if line.endswith(b"\n"):
            told |= json.loads(line)
    return told


def _exit_text(return_code: int) -> str:
    if return_code < 0:
        return f"was killed by {signal.Signals(-return_code).name}"
    return f"ended with code {return_code} and without a result"
