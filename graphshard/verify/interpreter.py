"""An exact interpreter: every reachable state of two steps of lowered lists. Small lists only; it judges the rules.

It shares no code with the rules and knows nothing of happens-before. Streams advance one op at a time, in any order
that events allow; a copy and a compute op have a begin and an end, so they overlap whatever may run beside them. A
slot remembers which unit's chunks lie in it whole. Two kinds of harm are found: a compute op that sees a wrong, partly
copied or changing unit, and a state in which nothing can go on.

Records, waits that are satisfied and compute ops without reads touch no slot and disable nothing, so running them at
once hides no state of a slot. That is the only reduction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graphshard.core.errors import ProgramError
from graphshard.core.lowering import ActOp, Compute, CopyRun, Lowered, Record, Wait

# A slot's content: the unit (-1: none), the chunks of it that are whole, the streams whose running copy is spoiled.
SlotState = tuple[int, int, int]
# For each stream 2 * position + (1 while that op runs), then every slot's content.
State = tuple[tuple[int, ...], tuple[SlotState, ...]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What two steps can come to: `wrong` is the first wrong read found, `deadlock` the stuck streams; None: none."""

    wrong: str | None
    deadlock: str | None
    num_states: int

    @property
    def is_harmful(self) -> bool:
        """Whether some execution reads wrong bytes or never ends."""
        return self.wrong is not None or self.deadlock is not None


@dataclass(frozen=True, slots=True)
class _Step:
    """One op of a stream. `event`: (stream, position) that a wait needs to be past, None if nothing ever records it."""

    kind: str  # record, wait, copy, read, refill
    text: str
    event: tuple[int, int] | None = None
    slots: tuple[tuple[int, int, int], ...] = ()  # (slot, unit, chunks): written, read or refilled


def explore(
    first: Lowered,
    second: Lowered,
    entry: Sequence[int | None],
    refill: Mapping[int, int],
    num_copies: int,
    max_states: int = 500_000,
) -> Outcome:
    """Run `first` and then `second` in every way. What the host puts into slots is ordered by the origin stream alone.

    Args:
        first: A step's list.
        second: The next step's list; it follows `first` on the origin stream alone.
        entry: The unit that the host puts into each slot before the first step (None: nothing).
        refill: Slot and unit that the host puts there between the steps (priming, gathers from outside).
        num_copies: Chunks that a whole unit has.
        max_states: A ProgramError beyond it: the answer is exact or there is none.
    """
    held = {slot: unit for slot, unit in enumerate(entry) if unit is not None}
    streams = _streams(((first, held), (second, refill)), num_copies)
    whole = (1 << num_copies) - 1
    slots: tuple[SlotState, ...] = ((-1, 0, 0),) * len(entry)
    start = _advance(streams, ((0,) * len(streams), slots))
    seen, todo = {start}, [start]
    while todo:
        state = todo.pop()
        followers, wrong = _followers(streams, state, whole)
        if wrong is not None:
            return Outcome(wrong, None, len(seen))
        if not followers:
            stuck = [steps[at // 2].text for steps, at in zip(streams, state[0], strict=True) if at // 2 < len(steps)]
            if stuck:
                return Outcome(None, "; ".join(stuck), len(seen))
        for follower in followers:
            if follower not in seen:
                seen.add(follower)
                todo.append(follower)
        if len(seen) > max_states:
            raise ProgramError(f"the interpreter met {len(seen)} states, more than {max_states}: use a smaller list")
    return Outcome(None, None, len(seen))


def _streams(steps: Sequence[tuple[Lowered, Mapping[int, int]]], num_copies: int) -> list[list[_Step]]:
    """The ops of all steps by stream: one stream for the origin, one a step for each other."""
    origin, whole = steps[0][0].streams[0], (1 << num_copies) - 1
    names = [(0, origin)] + [
        (number, name)
        for number, (listed, _) in enumerate(steps)
        for name in dict.fromkeys(op.stream for op in listed.ops)
        if name != origin
    ]
    streams: list[list[_Step]] = [[] for _ in names]
    for step, (listed, refill) in enumerate(steps):
        if refill:
            slots = tuple((slot, unit, whole) for slot, unit in refill.items())
            streams[0].append(_Step("refill", f"refill of slots {sorted(refill)} before step {step}", slots=slots))
        latest: dict[int, tuple[int, int]] = {}
        for index, op in enumerate(listed.ops):
            at = 0 if op.stream == origin else names.index((step, op.stream))
            text = f"step {step} list op {index} (op {op.op}) on {op.stream}"
            if isinstance(op, Record):
                latest[op.event] = (at, len(streams[at]))
                streams[at].append(_Step("record", text))
            elif isinstance(op, Wait):
                streams[at].append(_Step("wait", text + f" waits for event {op.event}", latest.get(op.event)))
            elif isinstance(op, CopyRun):
                chunks = (1 << op.end) - (1 << op.begin)
                streams[at].append(_Step("copy", text, slots=((op.slot, op.unit, chunks),)))
            elif isinstance(op, ActOp):  # touches no slot; that it waits for peers is as if compute were slow
                streams[at].append(_Step("record", text))
            else:
                assert isinstance(op, Compute)
                reads = tuple((slot, unit, whole) for unit, slot in op.reads)
                streams[at].append(_Step("read", text, slots=reads))
    return streams


def _advance(streams: list[list[_Step]], state: State) -> State:
    """Run every op that touches no slot, as far as events allow."""
    positions, slots = list(state[0]), state[1]
    moved = True
    while moved:
        moved = False
        for at, steps in enumerate(streams):
            while not positions[at] & 1 and positions[at] // 2 < len(steps):
                step = steps[positions[at] // 2]
                if step.kind == "wait":
                    if step.event is None or positions[step.event[0]] // 2 <= step.event[1]:
                        break
                elif step.slots:
                    break
                positions[at] += 2
                moved = True
    return tuple(positions), slots


def _followers(streams: list[list[_Step]], state: State, whole: int) -> tuple[list[State], str | None]:
    """The states that one begin or one end away, or the wrong read that one of these begins makes."""
    positions, slots = state
    running = {at: streams[at][positions[at] // 2] for at in range(len(streams)) if positions[at] & 1}
    followers: list[State] = []
    for at, steps in enumerate(streams):
        if positions[at] // 2 >= len(steps):
            continue
        step = steps[positions[at] // 2]
        if step.kind == "wait":
            continue  # _advance has run it if it could
        if at in running:
            changed = _end_copy(slots, at, step) if step.kind == "copy" else slots
        else:
            wrong = _wrong_read(step, slots, running, whole)
            if wrong is not None:
                return [], wrong
            changed = slots if step.kind == "read" else _begin_write(slots, at, step, running)
        moved = positions[at] + (2 if step.kind == "refill" else 1)
        followers.append(_advance(streams, (positions[:at] + (moved,) + positions[at + 1 :], changed)))
    return followers, None


def _wrong_read(step: _Step, slots: tuple[SlotState, ...], running: Mapping[int, _Step], whole: int) -> str | None:
    """Why the beginning `step` makes a read wrong: its own, or a running one whose slot it writes."""
    if step.kind == "read":
        for slot, unit, _ in step.slots:
            held, chunks, _ = slots[slot] if 0 <= slot < len(slots) else (-1, 0, 0)
            if (held, chunks) != (unit, whole):
                return f"{step.text} reads unit {unit} in slot {slot}, which holds chunks {chunks:b} of unit {held}"
        return None
    for reader in running.values():
        if reader.kind == "read":
            for slot, unit, _ in reader.slots:
                if any(slot == written for written, _, _ in step.slots):
                    return f"{step.text} writes slot {slot} while {reader.text} reads unit {unit} there"
    return None


def _begin_write(
    slots: tuple[SlotState, ...], at: int, step: _Step, running: Mapping[int, _Step]
) -> tuple[SlotState, ...]:
    """Begin to overwrite: bytes under two copies at once are spoiled, whichever ends last."""
    changed = list(slots)
    for slot, unit, chunks in step.slots:
        held, kept, spoiled = changed[slot]
        for other, writer in running.items():
            if writer.kind != "copy":
                continue
            for written, written_unit, written_chunks in writer.slots:
                if written == slot and (written_unit != unit or written_chunks & chunks):
                    spoiled |= (1 << other) | (1 << at)
        if step.kind == "refill":
            changed[slot] = (unit, 0 if spoiled & (1 << at) else chunks, spoiled & ~(1 << at))
        else:
            changed[slot] = (unit, kept & ~chunks if held == unit else 0, spoiled)
    return tuple(changed)


def _end_copy(slots: tuple[SlotState, ...], at: int, step: _Step) -> tuple[SlotState, ...]:
    """End a copy: its chunks are whole now, unless another copy ran over them."""
    ((slot, unit, chunks),) = step.slots
    held, kept, spoiled = slots[slot]
    if spoiled & (1 << at):
        after = (held, kept, spoiled & ~(1 << at))
    else:
        assert held == unit, f"{step.text}: slot {slot} turned to unit {held} under a copy that is not spoiled"
        after = (unit, kept | chunks, spoiled)
    return slots[:slot] + (after,) + slots[slot + 1 :]
