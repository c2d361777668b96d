"""A decision that all ranks make once, and alike: go on, or not and why. Whoever decides first has decided for all.

What ranks say to each other is not enough for that: where a message is lost or late, one rank would go on and another
turn back. So the decision is a word in memory that all of them share, and outlives whoever dies.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from graphshard._core import ControlPage
from graphshard.comm.group import Group
from graphshard.core.errors import CommError, DeviceError, GraphshardError, LoadError, ProgramError, SpecError

_KINDS: tuple[type[GraphshardError], ...] = (SpecError, ProgramError, DeviceError, CommError, LoadError)


class Verdict:
    """One decision. Every rank has a page, on which it writes why not; the word is on rank 0's."""

    def __init__(self, name: str, rank: int, pages: Sequence[ControlPage]) -> None:
        """`name`: what is decided, as errors say it. `pages` are all ranks', used for nothing else."""
        self._name, self._rank, self._pages = name, rank, tuple(pages)

    @staticmethod
    def exchange(group: Group, names: Sequence[str]) -> list[Verdict]:
        """As many decisions as `names`, all open (collective)."""
        mine = [ControlPage() for _ in names]
        own_fds = [page.fd() for page in mine]
        try:
            gathered = group.all_gather(None, own_fds, name=f"pages to decide {', '.join(names)}")
        finally:
            for fd in own_fds:
                os.close(fd)
        try:
            pages = [[ControlPage.open_fd(fd) for fd in fds] for _, fds in gathered]
        finally:
            for _, fds in gathered:
                for fd in fds:
                    os.close(fd)
        pages[group.rank] = mine
        return [Verdict(name, group.rank, [of[i] for of in pages]) for i, name in enumerate(names)]

    def settle(self, failure: GraphshardError | None) -> GraphshardError | None:
        """Decide to go on (None), or not to because of `failure`, unless that was decided already. Never waits.

        A rank decides to go on only when it knows that all ranks are ready to.

        Returns:
            What was decided, on every rank alike: None, or the failure of the rank that was first.
        """
        go = len(self._pages)
        if failure is not None:
            kind = next((i for i, one in enumerate(_KINDS) if isinstance(failure, one)), _KINDS.index(CommError))
            self._pages[self._rank].post_failure(str(failure), kind, culprit=self._rank)
        first = self._pages[0].claim_first(go if failure is None else self._rank)
        if first == go:
            return None
        told = self._pages[first].failure
        assert told is not None, f"rank {first} decided against {self._name}, and posted no reason"
        return _KINDS[told[1]](told[0])
