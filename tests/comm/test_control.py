"""Control pages: who lives and how far it is, also when it can no longer say so."""

from __future__ import annotations

import pytest
from census import no_growth
from control_programs import bring_another_layout, read_the_page_of_a_dead_rank, report_progress
from ranks import MODES, run_on_ranks, try_on_ranks


@pytest.mark.parametrize("mode", MODES)
def test_peers_see_state_and_progress(mode: str) -> None:
    with no_growth():
        for seen in run_on_ranks(report_progress, 3, mode=mode):
            words = ["it has finished no step", "it last finished op 27 of step 417"]
            assert seen == [["live"] * 3, *words, 6, "closed", []]


def test_a_dead_ranks_page_stays() -> None:
    outcomes = try_on_ranks(read_the_page_of_a_dead_rank, 3, mode="processes", group_timeout_s=600.0, timeout_s=30.0)
    state, dead, text = outcomes[0].value
    assert (state, dead) == ("dead", [1])
    assert ") is dead, it last finished op 9 of step 3; rank 2 (pid " in text


@pytest.mark.parametrize("mode", MODES)
def test_unlike_layouts_are_named(mode: str) -> None:
    for outcome in try_on_ranks(bring_another_layout, 2, mode=mode):
        assert "layouts differ: rank 0 has digest 000000000000, rank 1 010101010101" in outcome.error
