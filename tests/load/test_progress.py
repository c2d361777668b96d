"""A bar where there is a terminal, on rank 0; nothing anywhere else."""

from __future__ import annotations

import io
import sys

import pytest

from graphshard.load.progress import byte_bar, load_bar


class Screen(io.StringIO):
    """Standard error that is a terminal, or not."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.mark.parametrize(("rank", "is_terminal"), [(0, True), (0, False), (1, True)])
def test_a_load_is_shown_on_rank_0s_terminal(monkeypatch: pytest.MonkeyPatch, rank: int, is_terminal: bool) -> None:
    screen = Screen(is_terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with load_bar(rank) as on_load:
        on_load(0, 4_000_000)
        on_load(3_000_000, 4_000_000)
        on_load(4_000_000, 4_000_000)
    shown = screen.getvalue()
    if rank == 0 and is_terminal:
        assert "loading weights" in shown and "4.0/4.0 MB" in shown, shown
    else:
        assert shown == ""


def test_stages_have_totals_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(True)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with byte_bar() as advance:
        advance.begin("reading", None)
        advance.begin("writing", 2000)
        advance.step(500)
        advance.step(1000)
    assert "writing" in screen.getvalue() and "1.5/2.0 kB" in screen.getvalue()
