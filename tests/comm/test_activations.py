"""Tokens and partial sums between ranks under pull: flags and copies, with latches instead of luck."""

from __future__ import annotations

import pytest
from activation_programs import HOW, hold_copies, lose_a_rank, miss_a_rank, run_rounds, unlike_lists
from census import no_growth
from ranks import MODES, run_on_ranks, try_on_ranks

from graphshard._core import DriverError, FlagBarrier, Memory, OpList, Stream
from graphshard.device import open_device


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_blocks_are_exact(world_size: int, mode: str, how: str) -> None:
    assert run_on_ranks(run_rounds, world_size, 30, how, 1, mode=mode) == ["right"] * world_size


@pytest.mark.parametrize(
    ("world_size", "mode", "num_rounds"),
    [
        (3, "threads", 400),
        (3, "processes", 400),
        *(pytest.param(world_size, mode, 5000, marks=pytest.mark.slow) for world_size in (2, 3, 4) for mode in MODES),
    ],
)
def test_ranks_mix_eager_and_captured_rounds(world_size: int, mode: str, num_rounds: int) -> None:
    assert run_on_ranks(run_rounds, world_size, num_rounds, "mixed", 2, mode=mode) == ["right"] * world_size


def test_tokens_are_written_again_only_when_all_have_copied_them() -> None:
    """Rank 1 has not copied tokens: nobody passes the exit, so nobody's next prepare has run."""
    seen = run_on_ranks(hold_copies, 3, "entered")
    assert [counts[:3] for counts in seen] == [[1, 1, 0], [1, 0, 0], [1, 1, 0]]
    assert all(counts[3:] == [0, 0, 0] for counts in seen)


def test_partial_sums_are_written_again_only_when_all_have_copied_them() -> None:
    """Rank 1 has not copied partial sums: others prepare the next block, and nobody computes it."""
    seen = run_on_ranks(hold_copies, 3, "left")
    assert [counts[:3] for counts in seen] == [[1, 1, 1], [1, 1, 0], [1, 1, 1]]
    assert [counts[3:] for counts in seen] == [[1, 0, 0], [0, 0, 0], [1, 0, 0]]


@pytest.mark.parametrize("how", HOW)
def test_a_rank_that_does_not_come(how: str) -> None:
    run_on_ranks(run_rounds, 2, 1, "eager", 1)  # the driver, opened once, stays
    with no_growth():
        assert run_on_ranks(miss_a_rank, 3, how) == ["ended"] * 3


def test_unlike_lists_stop_before_a_byte_is_moved() -> None:
    assert run_on_ranks(unlike_lists, 3) == ["stopped"] * 3


def test_a_killed_rank() -> None:
    with no_growth():
        outcomes = try_on_ranks(lose_a_rank, 3, mode="processes")
    assert [outcome.error for outcome in outcomes] == ["", "was killed by SIGKILL", ""]
    assert [outcomes[0].value, outcomes[2].value] == ["ended", "ended"]


def test_batches_of_values_are_checked() -> None:
    device = open_device()
    stream, word = Stream(device.driver), Memory.allocate_host(device.driver, 8)

    def refused(batch: object) -> str:
        with pytest.raises((ValueError, DriverError)) as caught:
            OpList(device.driver, [stream], 0, [("values", 0, batch)])
        return str(caught.value)

    assert "a batch of 0 values: 1 to 256" in refused([])
    assert "a batch of 257 values" in refused([("write", word.address, 1)] * 257)
    assert "write, wait or wait_equal, not look" in refused([("look", word.address, 1)])
    assert "cuStreamBatchMemOp refused" in refused([("write", word.address + 8, 1)])
    assert "op 0 is not of any known form" in refused([("write", "here", 1)])


def test_the_protocol_as_data() -> None:
    """Two ranks: rank 0 writes to rank 1's area, and waits for and resets words of its own."""
    barrier = FlagBarrier([0x1000, 0x2000], 0)
    writes, waits = barrier.entry(9)
    assert ("write", barrier.address(1, 0, "header"), 9) in writes and writes[-1] == (
        "write",
        barrier.address(1, 0, "entry"),
        1,
    )
    assert waits[:2] == [
        ("wait_equal", barrier.address(0, 1, "entry"), 1),
        ("wait_equal", barrier.address(0, 1, "header"), 9),
    ]
    assert ("write", barrier.address(0, 1, "entry"), 0) in waits
    writes, waits = barrier.exit()
    assert writes == [("write", barrier.address(1, 0, "exit"), 1)]
    assert waits[0] == ("wait_equal", barrier.address(0, 1, "exit"), 1)
    assert FlagBarrier.area_bytes(4) == 256
    with pytest.raises(ValueError, match="flag word 'door' is unknown"):
        barrier.address(0, 1, "door")
    with pytest.raises(ValueError, match="no such rank"):
        barrier.address(2, 0, "exit")
