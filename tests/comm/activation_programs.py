"""What the ranks of the activation tests do: blocks of whole numbers, whose sums are exact."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from graphshard._core import Calls, Memory, OpList, Stream, Word
from graphshard.comm.activations import STAGING, ActPlace, PullActivations
from graphshard.comm.group import Group
from graphshard.core.lowering import act_ops
from graphshard.core.ops import ActGather, ReduceScatter
from graphshard.device import open_device

TOKENS, WIDTH_IN, WIDTH_OUT = 3, 8, 5
"""Of one rank, and numbers a token."""
STAGES = ("prepare", "entered", "compute", "left", "sum")
"""Before which of a block's pieces a latch may hold the stream: own tokens, copies of them, partial, copies, sum."""
TIMEOUT_S = 30.0


@dataclass
class BlockRank:
    """One rank's memory, stream and list of blocks. The compute of a block says what it saw that was wrong."""

    group: Group
    num_blocks: int
    round: int = 0
    counts: list[int] = field(default_factory=list)
    """How often each piece of the latest round has run, by block and piece (prepare, compute, sum)."""
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        ranks, rank = self.group.world_size, self.group.rank
        self.device = open_device()
        sizes = [TOKENS * WIDTH_IN, ranks * TOKENS * WIDTH_OUT]
        self.staging = self.device.allocate(8 * sum(sizes), exportable=True)
        self.private = self.device.allocate(8 * ranks * TOKENS * (WIDTH_IN + WIDTH_OUT))
        self.tokens, self.partial = _arrays(self.staging, (TOKENS, WIDTH_IN), (ranks, TOKENS, WIDTH_OUT))
        self.gathered, self.received = _arrays(self.private, (ranks, TOKENS, WIDTH_IN), (ranks, TOKENS, WIDTH_OUT))
        self.place = ActPlace(
            tokens=self.tokens.ctypes.data,
            gathered=self.gathered.ctypes.data,
            partial=self.partial.ctypes.data,
            received=self.received.ctypes.data,
            summed=0,
            token_bytes=self.tokens.nbytes,
            partial_bytes=self.partial[rank].nbytes,
            num_elements=self.partial[rank].size,
            dtype="int64",
            header=7,
        )
        self.activations = PullActivations(self.device, self.group, self.staging)
        self.stream = Stream(self.device.driver)
        self.activations.watch(self.stream.is_idle)
        self.done = Word(Memory.allocate_host(self.device.driver, 4))
        self.latches = {
            (block, stage): Word(Memory.allocate_host(self.device.driver, 4))
            for block in range(self.num_blocks)
            for stage in STAGES
        }
        self.list, self.calls = self._list(self.place)
        self.graphs = [self.list.capture(self.calls, (), TIMEOUT_S).instantiate(name) for name in GRAPH_MODES]

    def _list(self, place: ActPlace) -> tuple[OpList, Calls]:
        ops: list[tuple[object, ...]] = []
        functions: list[Callable[[], None]] = []
        for block in range(self.num_blocks):
            enter = act_ops(ActGather(block), 0, is_collective=False)
            leave = act_ops(ReduceScatter(block), 0, is_collective=False)
            flags_in = [one for op in enter[:2] for one in self.activations.ops(op, place, 0)]
            flags_out = [one for op in leave[:2] for one in self.activations.ops(op, place, 0)]
            pieces: list[list[tuple[object, ...]]] = [
                [("call", 0, len(functions)), *flags_in],
                self.activations.ops(enter[2], place, 0),
                [("call", 0, len(functions) + 1), *flags_out],
                self.activations.ops(leave[2], place, 0),
                [("call", 0, len(functions) + 2)],
            ]
            for stage, piece in zip(STAGES, pieces, strict=True):
                ops += [("wait_value", 0, self.latches[block, stage].address, 1), *piece]
            functions += [self._prepare(block), self._compute(block), self._sum(block)]
        ops.append(("write_value", 0, self.done.address, 1))
        return OpList(self.device.driver, [self.stream], 0, ops), Calls(functions)

    # --- the numbers ---

    def _token(self, rank: int, block: int) -> np.ndarray:
        places = np.arange(TOKENS * WIDTH_IN, dtype=np.int64).reshape(TOKENS, WIDTH_IN)
        return np.asarray(((self.round * 31 + block) * 17 + rank) * 1000 + places)

    def _part(self, rank: int, gathered: np.ndarray) -> np.ndarray:
        return np.asarray(gathered[..., :WIDTH_OUT] * (rank + 1) + gathered.sum(axis=-1, keepdims=True))

    def _expected(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        ranks = range(self.group.world_size)
        gathered = np.stack([self._token(rank, block) for rank in ranks])
        return gathered, np.stack([self._part(rank, gathered[self.group.rank]) for rank in ranks])

    def _prepare(self, block: int) -> Callable[[], None]:
        def run() -> None:
            self.counts[3 * block] += 1
            self.tokens[:] = self._token(self.group.rank, block)

        return run

    def _compute(self, block: int) -> Callable[[], None]:
        def run() -> None:
            self.counts[3 * block + 1] += 1
            if not np.array_equal(self.gathered, self._expected(block)[0]):
                self.wrong.append(f"round {self.round}, block {block}: other tokens were gathered")
            self.partial[:] = self._part(self.group.rank, self.gathered)
            self.gathered[:] = -1

        return run

    def _sum(self, block: int) -> Callable[[], None]:
        def run() -> None:
            self.counts[3 * block + 2] += 1
            if not np.array_equal(self.received, self._expected(block)[1]):
                self.wrong.append(f"round {self.round}, block {block}: other partial sums were copied")
            self.received[:] = -1

        return run

    # --- rounds ---

    def begin(self, how: str, closed: Sequence[tuple[int, str]] = ()) -> None:
        """Enqueue a round, eagerly or by one of the graphs, with the latches in `closed` closed."""
        self.round += 1
        self.counts = [0] * (3 * self.num_blocks)
        for key, latch in self.latches.items():
            latch.store(0 if key in closed else 1)
        self.done.store(0)
        if how == "eager":
            self.list.issue(self.calls)
        else:
            self.graphs[GRAPH_MODES.index(how)].launch(self.stream)

    def end(self) -> None:
        """Wait for the round."""
        assert self.done.wait(1, TIMEOUT_S), f"rank {self.group.rank}: round {self.round} did not end"
        self.calls.check()
        assert not self.wrong, self.wrong[:3]

    def close(self) -> None:
        self.graphs.clear()
        del self.list, self.calls  # whose functions own this rank: gc does not see that
        self.activations.close()


GRAPH_MODES = ("cooperative", "threaded")
HOW = ("eager", *GRAPH_MODES)


def _arrays(memory: Memory, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    found, begin = [], 0
    for shape in shapes:
        end = begin + 8 * int(np.prod(shape))
        found.append(np.frombuffer(memoryview(memory)[begin:end], dtype=np.int64).reshape(shape))
        begin = end
    return found


def run_rounds(group: Group, num_rounds: int, how: str, seed: int) -> str:
    """`how`: one way for all rounds, or `mixed`: each rank picks anew each round; latches hold streams at random."""
    rank = BlockRank(group, 3)
    rng = random.Random(seed * 100 + group.rank)
    for _ in range(num_rounds):
        closed = [key for key in rank.latches if rng.random() < 0.15]
        rank.begin(rng.choice(HOW) if how == "mixed" else how, closed)
        rng.shuffle(closed)
        for key in closed:
            if rng.random() < 0.3:
                os.sched_yield()
            rank.latches[key].store(1)
        rank.end()
    assert rank.activations.num_registrations == 2
    group.barrier()
    rank.close()
    return "right"


def hold_copies(group: Group, stage: str) -> list[int]:
    """Rank 1 stands before `stage` of block 0 until all others stand still: how far did each come?

    Returns counts of (prepare, compute, sum) of both blocks, as they were while rank 1 stood.
    """
    rank = BlockRank(group, 2)
    rank.begin("eager", [(0, stage)] if group.rank == 1 else [])
    if group.rank != 1:
        last = 3 * 1 + 0 if stage == "left" else 1  # the furthest piece that others can come to
        deadline = time.monotonic() + TIMEOUT_S
        while not rank.counts[last]:
            assert time.monotonic() < deadline, rank.counts
            os.sched_yield()
    group.barrier()
    assert not rank.done.value
    seen = list(rank.counts)
    group.barrier()
    rank.latches[0, stage].store(1)
    rank.end()
    group.barrier()
    rank.close()
    return seen


def miss_a_rank(group: Group, how: str) -> str:
    """The last rank does not come: others give up, and their streams come to an end."""
    rank = BlockRank(group, 2)
    if group.rank != group.world_size - 1:
        rank.begin(how)
        assert not rank.done.wait(1, 0.2)
        assert not rank.stream.is_idle()
        rank.activations.break_off()
        rank.activations.break_off()  # once is enough, and twice no harm
        assert rank.stream.synchronize(TIMEOUT_S), "what waited was not let go"
    group.barrier()
    rank.close()
    return "ended"


def unlike_lists(group: Group) -> str:
    """Rank 0 runs another list: nobody's bytes are moved."""
    rank = BlockRank(group, 1)
    if group.rank == 0:
        rank.list, rank.calls = rank._list(replace(rank.place, header=8))
    rank.gathered[:] = -5
    rank.begin("eager")
    assert not rank.done.wait(1, 0.2)
    group.barrier()
    assert (rank.gathered == -5).all(), "bytes were moved"
    rank.activations.break_off()
    assert rank.stream.synchronize(TIMEOUT_S)
    group.barrier()
    rank.close()
    return "stopped"


def lose_a_rank(group: Group) -> str:
    """Rank 1 is killed before a block: its windows stay readable and writable, and others can give up."""
    rank = BlockRank(group, 1)
    rank.begin("eager")
    rank.end()
    group.barrier()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    rank.begin("cooperative")
    assert not rank.done.wait(1, 0.3)
    rank.activations.break_off()
    assert rank.stream.synchronize(TIMEOUT_S)
    with suppress(ValueError):
        rank.calls.check()
    rank.close()
    return "ended"


__all__ = ["HOW", "STAGING", "hold_copies", "lose_a_rank", "miss_a_rank", "run_rounds", "unlike_lists"]
