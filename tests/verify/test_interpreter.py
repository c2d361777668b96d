"""The exact interpreter on lists small enough to know the answer by hand."""

from __future__ import annotations

import pytest

from graphshard.core.errors import ProgramError
from graphshard.core.lowering import Compute, CopyRun, Lowered, LoweredOp, Record, Wait
from graphshard.verify import Outcome, explore

NOTHING = Lowered((), ("compute",), 0, 0)


def run(*ops: LoweredOp, entry: tuple[int | None, ...] = (None,), num_copies: int = 1) -> Outcome:
    """One step of `ops`, and an empty one after it."""
    streams = ("compute", *sorted({op.stream for op in ops} - {"compute"}))
    return explore(Lowered(ops, streams, 9, 0), NOTHING, entry, {}, num_copies)


def copy(unit: int, slot: int = 0, stream: str = "copy", begin: int = 0, end: int = 1) -> CopyRun:
    return CopyRun(unit, slot, begin, end, stream, 0)


def read(unit: int, slot: int = 0, stream: str = "compute") -> Compute:
    return Compute(0, 1, ((unit, slot),), stream, 0)


def record(event: int, stream: str) -> Record:
    return Record(event, stream, 0)


def wait(event: int, stream: str) -> Wait:
    return Wait(event, stream, 0)


def test_a_read_after_its_copy_is_right() -> None:
    outcome = run(copy(0), record(0, "copy"), wait(0, "compute"), read(0))
    assert not outcome.is_harmful
    # before, in and after the copy; in and after the read
    assert outcome.num_states == 5


def test_a_read_beside_its_copy_is_wrong() -> None:
    outcome = run(copy(0), read(0))
    assert outcome.wrong is not None
    assert "reads unit 0 in slot 0, which holds chunks 0 of unit" in outcome.wrong


def test_a_copy_under_a_read_is_wrong_even_if_it_began_later() -> None:
    assert run(read(0), copy(1), entry=(0,)).wrong is not None
    assert run(read(0), copy(0), entry=(0,)).wrong is not None, "also the same unit: its bytes are being written"
    gated = (read(0), record(0, "compute"), wait(0, "copy"), copy(1))
    assert not run(*gated, entry=(0,)).is_harmful


def test_another_unit_is_wrong() -> None:
    assert run(copy(0), record(0, "copy"), wait(0, "compute"), read(1)).wrong is not None
    assert run(read(1), entry=(0,)).wrong is not None
    assert run(read(0, slot=-1), entry=(0,)).wrong is not None, "no slot is not the last slot"


def test_every_chunk_has_to_be_there() -> None:
    half = (copy(0, end=1), record(0, "copy"), wait(0, "compute"), read(0))
    assert run(*half, num_copies=2).wrong is not None
    whole = (copy(0, end=1), copy(0, begin=1, end=2), record(0, "copy"), wait(0, "compute"), read(0))
    assert not run(*whole, num_copies=2).is_harmful
    overwritten = (copy(0, end=1), copy(1, begin=1, end=2), record(0, "copy"), wait(0, "compute"), read(0))
    assert run(*overwritten, num_copies=2).wrong is not None


def test_two_copies_at_once_spoil_each_other() -> None:
    both = (
        copy(0, stream="copy"),
        copy(1, stream="copy1"),
        record(0, "copy"),
        record(1, "copy1"),
        wait(0, "compute"),
        wait(1, "compute"),
    )
    assert run(*both, read(0)).wrong is not None
    assert run(*both, read(1)).wrong is not None
    assert not run(*both).is_harmful, "nobody reads"
    apart = (copy(0, end=1), copy(0, stream="copy1", begin=1, end=2), *both[2:])
    assert not run(*apart, read(0), num_copies=2).is_harmful, "two chunks of one unit"


def test_a_wait_without_a_record_before_it_never_ends() -> None:
    outcome = run(wait(0, "compute"), record(0, "copy"))
    assert outcome.deadlock is not None
    assert "waits for event 0" in outcome.deadlock


def test_the_next_step_follows_on_compute_alone() -> None:
    unjoined = Lowered((copy(0),), ("compute", "copy"), 1, 0)
    reader = Lowered((read(0),), ("compute",), 1, 0)
    joined = Lowered((copy(0), record(0, "copy"), wait(0, "compute")), ("compute", "copy"), 1, 0)
    assert explore(unjoined, reader, (None,), {}, 1).wrong is not None
    assert not explore(joined, reader, (None,), {}, 1).is_harmful
    unforked = Lowered((copy(1),), ("compute", "copy"), 1, 0)
    assert explore(reader, unforked, (0,), {}, 1).wrong is not None


def test_the_host_fills_slots_between_steps() -> None:
    reader = Lowered((read(0),), ("compute",), 1, 0)
    assert explore(NOTHING, reader, (None,), {}, 1).wrong is not None
    assert not explore(NOTHING, reader, (None,), {0: 0}, 1).is_harmful
    assert explore(NOTHING, reader, (0,), {0: 1}, 1).wrong is not None


def test_an_answer_is_exact_or_refused() -> None:
    ops = [op for at in range(6) for op in (copy(0, slot=at, stream=f"copy{at}"),)]
    with pytest.raises(ProgramError, match="more than 100"):
        explore(Lowered(tuple(ops), ("compute",), 1, 0), NOTHING, (None,) * 6, {}, 1, max_states=100)
