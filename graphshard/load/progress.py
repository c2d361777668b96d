"""Progress bars over bytes, on standard error where that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Advance:
    """A progress bar's three verbs; does nothing by itself."""

    def begin(self, what: str, total: int | None) -> None:
        """Start the next stage, of `total` bytes if known."""

    def step(self, num_bytes: int) -> None:
        """Another `num_bytes` are done."""

    def reach(self, num_bytes: int) -> None:
        """`num_bytes` of the stage are done in all."""


@contextmanager
def byte_bar(show: bool = True) -> Iterator[Advance]:
    """A bar that is gone when the block ends; none with `show` false, or where standard error is no terminal."""
    if not (show and sys.stderr.isatty()):
        yield Advance()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        class Bar(Advance):
            def begin(self, what: str, total: int | None) -> None:
                bar.update(task, description=what, total=total, completed=0)

            def step(self, num_bytes: int) -> None:
                bar.update(task, advance=num_bytes)

            def reach(self, num_bytes: int) -> None:
                bar.update(task, completed=num_bytes)

        yield Bar()


@contextmanager
def load_bar(rank: int) -> Iterator[Callable[[int, int], None]]:
    """What to hand to `compile(on_load=...)`: on rank 0 a bar of the bytes that it loads."""
    with byte_bar(show=rank == 0) as advance:
        begun = False

        def on_load(done: int, total: int) -> None:
            nonlocal begun
            if not begun:
                advance.begin("loading weights", total)
                begun = True
            advance.reach(done)

        yield on_load
