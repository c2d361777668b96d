"""How much of the draft's first gather the commit fold hides: on a stream of its own, and on one that is shared.

A sample is a whole step of one rank: the draft's graph, the target's graph, and then, as soon as verification has
ended, the fold with the draft's gather from outside beside it. The target's first unit is gathered from outside, too,
and where that is issued is what settings differ in, beside the draft's stream:

    own       under the draft's graph, on the target's stream; the draft's gather has a stream of its own
    beside    when verification ends, on the target's stream; the draft's gather, on its own stream, shares the fold and
              the memory with it (three threads of a rank, where `own` and `shared` have two)
    shared    when verification ends, right before the draft's gather, which is on the same stream and queues behind it

`graphshard.speculate` gathers a target's first unit right before its replay, where that is outside at all: to begin it
under the draft's graph is the measurement's own, so that the draft's gather has the fold for itself.

All settings do the same work in a step. They take turns within one run, with the fold and the gathers alone. Times are
those of events on the streams: each stream's worker notes when it comes to one. The fold is a capture of its own with
an event on either side of its segment, so launching it is not in its time; the gather's first event stands right before
its copies. Fold and gathers are handed over first and begin together, at a word that stands for the end of
verification: as where the host runs ahead of its device. Calls of this driver end when their work has; a gather that
`verify` launches begins by so much earlier than a fold that the host launches later, and is hidden by the host's work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch

from graphshard._core import Event, Memory, Stream, Word
from graphshard.bench.speculative_models import LayeredModel, fill_records, records_for
from graphshard.bench.stats import Summary, summarize
from graphshard.comm.group import Group
from graphshard.core.errors import CommError
from graphshard.core.ops import StreamName
from graphshard.core.plan import Plan, Transport
from graphshard.core.program import Program
from graphshard.core.sequence import (
    COMMIT_FOLD,
    Fold,
    PrefetchLaunch,
    PrefetchWait,
    Replay,
    SequenceGraph,
    SequenceOp,
    StepSequence,
)
from graphshard.core.specs import DeviceSpec, ModelSpec, StepShape
from graphshard.core.timeline import Overlap
from graphshard.device import open_device
from graphshard.runtime.bind import Hooks
from graphshard.runtime.build import build_runtime
from graphshard.runtime.compiled import compile_plan
from graphshard.runtime.evidence.outside import TimedFold, TimedPrefetch
from graphshard.runtime.runtime import Runtime
from graphshard.runtime.weights.fill import SourceFiller
from graphshard.runtime.weights.recipe_source import RecipeSource
from graphshard.runtime.weights.tensors_in_hand import TensorsInHand
from graphshard.schedule.auto import make_plan
from graphshard.schedule.sequence import DRAFT, TARGET
from graphshard.verify.sequence import verify_sequences

SETTINGS = {"own": "under the draft", "beside": "beside the fold", "shared": "before, same stream"}
"""By name: where the target's own first gather is."""
OVERLAP_KEYS = ("prefetch_us", "fold_us", "overlap_us", "late_us")
Prefetches = Mapping[str, TimedPrefetch]
"""By graph."""
SHAPE = StepShape(1)
NUM_WARMUPS = 3
ENOUGH = 0.9
"""Of the gather's time, what the fold is to hide of it on a stream of its own."""


@dataclass(frozen=True)
class SpeculativeRequest:
    """What to measure; the same on all ranks."""

    fold_ms: float = 4.0
    draft_bytes: int = 14 * 2**20
    """Of a layer of the draft, its unit."""
    target_bytes: int = 28 * 2**20
    draft_layers: int = 3
    target_layers: int = 3
    num_samples: int = 30
    """Of each setting, on each rank."""
    transport: Transport = "pull"
    in_turn: bool = False
    """Ranks measure one after the other, each while the others stand still."""
    timeout_s: float = 60.0


def models_of(request: SpeculativeRequest, num_records: int) -> tuple[LayeredModel, LayeredModel]:
    """(target, draft)."""
    target = LayeredModel("bench-target", request.target_layers, request.target_bytes, num_records)
    return target, LayeredModel("bench-draft", request.draft_layers, request.draft_bytes)


def plan_of(spec: ModelSpec, world_size: int, transport: Transport) -> Plan:
    """Each layer a unit, the first one gathered from outside."""
    return make_plan(
        spec,
        world_size,
        DeviceSpec(kind="host", name="bench", memory_bytes=2**40),
        units="layer",
        prefetch_depth=1,
        head="outside",
        executor="threaded",
        transport=transport,
        step_shapes=(SHAPE,),
        min_shard_bytes=0,
    )


def sequence_of(target: Program, draft: Program, setting: str) -> StepSequence:
    """What a sample of `setting` issues, in order."""
    stream: StreamName = "copy" if setting == "shared" else "prefetch"
    launches = {
        name: tuple(PrefetchLaunch(name, gather.unit, gather.slot, stream) for gather in program.prime)
        for name, program in ((TARGET, target), (DRAFT, draft))
    }
    waits = {name: tuple(PrefetchWait(one.graph, one.unit, one.slot) for one in of) for name, of in launches.items()}
    early = launches[TARGET] if setting == "own" else ()
    late = launches[DRAFT] if setting == "own" else (*launches[TARGET], *launches[DRAFT])
    ops: tuple[SequenceOp, ...] = (
        *early,
        *waits[DRAFT],
        Replay(DRAFT),
        *waits[TARGET],
        Replay(TARGET),
        *late,
        Fold(TARGET, COMMIT_FOLD),
    )
    return StepSequence((SequenceGraph(DRAFT, draft), SequenceGraph(TARGET, target)), ops, late, late)


class SpeculativeRig:
    """A target with a fold, and its draft twice: one for each stream. Closes its runtimes when it is left."""

    def __init__(self, group: Group, request: SpeculativeRequest, stack: ExitStack) -> None:
        """Calibrate the fold, build and capture (collective)."""
        self.request, self.group = request, group
        self._device, self._stack = open_device("host", num_ranks=group.world_size), stack
        self.num_records = records_for(group, request.fold_ms * 1e3)
        self._go = Word(Memory.allocate_host(self._device.driver, 4))
        self._go.store(1)
        shared = Stream(self._device.driver)
        target, draft = models_of(request, self.num_records)
        hooks = Hooks(fold_stall=self._go.address, prefetch_stream=shared)
        self.target = self._build(target, hooks)
        self.drafts = {"own": self._build(draft, Hooks()), "shared": self._build(draft, Hooks(prefetch_stream=shared))}
        self.drafts["beside"] = self.drafts["own"]
        programs = self.target.programs[SHAPE], self.drafts["own"].programs[SHAPE]
        self.sequences = {setting: sequence_of(*programs, setting) for setting in SETTINGS}
        for sequence in self.sequences.values():
            copies = 1 if request.transport == "nccl" else group.world_size
            verify_sequences({"step": sequence}, num_copies=copies).raise_if_bad()
        state = self.target.state(SHAPE)
        fill_records(state.buffer("keys")[0], state.buffer("values")[0])
        self.fold = TimedFold(self.target, SHAPE)
        self.prefetches = {setting: self.timed_prefetches(setting) for setting in SETTINGS}

    def _build(self, model: LayeredModel, hooks: Hooks) -> Runtime:
        spec = model.spec()
        plan = plan_of(spec, self.group.world_size, self.request.transport)
        filler = SourceFiller(RecipeSource(TensorsInHand(model.weights())))
        made = build_runtime(
            compile_plan(spec, plan),
            model,
            filler,
            self.group,
            self._device,
            timeout_s=self.request.timeout_s,
            hooks=hooks,
        )
        runtime = self._stack.enter_context(made)
        runtime.capture([SHAPE])
        return runtime

    def timed_prefetches(self, setting: str) -> Prefetches:
        """Of both graphs, each with events of its own."""
        return {TARGET: TimedPrefetch(self.target), DRAFT: TimedPrefetch(self.drafts[setting])}

    def issue(self, setting: str, replays: Mapping[str, Callable[[], None]], prefetches: Prefetches) -> None:
        """One step by the sequence of `setting`; a graph's own run waits for what was gathered for it.

        What follows the last replay stands behind one word, which is the end of verification to all streams at once;
        not under nccl, where the host waits for the last gather before it issues the next one outside a graph.
        """
        ops, is_held = self.sequences[setting].ops, self.request.transport == "pull"
        verified = 1 + max(index for index, op in enumerate(ops) if isinstance(op, Replay))
        try:
            for index, op in enumerate(ops):
                if isinstance(op, Replay):
                    replays[op.graph]()
                elif isinstance(op, PrefetchLaunch):
                    prefetches[op.graph].issue(SHAPE, self._go if is_held and index >= verified else None)
                elif isinstance(op, Fold):
                    self.fold.run(on_launch=lambda: self._go.store(1))
                if is_held and index + 1 == verified:
                    self._go.store(0)
        finally:
            self._go.store(1)

    def step(self, setting: str) -> Overlap:
        """One step, up to the end of all that it launched."""
        graphs = {DRAFT: self.drafts[setting].graph(1), TARGET: self.target.graph(1)}
        prefetches = self.prefetches[setting]
        self.issue(setting, {name: graph.replay for name, graph in graphs.items()}, prefetches)
        for prefetch in prefetches.values():
            prefetch.synchronize()
        return overlap(prefetches[DRAFT], self.fold)

    def fold_alone(self) -> float:
        """A fold with nothing beside it, in us."""
        self.fold.run()
        return self.fold.ended.elapsed_us(self.fold.begun)

    def prefetch_alone(self, name: str) -> float:
        """A graph's gather from outside with nothing beside it, after a step of that graph, in us."""
        runtime = self.target if name == TARGET else self.drafts["own"]
        runtime.graph(1).replay()
        prefetch = self.prefetches["own"][name]
        prefetch.issue(SHAPE)
        prefetch.synchronize()
        return prefetch.ended.elapsed_us(prefetch.begun)

    def event_us(self) -> float:
        """What an event costs: the median between two in a row, on a stream that has nothing else to do."""
        stream, events = Stream(self._device.driver), [Event(self._device.driver, timing=True) for _ in range(20)]
        word = Word(Memory.allocate_host(self._device.driver, 4))
        stream.wait_value(word.address, 1)  # so that all are enqueued before the first is recorded
        for event in events:
            stream.record(event)
        word.store(1)
        if not stream.synchronize(self.request.timeout_s):
            raise CommError(f"{len(events)} events were not recorded within {self.request.timeout_s:.1f} s")
        return summarize([after.elapsed_us(before) for before, after in pairwise(events)]).median


def overlap(prefetch: TimedPrefetch, fold: TimedFold) -> Overlap:
    """Of the latest of both, by their events."""
    gather = prefetch.begun.elapsed_us(fold.begun), prefetch.ended.elapsed_us(fold.begun)
    return Overlap.of(gather, (0.0, fold.ended.elapsed_us(fold.begun)))


def measure_speculative(group: Group, values: dict[str, Any]) -> dict[str, Any]:
    """`bench speculative` on one rank (collective): its samples, and the steps that were traced."""
    torch.set_num_threads(1)
    from graphshard.bench.speculative_trace import trace_steps  # which is made of this module

    with ExitStack() as stack:
        rig = SpeculativeRig(group, SpeculativeRequest(**values), stack)
        found = {"samples": _samples(rig), **trace_steps(rig), **_facts(rig)}
        group.barrier("measured")
    return found


def in_turn(rig: SpeculativeRig, run: Callable[[], Any]) -> Any:
    """What `run` returns: on all ranks at once from a barrier on, or one after the other (collective)."""
    if not rig.request.in_turn:
        rig.group.barrier("before a sample")
        return run()
    found = None
    for rank in range(rig.group.world_size):
        rig.group.barrier("before a rank's sample")
        if rank == rig.group.rank:
            found = run()
    rig.group.barrier("after the last rank's sample")
    return found


def _samples(rig: SpeculativeRig) -> dict[str, list[Any]]:
    """Every setting in turn, so that all see the same machine; none is always first."""
    runs: dict[str, Callable[[], Any]] = {
        "own": lambda: asdict(rig.step("own")),
        "beside": lambda: asdict(rig.step("beside")),
        "shared": lambda: asdict(rig.step("shared")),
        "fold_us": rig.fold_alone,
        "draft_us": lambda: rig.prefetch_alone(DRAFT),
        "target_us": lambda: rig.prefetch_alone(TARGET),
    }
    samples: dict[str, list[Any]] = {what: [] for what in runs}
    order = list(runs)
    for turn in range(NUM_WARMUPS + rig.request.num_samples):
        first = turn % len(order)
        for what in order[first:] + order[:first]:
            sample = in_turn(rig, runs[what])
            if turn >= NUM_WARMUPS:
                samples[what].append(sample)
    return samples


def _facts(rig: SpeculativeRig) -> dict[str, Any]:
    draft, target = rig.drafts["own"], rig.target
    return {
        "num_records": rig.num_records,
        "event_us": rig.event_us(),
        "draft_bytes": draft.layout.units[0].num_bytes,
        "target_bytes": target.layout.units[0].num_bytes,
        "sequences": {setting: sequence.op_lines() for setting, sequence in rig.sequences.items()},
    }


def speculative_rows(ranks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each setting: medians over all ranks' samples, the spread of the share, and the samples."""
    return [_row(setting, ranks) for setting in SETTINGS]


def _row(setting: str, ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    samples = [
        {"rank": rank, **one, "share": Overlap(**one).share}
        for rank, found in enumerate(ranks)
        for one in found["samples"][setting]
    ]
    share = summarize([one["share"] for one in samples])
    return {
        "setting": setting,
        "stream": "shared" if setting == "shared" else "own",
        "target_gather": SETTINGS[setting],
        **{key: summarize([one[key] for one in samples]).median for key in OVERLAP_KEYS},
        "overlap_share": share.median,
        "p10": share.p10,
        "p90": share.p90,
        "n": share.n,
        "samples": samples,
    }


def alone(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Summary]:
    """The fold and the gathers with nothing beside them, over all ranks' samples."""
    keys = ("fold_us", "draft_us", "target_us")
    return {key: summarize([us for found in ranks for us in found["samples"][key]]) for key in keys}
