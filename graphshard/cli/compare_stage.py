"""What `graphshard compare --stage` has go wrong: a gather that one rank's list lacks, or faults of the host's NCCL."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import click

_SKIP = re.compile(r"skip:rank=(\d+),unit=(\d+)")
LIBRARY = {
    "version=CODE": r"version=[1-9]\d{0,8}",
    "null_window": "null_window",
    "skip:rank=R,call=N": r"skip:rank=\d+,call=[1-9]\d{0,8}",
    "swap:rank=R,call=N": r"swap:rank=\d+,call=[1-9]\d{0,8}",
    "first_use_hang": "first_use_hang",
    "sm_kernel": "sm_kernel",
    "abort_hang": "abort_hang",
}
"""Faults that `gshost_nccl_stage` knows, with their forms."""


@dataclass(frozen=True)
class Staged:
    """What goes wrong; by default nothing."""

    skip: list[int] | None = None
    """[rank, unit]"""
    library: str = ""

    @staticmethod
    def parse(text: str | None) -> Staged:
        """What `Stage` has accepted; None: nothing."""
        if text is None:
            return Staged()
        found = _SKIP.fullmatch(text)
        return Staged(library=text) if found is None else Staged([int(number) for number in found.groups()])

    def check(self, transport: str, device: str, world_size: int) -> None:
        """A usage error if it would have no effect."""
        if self.library and (transport, device) != ("nccl", "host"):
            raise click.UsageError(f"--stage {self.library}: needs --transport nccl on --device host")
        ranks = [*(self.skip or [])[:1], *map(int, re.findall(r"rank=(\d+)", self.library))]
        for rank in ranks:
            if rank >= world_size:
                raise click.UsageError(f"--stage: there is no rank {rank} among {world_size} ranks")


class Stage(click.ParamType[str]):
    """`skip:rank=1,unit=3`, or what the host's NCCL is to do wrong, several joined by `;`."""

    name = "stage"
    KNOWN = "skip:rank=R,unit=U; with nccl on the host also " + ", ".join(LIBRARY)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text; an unknown stage is a usage error that lists the known ones."""
        items = [] if _SKIP.fullmatch(value) else str(value).split(";")
        for item in items:
            if not any(re.fullmatch(form, item) for form in LIBRARY.values()):
                self.fail(f"{item!r} is not known; known: {self.KNOWN}", param, ctx)
        return str(value)
