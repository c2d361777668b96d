"""Control pages: 4096 shared bytes a rank, where peers read how far it is and whether it lives, without asking it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

from graphshard._core import ControlPage
from graphshard.comm.group import Group
from graphshard.comm.process import ProcessId
from graphshard.core.errors import CommError

RankState = Literal["live", "stopped", "closed", "dead"]

LIVE, CLOSED, DEAD = 1, 2, 3
"""States as a page holds them."""


class ControlTable:
    """The control pages of all ranks, by rank. They stay mapped when their ranks are gone."""

    def __init__(
        self, group: Group, pages: tuple[ControlPage, ...], processes: Sequence[ProcessId] | None = None
    ) -> None:
        """`processes` by rank; None: the group's."""
        self.pages = pages
        self._rank = group.rank
        self._processes = tuple(group.processes if processes is None else processes)

    @staticmethod
    def exchange(group: Group, digest: bytes) -> ControlTable:
        """Make this rank's page and map everybody's (collective). `digest` is the layout's, 32 bytes.

        Raises:
            CommError: a rank's layout has another digest.
        """
        mine = _new_page(digest)
        own_fd = mine.fd()
        try:
            gathered = group.all_gather(None, [own_fd], name="control pages")
        finally:
            os.close(own_fd)
        fds = [rank_fds[0] for _, rank_fds in gathered]
        try:
            pages = tuple(mine if rank == group.rank else ControlPage.open_fd(fd) for rank, fd in enumerate(fds))
        finally:
            for fd in fds:
                os.close(fd)
        unlike = [rank for rank, page in enumerate(pages) if page.digest != pages[0].digest]
        if unlike:
            raise CommError(
                f"layouts differ: rank 0 has digest {pages[0].digest.hex()[:12]}, rank {unlike[0]} "
                f"{pages[unlike[0]].digest.hex()[:12]}; start all ranks with the same model and plan"
            )
        return ControlTable(group, pages)

    @staticmethod
    def join(group: Group, digest: bytes, peers: Sequence[tuple[ProcessId, ControlPage]]) -> ControlTable:
        """Make the page of a rank that came back, beside the `peers`' by rank (its own entry is ignored). Local.

        A peer's process goes with its page: since `group` was made it may have come back itself.
        """
        processes, pages = ([*column] for column in zip(*peers, strict=True))
        processes[group.rank], pages[group.rank] = group.processes[group.rank], _new_page(digest)
        return ControlTable(group, tuple(pages), processes)

    def replace(self, rank: int, page: ControlPage, process: ProcessId) -> None:
        """Rank `rank` came back as `process`."""
        self.pages = (*self.pages[:rank], page, *self.pages[rank + 1 :])
        self._processes = (*self._processes[:rank], process, *self._processes[rank + 1 :])

    @property
    def mine(self) -> ControlPage:
        """This rank's page, the only one it may write (but for `claim_first`)."""
        return self.pages[self._rank]

    def state(self, rank: int) -> RankState:
        """What the page and the kernel say of `rank`. A rank that closed before its process ended is closed."""
        page = self.pages[rank]
        if page.state != LIVE:
            return "closed" if page.state == CLOSED else "dead"
        process = self._processes[rank].state()
        return "dead" if process == "gone" else "stopped" if process == "stopped" else "live"

    def dead(self) -> list[int]:
        """The ranks that ended without closing."""
        return [rank for rank in range(len(self.pages)) if self.state(rank) == "dead"]

    def progress(self, rank: int) -> str:
        """`it last finished op 27 of step 417`."""
        page = self.pages[rank]
        if not page.step and not page.op:
            return "it has finished no step"
        return f"it last finished op {page.op} of step {page.step}"

    def describe(self) -> str:
        """One clause a peer: who it is, its state and its progress."""
        peers = [rank for rank in range(len(self.pages)) if rank != self._rank]
        clauses = [
            f"rank {rank} (pid {self.pages[rank].pid}) is {self.state(rank)}, {self.progress(rank)}" for rank in peers
        ]
        return "; ".join(clauses) or "none"


def _new_page(digest: bytes) -> ControlPage:
    page = ControlPage()
    page.set_identity(os.getpid(), digest)
    page.set_state(LIVE)
    return page
