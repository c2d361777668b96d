"""One decision of all ranks: the first counts, all see the same, whoever is late, gone, or of another mind."""

from __future__ import annotations

import itertools
import threading

import pytest
from ranks import run_on_ranks

from graphshard.comm.group import Group
from graphshard.comm.verdict import Verdict
from graphshard.core.errors import CommError, DeviceError, GraphshardError, LoadError, ProgramError, SpecError

KINDS = (SpecError, ProgramError, DeviceError, CommError, LoadError)


def settled_in_order(group: Group, order: list[int], against: list[int]) -> list[list[str]]:
    """Ranks decide one after the other, `order` first; those in `against` would not go on."""
    verdict, other = Verdict.exchange(group, ["to go on", "nothing"])
    said = []
    for rank in order:
        if rank == group.rank:
            failure = KINDS[rank](f"rank {rank} would not") if rank in against else None
            found = verdict.settle(failure)
            said = ["go" if found is None else type(found).__name__, str(found)]
        group.barrier()
    assert other.settle(None) is None, "decisions do not touch each other"
    return [said]


@pytest.mark.parametrize("against", [[], [0], [1], [2], [0, 2], [0, 1, 2]])
def test_the_first_has_decided_for_all(against: list[int]) -> None:
    for order in itertools.permutations(range(3)):
        first = order[0]
        expected = [KINDS[first].__name__, f"rank {first} would not"] if first in against else ["go", "None"]
        assert run_on_ranks(settled_in_order, 3, list(order), against) == [[expected]] * 3


def settled_at_once(group: Group, num_rounds: int, starts: threading.Barrier) -> list[str]:
    found = []
    for number in range(num_rounds):
        (verdict,) = Verdict.exchange(group, ["to go on"])
        failure = CommError(f"rank {group.rank} in round {number}") if (number + group.rank) % 2 else None
        starts.wait(60.0)
        found.append(str(verdict.settle(failure)))
    return found


def test_ranks_that_decide_at_once_agree() -> None:
    found = run_on_ranks(settled_at_once, 4, 50, threading.Barrier(4))
    assert all(one == found[0] for one in found)


def asked_again(group: Group) -> list[str]:
    (verdict,) = Verdict.exchange(group, ["to go on"])
    first = verdict.settle(LoadError("x" * 5000) if group.rank == 1 else None) if group.rank == 1 else None
    group.barrier()
    again: list[GraphshardError | None] = [verdict.settle(None), verdict.settle(DeviceError("too late"))]
    assert group.rank == 0 or isinstance(first, LoadError)
    return [f"{type(one).__name__} {str(one)[:5]}" for one in again]


@pytest.mark.parametrize("mode", ["threads", pytest.param("processes", marks=pytest.mark.slow)])
def test_a_decision_stays(mode: str) -> None:
    """Also against a rank that changes its mind; a long reason is cut."""
    assert run_on_ranks(asked_again, 2, mode=mode) == [["LoadError xxxxx"] * 2] * 2
