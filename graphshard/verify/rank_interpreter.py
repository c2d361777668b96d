"""An exact interpreter of tensor-parallel blocks: every reachable state of several ranks over two steps. Small lists.

It shares no code with the rules. Each rank has its streams, and memory that its peers read: `tokens` and `partial`;
what copies and the sum fill (`gathered`, `parts`, `summed`) is its own. A place remembers for which block of which step
it was written. An op on a place has a begin and an end, so it overlaps whatever may run beside it. Three kinds of harm
are found: an op that reads what is not there, or changes while it reads; a flag that is written before the last one was
seen, so that it is lost; a state in which no rank can go on.

Slots are no matter of it, as the ops of a block touch none: `verify.interpreter` judges them, rank by rank, and may let
any stream of a rank stand still for as long as peers could make it.

Records, waits that are satisfied and flags that are written at once hide no state: writing a flag earlier lets a peer
go on, which need not, and finds at least as often that the last one was not seen yet. Those are the only reductions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from graphshard.core.errors import ProgramError
from graphshard.core.lowering import (
    ActCollective,
    ActCopies,
    ActSum,
    Compute,
    CopyRun,
    FlagWait,
    FlagWrite,
    Lowered,
    LoweredOp,
    Record,
    Wait,
)
from graphshard.core.program import Program
from graphshard.verify.interpreter import Outcome

Place = tuple[int, str]
"""Whose memory, and which: `tokens`, `partial`, `summed`; `gathered.2` and `parts.2` came from rank 2."""
Written = tuple[int, int]
"""Step and block."""
Step = tuple[Program, Lowered]

NOTHING: Written = (-1, -1)
CHANGING: Written = (-2, -2)

# For each stream 2 * position + (1 while that op runs), what each place holds, and the flags that are up.
State = tuple[tuple[int, ...], tuple[Written, ...], frozenset[tuple[int, int, str, int]]]


@dataclass(frozen=True, slots=True)
class _Op:
    """One op of a stream: what it reads and writes, or what it does with events, flags and collectives."""

    kind: str  # record, wait, act, post, await, meet
    text: str
    rank: int
    event: tuple[int, int] | None = None
    reads: tuple[tuple[Place, Written], ...] = ()
    writes: tuple[tuple[Place, Written], ...] = ()
    flag: tuple[str, int] = ("", 0)  # barrier and header; the channel of a collective
    key: str = ""


def explore_ranks(
    ranks: Sequence[Sequence[Step]], *, is_collective: bool = False, max_states: int = 500_000
) -> Outcome:
    """Run the steps of each rank, one after the other on its compute stream, in every way.

    Args:
        ranks: By rank, its steps: a program and its list.
        is_collective: Whether a gather of weights is a collective, for which all ranks have to come, too.
        max_states: A ProgramError beyond it: the answer is exact or there is none.
    """
    return _Exploration(ranks, is_collective).run(max_states)


class _Exploration:
    """The streams of all ranks, and the places that they touch."""

    def __init__(self, ranks: Sequence[Sequence[Step]], is_collective: bool) -> None:
        self.num_ranks = len(ranks)
        self.streams: list[list[_Op]] = []
        for rank, steps in enumerate(ranks):
            self.streams += _streams(_Rank(rank, self.num_ranks, is_collective), steps, len(self.streams))
        touched = {place for ops in self.streams for op in ops for place, _ in (*op.reads, *op.writes)}
        self.places = {place: number for number, place in enumerate(sorted(touched))}

    def run(self, max_states: int) -> Outcome:
        begin: State = ((0,) * len(self.streams), (NOTHING,) * len(self.places), frozenset())
        start, wrong = self.advance(begin)
        seen, todo = {start}, [start]
        while todo and wrong is None:
            state = todo.pop()
            followers = []
            for follower, harm in self.followers(state):
                if harm is not None:
                    return Outcome(harm, None, len(seen))
                followers.append(follower)
            if not followers:
                stuck = [
                    ops[at // 2].text for ops, at in zip(self.streams, state[0], strict=True) if at // 2 < len(ops)
                ]
                if stuck:
                    return Outcome(None, "; ".join(stuck), len(seen))
            for follower in followers:
                if follower not in seen:
                    seen.add(follower)
                    todo.append(follower)
            if len(seen) > max_states:
                raise ProgramError(f"the interpreter met {len(seen)} states, more than {max_states}: use smaller lists")
        return Outcome(wrong, None, len(seen))

    def advance(self, state: State) -> tuple[State, str | None]:
        """Run what hides nothing, as far as events allow; also a flag that is lost by it."""
        positions, places, flags = list(state[0]), state[1], set(state[2])
        moved = True
        while moved:
            moved = False
            for at, ops in enumerate(self.streams):
                while not positions[at] & 1 and positions[at] // 2 < len(ops):
                    op = ops[positions[at] // 2]
                    if op.kind == "wait":
                        if op.event is None or positions[op.event[0]] // 2 <= op.event[1]:
                            break
                    elif op.kind == "post":
                        lost = self.post(op, flags)
                        if lost is not None:
                            return state, lost
                    elif op.kind != "record":
                        break
                    positions[at] += 2
                    moved = True
        return (tuple(positions), places, frozenset(flags)), None

    def post(self, op: _Op, flags: set[tuple[int, int, str, int]]) -> str | None:
        barrier, header = op.flag
        for peer in range(self.num_ranks):
            if peer == op.rank:
                continue
            if any((owner, writer, name) == (peer, op.rank, barrier) for owner, writer, name, _ in flags):
                return f"{op.text} writes its flag at rank {peer}, which has not seen the last one"
            flags.add((peer, op.rank, barrier, header))
        return None

    def followers(self, state: State) -> Iterator[tuple[State, str | None]]:
        """The states that one begin, end, wait or collective away; with the harm of a begin."""
        positions, places, flags = state
        for at, ops in enumerate(self.streams):
            if positions[at] // 2 >= len(ops):
                continue
            op = ops[positions[at] // 2]
            if op.kind == "await":
                barrier, header = op.flag
                peers = (peer for peer in range(self.num_ranks) if peer != op.rank)
                due = frozenset((op.rank, peer, barrier, header) for peer in peers)
                if due <= flags:
                    yield self.advance((_moved(positions, at, 2), places, flags - due))
            elif op.kind == "act" and positions[at] & 1:
                changed = self.written(places, op)
                yield self.advance((_moved(positions, at, 1), changed, flags))
            elif op.kind == "act":
                harm = self.harm(op, state)
                if harm is not None:
                    yield state, harm
                    return
                begun = self.written(places, op, begins=True)
                yield self.advance((_moved(positions, at, 1), begun, flags))
        yield from self.meetings(state)

    def meetings(self, state: State) -> Iterator[tuple[State, str | None]]:
        """Collectives for which every rank has come; each channel has one order on each rank."""
        positions, places, flags = state
        here: dict[str, dict[int, int]] = {}
        for at, ops in enumerate(self.streams):
            if positions[at] // 2 < len(ops) and ops[positions[at] // 2].kind == "meet":
                op = ops[positions[at] // 2]
                here.setdefault(op.flag[0], {}).setdefault(op.rank, at)
        for channel, by_rank in here.items():
            if len(by_rank) < self.num_ranks:
                continue
            ops_here = [self.streams[at][positions[at] // 2] for at in by_rank.values()]
            if len({op.key for op in ops_here}) > 1:
                yield state, f"ranks meet in unlike collectives ({channel}): " + "; ".join(op.text for op in ops_here)
                return
            for op in ops_here:
                harm = self.harm(op, state)
                if harm is not None:
                    yield state, harm
                    return
            changed, moved = places, positions
            for at, op in zip(by_rank.values(), ops_here, strict=True):
                changed, moved = self.written(changed, op), _moved(moved, at, 2)
            yield self.advance((moved, changed, flags))

    def written(self, places: tuple[Written, ...], op: _Op, begins: bool = False) -> tuple[Written, ...]:
        changed = list(places)
        for place, content in op.writes:
            changed[self.places[place]] = CHANGING if begins else content
        return tuple(changed)

    def harm(self, op: _Op, state: State) -> str | None:
        """Why the beginning `op` reads wrong, or makes another one do so."""
        positions, places, _ = state
        for place, due in op.reads:
            found = places[self.places[place]]
            if found != due:
                return f"{op.text} reads {_name(place)} of {_of(due)}, which holds {_of(found)}"
        mine = {place for place, _ in op.writes}
        for at, ops in enumerate(self.streams):
            if not positions[at] & 1:
                continue
            other = ops[positions[at] // 2]
            for place, _ in (*other.reads, *other.writes):
                if place in mine:
                    return f"{op.text} writes {_name(place)} while {other.text} is at it"
        return None


def _moved(positions: tuple[int, ...], at: int, by: int) -> tuple[int, ...]:
    return positions[:at] + (positions[at] + by,) + positions[at + 1 :]


def _name(place: Place) -> str:
    return f"rank {place[0]}'s tp.{place[1]}"


def _of(written: Written) -> str:
    if written in (NOTHING, CHANGING):
        return "nothing" if written == NOTHING else "what is being written"
    return f"step {written[0]} block {written[1]}"


@dataclass(frozen=True, slots=True)
class _Rank:
    """Whose ops are read, and how ranks meet."""

    rank: int
    num_ranks: int
    is_collective: bool

    def ops(self, step: int, program: Program, op: LoweredOp, text: str) -> list[_Op]:
        """What a lowered op does to activations; nothing, for most."""
        if isinstance(op, FlagWrite):
            return [_Op("post", text, self.rank, flag=(op.barrier, op.block))]
        if isinstance(op, FlagWait):
            return [_Op("await", f"{text} waits for all {op.barrier} flags", self.rank, flag=(op.barrier, op.block))]
        if isinstance(op, Compute):
            return [self.compute(step, program, op, text)]
        if isinstance(op, ActCopies):
            return [self.copy((step, op.block), op.what, peer, text) for peer in range(self.num_ranks)]
        if isinstance(op, ActSum):
            now = (step, op.block)
            return [_Op("act", text, self.rank, reads=self.all_of("parts", now), writes=(self.own("summed", now),))]
        if isinstance(op, ActCollective):
            return [self.collective((step, op.block), op, text)]
        if isinstance(op, CopyRun) and self.is_collective:
            return [_Op("meet", text, self.rank, flag=("weights", 0), key=f"unit {op.unit}")]
        return [_Op("record", text, self.rank)]

    def own(self, place: str, now: Written) -> tuple[Place, Written]:
        return (self.rank, place), now

    def all_of(self, place: str, now: Written) -> tuple[tuple[Place, Written], ...]:
        """What came from each rank."""
        return tuple(self.own(f"{place}.{peer}", now) for peer in range(self.num_ranks))

    def compute(self, step: int, program: Program, op: Compute, text: str) -> _Op:
        """A block's three segments; the model's own touch no activations that ranks exchange."""
        reads: list[tuple[Place, Written]] = []
        writes: list[tuple[Place, Written]] = []
        for block in program.blocks:
            now = (step, block.index)
            for part in map(block.part_of, range(op.begin, op.end)):
                if part == "prepare":
                    writes.append(self.own("tokens", now))
                elif part == "compute":
                    reads += self.all_of("gathered", now)
                    writes.append(self.own("partial", now))
                elif part == "finish":
                    reads.append(self.own("summed", now))
        kind = "act" if reads or writes else "record"
        return _Op(kind, text, self.rank, reads=tuple(reads), writes=tuple(writes))

    def copy(self, now: Written, what: str, peer: int, text: str) -> _Op:
        target = self.own(f"gathered.{peer}" if what == "tokens" else f"parts.{peer}", now)
        return _Op("act", f"{text} from rank {peer}", self.rank, reads=(((peer, what), now),), writes=(target,))

    def collective(self, now: Written, op: ActCollective, text: str) -> _Op:
        """Ends on all ranks at once: whoever leaves it may overwrite what it gave."""
        source = "tokens" if op.kind == "all_gather" else "partial"
        reads = tuple(((peer, source), now) for peer in range(self.num_ranks))
        writes = self.all_of("gathered", now) if op.kind == "all_gather" else (self.own("summed", now),)
        key = f"{op.kind} of block {op.block}"
        return _Op("meet", f"{text}: {key}", self.rank, reads=reads, writes=writes, flag=("activations", 0), key=key)


def _streams(whose: _Rank, steps: Sequence[Step], offset: int) -> list[list[_Op]]:
    """One rank's ops by stream: one stream for the origin, one a step for each other; numbered from `offset` on."""
    origin = steps[0][1].streams[0]
    names = [(0, origin)]
    names += [
        (number, name)
        for number, (_, listed) in enumerate(steps)
        for name in dict.fromkeys(op.stream for op in listed.ops)
        if name != origin
    ]
    streams: list[list[_Op]] = [[] for _ in names]
    for step, (program, listed) in enumerate(steps):
        latest: dict[int, tuple[int, int]] = {}
        for index, op in enumerate(listed.ops):
            at = 0 if op.stream == origin else names.index((step, op.stream))
            text = f"rank {whose.rank} step {step} list op {index} (op {op.op}) on {op.stream}"
            if isinstance(op, Wait):
                text += f" waits for event {op.event}"
                streams[at].append(_Op("wait", text, whose.rank, latest.get(op.event)))
                continue
            if isinstance(op, Record):
                latest[op.event] = (offset + at, len(streams[at]))
            streams[at] += whose.ops(step, program, op, text)
    return streams
