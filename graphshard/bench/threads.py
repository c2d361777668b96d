"""Ranks as threads of this process, for measurements and pictures that need no process of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from graphshard.comm.group import Group, LocalGroup
from graphshard.core.errors import CommError

Value = TypeVar("Value")


def run_threads(function: Callable[[Group], Value], world_size: int, timeout_s: float = 60.0) -> list[Value]:
    """What `function(group)` returns on each of `world_size` threads, by rank.

    Raises:
        CommError: a thread is still running after `timeout_s` (it is left behind; its group is closed).
        Exception: whatever the first rank that failed raised.
    """
    values: dict[int, Value] = {}
    errors: list[Exception] = []

    def run(group: Group) -> None:
        try:
            with group:
                values[group.rank] = function(group)
        except Exception as error:
            errors.append(error)

    with LocalGroup(world_size, timeout_s=timeout_s) as groups:
        threads = [threading.Thread(target=run, args=(group,), daemon=True) for group in groups]
        for thread in threads:
            thread.start()
        for rank, thread in enumerate(threads):
            thread.join(timeout_s)
            if thread.is_alive() and not errors:
                raise CommError(f"rank {rank} of {world_size} threads did not end within {timeout_s:.1f} s")
    if errors:
        raise errors[0]
    return [values[rank] for rank in range(world_size)]
