"""Ranks that gather together and do not act alike: one named error on every rank, in time; under pull, nothing.

What each rank does is in lockstep_programs.py.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lockstep_programs as programs
import pytest
from byte_model import ByteModel
from ranks import MODES, Outcome, run_on_ranks, try_on_ranks

import graphshard
from graphshard.comm.group import Group
from graphshard.comm.nccl_library import find_library
from graphshard.device import open_device

LIMIT_S = programs.LIMIT_S
SOON_S = 15.0
"""Far less than what a rank would wait for peers; far more than what this machine needs, however loaded."""


def one_text(told: list[list[Any]]) -> str:
    """The one error that all ranks raised."""
    texts = {found[0] for found in told}
    assert len(texts) == 1, texts
    return str(texts.pop())


@pytest.mark.parametrize(("skipping", "run"), [(0, "eager"), (2, "graph")])
def test_a_rank_that_does_not_come_is_named_on_all(skipping: int, run: str) -> None:
    """What is asked of a broken communicator afterwards is refused with the first reason."""
    told = run_on_ranks(programs.skip_a_step, 3, skipping, run, False, "nccl")
    text = one_text(told)
    here = " ".join(str(rank) for rank in range(3) if rank != skipping)
    assert re.fullmatch(
        rf"rank \d waited {LIMIT_S:.1f} s for step 3 of shape 1x1 \({run}\): ranks {here} came to it, rank {skipping} "
        r"did not; it last finished op 12 of step 2",
        text,
    )
    for _, _, refused, wrong, _ in told:
        assert wrong == []
        for what, line in zip((r"step \d", "a capture", "a prefetch"), refused, strict=True):
            assert re.match(rf"{what} is refused: rank \d's communicator is broken \(", line)
            assert text in line


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_with_progress_the_unit_is_named_too(mode: str) -> None:
    """However ranks were started."""
    told = run_on_ranks(programs.skip_a_step, 3, 1, "graph", True, "nccl", mode=mode)
    assert re.fullmatch(
        rf"rank [02] waited {LIMIT_S:.1f} s for unit 0 \(op 0, step 3\): chunks of ranks 0 2 arrived, rank 1's did "
        "not; it last finished op 12 of step 2",
        one_text(told),
    )


def test_under_pull_a_rank_that_does_not_come_delays_nobody() -> None:
    told = run_on_ranks(programs.skip_a_step, 3, 1, "graph", False, "pull")
    assert all(found[0] == "" and found[2] == ["", "", ""] and found[3] == [] for found in told)


def test_ranks_that_stop_earlier_end_the_others_by_name() -> None:
    """Before the limit, as rank 0's control page says that it closed; another communicator is not concerned."""
    (_, *others) = run_on_ranks(programs.stop_earlier, 3, "nccl")
    for text, seconds, wrong in others:
        assert re.match(r"rank 0 \(pid \d+\) closed its runtime while rank \d waited for step 4 of shape 1x1", text)
        assert text.endswith("; it last finished op 12 of step 3")
        assert seconds < SOON_S and wrong == []


def test_under_pull_ranks_may_stop_when_they_like() -> None:
    assert [found[0] for found in run_on_ranks(programs.stop_earlier, 3, "pull")] == [""] * 3


def test_graphs_of_unlike_step_shapes_gather_alike() -> None:
    """Which graph a rank picks is its own affair."""
    assert run_on_ranks(programs.mix_shapes, 3) == [[[], 1]] * 3


def test_eager_beside_captured_is_named_at_once() -> None:
    """Rank 0 replays, the others run eagerly."""
    told = run_on_ranks(programs.mix_runs, 3, "nccl")
    text = one_text(told)
    assert "ranks issue different gathers: at step 2 of shape 1x1" in text
    assert "gathers 3 units, 0 first, in an eager step" in text
    assert "gathers 3 units, 0 first, in a captured step" in text
    assert all(seconds < SOON_S for _, seconds in told)
    assert [found[0] for found in run_on_ranks(programs.mix_runs, 3, "pull")] == [""] * 3


def test_another_unit_of_equal_size_is_named() -> None:
    """Sizes agree, and bytes would be wrong without a word."""
    told = run_on_ranks(programs.gather_another, 3, "nccl")
    text = one_text(told)
    assert "gathers 1 unit, 1 first, outside a step" in text and "gathers 1 unit, 0 first, outside a step" in text
    assert all(seconds < SOON_S for _, seconds in told)
    assert [found[0] for found in run_on_ranks(programs.gather_another, 3, "pull")] == [""] * 3


def test_two_communicators_in_turn() -> None:
    """Target and draft, in one order on all ranks."""
    for told, wrong, _, must_exit in run_on_ranks(programs.swap_runtimes, 2, False):
        assert [text for text, _ in told] == ["", ""] and wrong == [] and must_exit == [None, None]


def test_two_communicators_in_opposite_orders_end_by_name_and_both_close() -> None:
    """Each communicator has its error; both are aborted, and closing is bounded."""
    everything = run_on_ranks(programs.swap_runtimes, 3, True)
    texts = {"target": set(), "draft": set()}
    for rank, (told, wrong, closed_s, _) in enumerate(everything):
        assert wrong == [] and closed_s < SOON_S
        for name, (text, _) in zip(("draft", "target") if rank == 1 else ("target", "draft"), told, strict=True):
            texts[name].add(text)
    # who gives up first goes on to the other step, which may come just in time for those that wait there, or just not,
    # or in time for some of them
    targets, drafts = texts["target"] - {""}, texts["draft"] - {""}
    assert len(targets) <= 1 and len(drafts) <= 1 and targets | drafts, texts
    just_not = "all ranks came to it, and it did not end"
    assert all("ranks 0 2 came to it, rank 1 did not" in text or just_not in text for text in targets), texts
    assert all(re.search(r" came to it, ranks? [02 ]+ did not; ", text) or just_not in text for text in drafts), texts


def test_replays_from_two_threads_do_not_meet() -> None:
    """Both threads of a rank replay one graph."""
    assert run_on_ranks(programs.step_on_two_threads, 2) == [[[], 40]] * 2


def test_a_replay_that_stands_still_is_seen() -> None:
    """Compute of rank 1 holds its next gather up; new captures are refused."""
    told = run_on_ranks(programs.stall_inside, 3, "nccl")
    text = one_text(told)
    assert re.search(r"chunks of ranks 0 2 arrived, rank 1's did not|rank 1 waited .* this rank itself is behind", text)
    for _, _, refused, wrong in told:
        assert refused.startswith("a capture is refused") and text in refused and wrong == []


def test_under_pull_a_replay_that_stands_still_is_its_own_affair() -> None:
    first, second, third = run_on_ranks(programs.stall_inside, 3, "pull")
    assert "rank 1 waited" in second[0]
    assert first[0] == third[0] == ""


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_process_that_ends_or_stops_is_named(how: str) -> None:
    """A dead peer before the limit, a stopped one at it; no process is left."""
    first, second, third = try_on_ranks(programs.end_in_a_step, 3, how, "nccl", mode="processes")
    assert second.error_type == "" and "SIGKILL" in second.error
    text = one_text([first.value, third.value])
    if how == "SIGKILL":
        assert re.match(
            r"rank 1 \(pid \d+\) died while rank [02] waited for step 3 of shape 1x1 \(graph\); it last", text
        )
    else:
        assert "ranks 0 2 came to it, rank 1 did not; it is stopped, it last finished op 12 of step 2" in text
    assert max(first.value[1], third.value[1]) < SOON_S


def test_under_pull_a_process_that_ends_disturbs_nobody() -> None:
    first, _, third = try_on_ranks(programs.end_in_a_step, 3, "SIGKILL", "pull", mode="processes")
    assert first.value[0] == third.value[0] == ""


def test_a_rank_that_closes_is_named() -> None:
    told = run_on_ranks(programs.end_in_a_step, 3, "close", "nccl", mode="threads")
    assert re.match(
        r"rank 1 \(pid \d+\) closed its runtime while rank \d waited for step 3", one_text([told[0], told[2]])
    )


def test_a_launch_that_is_refused_is_told_to_all() -> None:
    """The first cause, not a timeout."""
    told = run_on_ranks(programs.refuse_a_launch, 3, "nccl")
    assert one_text(told) == "rank 1 could not issue a step of shape 1x1: cuGraphLaunch failed: out of luck"
    assert all(seconds < SOON_S for _, seconds in told)
    alone = run_on_ranks(programs.refuse_a_launch, 3, "pull")
    assert [found[0] for found in alone] == ["", "cuGraphLaunch failed: out of luck", ""]


# --- what the library does ---


@contextmanager
def staged(spec: str) -> Iterator[None]:
    """A fault of the host NCCL, for ranks that are threads of this process."""
    library = ctypes.CDLL(str(find_library(open_device("host"))))
    assert library.gshost_nccl_stage(spec.encode()) == 0, spec
    try:
        yield
    finally:
        assert library.gshost_nccl_stage(b"") == 0


def compile_and_close(group: Group) -> None:
    programs.compiled(group, ByteModel(programs.LAYERS)).close()


def errors(outcomes: list[Outcome]) -> set[tuple[str, str]]:
    return {(outcome.error_type, outcome.error) for outcome in outcomes}


def test_a_null_window_fails_at_registration_on_all() -> None:
    """Success with a null window means that symmetric support is missing."""
    with staged("null_window"):
        ((kind, text),) = errors(try_on_ranks(compile_and_close, 2))
    assert kind == "CommError"
    assert re.match(
        r"window of the shards failed on rank 0 \(and on rank 1\): rank 0 could not register the window", text
    )
    assert "symmetric support is missing" in text


def test_a_library_that_is_too_old_is_refused_on_all() -> None:
    """The version is the loaded library's own; the error names its file and the version that is needed."""
    with staged("version=22602"):
        ((kind, text),) = errors(try_on_ranks(compile_and_close, 2))
    assert kind == "CommError"
    assert re.search(r"transport nccl is not available: libnccl 2\.26\.2 \(from .*libgraphshard_hostnccl\.so\)", text)
    assert text.endswith("symmetric windows need 2.28.3; available here: pull")


def test_a_first_gather_that_never_ends_is_named_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate has switched multicast off; where that does not help, the warm-up is bounded."""
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")  # so that it is put back
    monkeypatch.delenv("NCCL_NVLS_ENABLE")
    with staged("version=22809;first_use_hang"):
        ((kind, text),) = errors(try_on_ranks(compile_and_close, 2))
    assert kind == "CommError"
    assert re.search(rf"rank 0 waited {LIMIT_S:.1f} s for gather 1 of 2 that warm graphshard weights world up", text)


def test_graphshard_says_which_transport_a_name_is() -> None:
    with pytest.raises(graphshard.SpecError, match="unknown transport 'mpi'; known are pull, nccl"):
        graphshard.make_plan(ByteModel([[10]]).spec(), 2, open_device("host").spec(), transport="mpi")
