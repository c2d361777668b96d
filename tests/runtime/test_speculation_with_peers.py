"""Ranks that speculate together: idle ones, unequal batches, unlike settings, missing and dead ranks.

The last file of its part by name: gathers that stay stuck slow whatever the process closes after them.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import speculative_programs as programs
from ranks import run_on_ranks, try_on_ranks
from speculative_rig import Pair

from graphshard.comm.group import Group
from graphshard.core.errors import CommError, SpecError

SOON_S = 15.0
"""Far less than what a rank would wait for peers; far more than what this machine needs, however loaded."""


# --- idle ranks, unequal batches ---


@pytest.mark.parametrize("run", ["graph", "eager"])
def test_idle_ranks_gather_as_the_others_do(run: str) -> None:
    """A rank is idle for 20 steps, and again in the middle; batches are 1, 7, 16, 0. Nobody asks how large they are."""
    first, *others = run_on_ranks(programs.idle_in_the_middle, 3, "nccl", run, 20)
    assert all(found["trace"] == first["trace"] and found["wrong"] == [] for found in others)
    assert first["wrong"] == [] and len(first["trace"]) == 60 * 3 + 1  # the first draft's gather is issued beside
    assert [found["needs_agreement"] for found in (first, *others)] == [False] * 3
    kinds = [(name, kind) for name, kind, _ in first["trace"][1:4]]
    assert kinds == [("draft", run), ("target", run), ("draft", "outside")]


def test_under_pull_an_idle_rank_does_nothing_and_delays_nobody() -> None:
    first, idle, last = run_on_ranks(programs.idle_in_the_middle, 3, "pull", "graph", 4)
    assert first["wrong"] == idle["wrong"] == last["wrong"] == []
    assert len(idle["trace"]) < len(first["trace"])


@pytest.mark.slow
@pytest.mark.parametrize("run", ["graph", "eager"])
def test_idle_ranks_that_are_processes(run: str) -> None:
    """Started with torchrun's environment, by `comm.launch`."""
    first, *others = run_on_ranks(programs.idle_in_the_middle, 2, "nccl", run, 5, mode="processes")
    assert all(found["trace"] == first["trace"] and found["wrong"] == [] for found in (first, *others))


@pytest.mark.parametrize("run", ["graph", "eager"])
def test_idle_takes_no_memory_and_writes_zeros(run: str) -> None:
    with programs.NoMemory() as memory:
        found = run_on_ranks(programs.idle_without_memory, 2, run, memory)
    expected = {"wrong": [], "left": {"step": 0, "accepted": 0}, "refused": 0, "ops": ["aten.zero_.default"]}
    assert found == [expected] * 2


@pytest.mark.parametrize("run", ["graph", "eager"])
def test_ranks_that_accept_unlike_numbers_gather_alike(run: str) -> None:
    first, second = run_on_ranks(programs.accept_unlike, 2, run)
    assert first["trace"] == second["trace"]
    for found in (first, second):
        assert found["wrong"] == [] and all(found["committed"])


@pytest.mark.parametrize("run", ["graph", "eager"])
def test_ranks_that_end_at_unlike_lengths_idle_until_all_have_ended(transport: str, run: str) -> None:
    found = run_on_ranks(programs.end_at_unlike_lengths, 3, transport, run)
    assert [one["wrong"] for one in found] == [[]] * 3
    if transport == "nccl":
        assert [one["num_turns"] for one in found] == [8] * 3
        assert found[0]["trace"] == found[1]["trace"] == found[2]["trace"]
    else:  # nobody waits for anybody
        assert [one["num_turns"] for one in found] == [3, 5, 8]


def test_a_dummy_that_raises_strands_nobody() -> None:
    """The first error is raised, once all calls of the step have been made."""
    first, second, third = run_on_ranks(programs.idle_badly, 3)
    assert first["told"] == third["told"] == [] and second["told"] == ["draft: a segment's own fault"] * 3
    assert first["trace"] == second["trace"] == third["trace"]
    assert first["wrong"] == second["wrong"] == third["wrong"] == []


# --- agreed sizes ---


def test_where_programs_differ_the_agreed_size_chooses() -> None:
    for found in run_on_ranks(programs.by_agreed_sizes, 2, True):
        assert found["needs"] and found["told"][0] == "" and found["over"]
        assert found["sizes"] == [2, 8, 1, 4]
        assert all(seconds > 0 for seconds in found["seconds"])


def test_where_programs_differ_own_sizes_end_by_name() -> None:
    """Nobody is let past with another rank's bytes."""
    told = [found["told"][0] for found in run_on_ranks(programs.by_agreed_sizes, 2, False)]
    assert all("ranks issue different gathers" in text for text in told)


def agree_by(group: Group, answer: str) -> list[Any]:
    """Sizes by a server's own exchange, which answers as `answer` says."""
    with Pair(group, "nccl") as pair:
        asked: list[int] = []

        def exchange(mine: int) -> Any:
            asked.append(mine)
            sizes = [value for value, _ in group.all_gather(mine, name="a server's own")]
            own = sizes[group.rank]
            return {
                "good": sizes,
                "short": sizes[:1],
                "another's": [own + 1] * len(sizes),
                "text": "12",
                "negative": [own, *[-1] * (len(sizes) - 1)] if group.rank == 0 else [-1, own],
            }[answer]

        mine = 3 + group.rank
        try:
            agreed = pair.spec.agree(mine, exchange)
        except CommError as error:
            return [str(error), asked]
        return [[agreed.batch_size, agreed.is_over, agreed.seconds > 0], asked]


def test_a_servers_own_exchange_is_used() -> None:
    assert run_on_ranks(agree_by, 2, "good") == [[[4, False, True], [3]], [[4, False, True], [4]]]


@pytest.mark.parametrize("answer", ["short", "another's", "text", "negative"])
def test_wrong_answers_of_an_exchange_are_refused(answer: str) -> None:
    for rank, (text, _) in enumerate(run_on_ranks(agree_by, 2, answer)):
        assert re.match(rf"rank {rank}: exchange\({3 + rank}\) returned ", text)


def agree_late(group: Group, transport: str) -> str:
    """Rank 1 does not come to agree."""
    with Pair(group, transport, timeout_s=1.0) as pair:
        told = ""
        if group.rank == 0:
            try:
                told = str(pair.spec.agree(5))
            except CommError as error:
                told = str(error)
        group.barrier("done")
        return told


def step_alone(group: Group) -> list[str]:
    """Rank 1 does not come to a step; rank 0 begins another, in which nothing is due."""
    told = []
    with Pair(group, "nccl", run="eager", timeout_s=1.0) as pair:
        for _ in range(2 if group.rank == 0 else 0):
            with pytest.raises(CommError) as caught:
                pair.step()
            told.append(str(caught.value))
        group.barrier("done", timeout_s=SOON_S)
    return told


def test_a_step_after_one_that_peers_did_not_come_to_says_so() -> None:
    (first, second), _ = run_on_ranks(step_alone, 2)
    assert first == second and "rank 1" in first


def test_agree_is_bounded_and_names_who_did_not_come() -> None:
    text, _ = run_on_ranks(agree_late, 2, "nccl")
    assert "batch size" in text and "rank 1" in text


def test_under_pull_nothing_is_exchanged() -> None:
    text, _ = run_on_ranks(agree_late, 2, "pull")
    assert text == "Agreed(batch_size=5, is_over=False, seconds=0.0)"


def agree_on_nonsense(group: Group) -> None:
    with Pair(group, "nccl") as pair:
        for size in (-1, True, 1.5):
            with pytest.raises(SpecError, match="give a whole number, 0 for a rank without requests"):
                pair.spec.agree(size)


def test_a_size_is_a_whole_number() -> None:
    run_on_ranks(agree_on_nonsense, 2)


# --- unlike settings ---


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("run", "CommError: speculation: ranks differ: run is graph on ranks 0 2, eager on rank 1; give all ranks"),
        ("replays", "CommError: speculation: ranks differ: num_draft_replays is 1 on ranks 0 2, 2 on rank 1; give"),
        ("no draft", "CommError: speculation: ranks differ: draft is draft "),
        ("draft", r"CommError: speculation: ranks differ: line \d+ of sequence cold of step shape 1x1 is '"),
    ],
)
def test_unlike_settings_are_named_on_all_ranks(what: str, text: str) -> None:
    told = run_on_ranks(programs.speculate_unlike, 3, "nccl", what)
    assert len(set(told)) == 1 and re.match(text, told[0]), told[0]


def test_under_pull_ranks_may_run_unlike() -> None:
    assert run_on_ranks(programs.speculate_unlike, 2, "pull", "run") == ["", ""]
    assert run_on_ranks(programs.run_unlike, 3, "pull") == [[]] * 3


# --- ranks that do not come ---


@pytest.mark.parametrize("missing", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_rank_that_makes_no_call_is_named_on_all(missing: int) -> None:
    """By the one error of the communicator at which it was missed; the other communicator is given up, too."""
    found = run_on_ranks(programs.never_call, 3, "nccl", missing, 2.0)
    texts = {one["told"][0] for one in found if f"rank {missing} did not" in one["told"][0]}
    assert len(texts) == 1, [one["told"] for one in found]
    for one in found:
        assert one["wrong"] == [] and f"rank {missing} did not" in one["told"][0]
        assert all("communicator is broken" in text for text in one["refused"])


@pytest.mark.parametrize("what", ["draft", "target"])
def test_a_refused_launch_is_every_ranks_error(what: str) -> None:
    """With the first cause, and at once: nobody waits out a limit, in either communicator."""
    for one in run_on_ranks(programs.refuse_a_launch, 3, "nccl", what):
        assert "rank 1 could not issue" in one["told"][0] and "cuGraphLaunch failed: out of luck" in one["told"][0]
        assert one["told"][1] < SOON_S and one["wrong"] == []
        assert all("rank 1 could not issue" in text for text in one["refused"])


def test_under_pull_a_rank_that_makes_no_call_delays_nobody() -> None:
    for one in run_on_ranks(programs.never_call, 3, "pull", 1, 2.0):
        assert one["told"][0] == "" and one["wrong"] == [] and one["refused"] == ["", ""]


@pytest.mark.slow
@pytest.mark.parametrize("when", ["propose", "verify", "commit"])
def test_a_rank_that_dies_ends_both_communicators(when: str) -> None:
    told = try_on_ranks(programs.die, 3, "nccl", when, mode="processes")
    for outcome in (told[0], told[2]):
        assert outcome.error == "", outcome.error
        assert "died" in outcome.value["told"][0] and "rank 1" in outcome.value["told"][0]
        assert outcome.value["told"][1] < SOON_S and outcome.value["closed_s"] < SOON_S
        assert outcome.value["wrong"] == [] and all("broken" in text for text in outcome.value["refused"])


@pytest.mark.slow
def test_under_pull_a_rank_that_dies_delays_nobody() -> None:
    told = try_on_ranks(programs.die, 3, "pull", "verify", mode="processes")
    for outcome in (told[0], told[2]):
        assert outcome.error == "", outcome.error
        assert outcome.value["told"][0] == "" and outcome.value["refused"] == ["", ""]
