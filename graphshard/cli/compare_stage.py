"""What `graphshard compare --stage` has go wrong: a gather that one rank's list lacks, or faults of the host's NCCL."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from graphshard.core.counts import counted

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
FIRST_USE_FIXED = 2_31_02
"""The version from which on two ranks' first gather ends."""


COMM_ERRORS = ("CommError", "NcclError")


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

    @property
    def names(self) -> list[str]:
        """The library's faults by name, in the order in which they were given."""
        return [re.split("[:=]", item)[0] for item in self.library.split(";") if item]

    def never_met(self, folder: Path, world_size: int) -> list[str]:
        """Faults that no rank has met; none if a rank has left nothing in `folder`: it was ended, and could not say."""
        left = _left(folder)
        if len(left) < world_size:
            return []
        met = {name for one in left for name in one["met"]}
        return [name for name in self.names if name not in met]

    def may_explain(self, folder: Path) -> bool:
        """Whether the library's faults may have made ranks fail: none failed by anything but communication."""
        return bool(self.library) and all(one["error_type"] in ("", *COMM_ERRORS) for one in _left(folder))

    def check(self, transport: str, device: str, world_size: int) -> None:
        """A usage error if it would have no effect."""
        if self.library and (transport, device) != ("nccl", "host"):
            raise click.UsageError(f"--stage {self.library}: needs --transport nccl on --device host")
        ranks = [*(self.skip or [])[:1], *map(int, re.findall(r"rank=(\d+)", self.library))]
        for rank in ranks:
            if rank >= world_size:
                raise click.UsageError(f"--stage: there is no rank {rank} among {counted(world_size, 'rank')}")
        self._check_conditions(world_size)

    def _check_conditions(self, world_size: int) -> None:
        """A usage error if a fault of the library would wait in vain for another, or for another version."""
        names = self.names
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise click.UsageError(f"--stage: {twice[0]} is given twice, and the library knows one")
        if names and set(names) <= {"abort_hang", "version"} and "abort_hang" in names:
            raise click.UsageError("--stage abort_hang: nothing is aborted unless another fault is joined to it by ';'")
        if "first_use_hang" not in names:
            return
        versions = re.findall(r"version=(\d+)", self.library)
        if world_size != 2 or not versions or int(versions[0]) >= FIRST_USE_FIXED:
            raise click.UsageError(
                "--stage first_use_hang: happens to 2 ranks, and before NCCL 2.31.2: use --world-size 2 and "
                "--stage 'version=23101;first_use_hang'"
            )


def _left(folder: Path) -> list[dict[str, Any]]:
    """What ranks have left in `folder`: the faults that they met, and the class of their error."""
    return [json.loads(file.read_text()) for file in folder.iterdir()]


class Stage(click.ParamType[str]):
    """`skip:rank=1,unit=3`, or what the host's NCCL is to do wrong, several joined by `;`."""

    name = "stage"
    KNOWN = "skip:rank=R,unit=U; with nccl on the host also " + ", ".join(LIBRARY)
    HELP = (
        f"What goes wrong: {KNOWN}. Of these several may be joined by ';' (quote them): first_use_hang needs 2 ranks "
        "and a version before 2.31.2, as in 'version=23101;first_use_hang'; abort_hang needs a fault after which "
        "there is something to abort, as in 'skip:rank=1,call=16;abort_hang'. Calls are counted from 1 on each rank, "
        "with those that warm up, check and capture. A fault that no call has met is said, and is exit code 1."
    )

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text; an unknown stage is a usage error that lists the known ones."""
        items = [] if _SKIP.fullmatch(value) else str(value).split(";")
        for item in items:
            if not any(re.fullmatch(form, item) for form in LIBRARY.values()):
                self.fail(f"{item!r} is not known; known: {self.KNOWN}", param, ctx)
        return str(value)
