"""Programs for the verifier's tests: good ones from the scheduler, two written out, and the exact verdict on any."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from graphshard.core.lowering import Lowered, lower
from graphshard.core.plan import Plan
from graphshard.core.program import Program
from graphshard.core.specs import DeviceSpec, ModelSpec, SegmentSpec, WeightSpec
from graphshard.schedule.auto import make_plan
from graphshard.schedule.emit import emit
from graphshard.verify.interpreter import explore

DEVICE = DeviceSpec("cuda", "any", 1 << 37)

INSIDE = """
program num_slots=2 num_units=3 num_segments=3
entry  0=- 1=-
exit   0=2 1=1
   0  ag_launch unit=0 slot=0 stream=copy
   1  ag_launch unit=1 slot=1 stream=copy
   2  wait_once unit=0 slot=0 stream=compute
   3  gemm layer=0 segment=proj units=0 stream=compute begin=0 end=1
   4  record_gate unit=0 slot=0 stream=compute
   5  ag_launch unit=2 slot=0 stream=copy
   6  wait_once unit=1 slot=1 stream=compute
   7  gemm layer=1 segment=proj units=1 stream=compute begin=1 end=2
   8  record_gate unit=1 slot=1 stream=compute
   9  wait_once unit=2 slot=0 stream=compute
  10  gemm layer=2 segment=proj units=2 stream=compute begin=2 end=3
  11  record_gate unit=2 slot=0 stream=compute
"""

TAIL = """
program num_slots=3 num_units=3 num_segments=3
entry  0=0 1=- 2=-
exit   0=0 1=1 2=2
   0  ag_launch unit=1 slot=1 stream=copy
   1  gemm layer=0 segment=proj units=0 stream=compute begin=0 end=1
   2  record_gate unit=0 slot=0 stream=compute
   3  ag_launch unit=2 slot=2 stream=copy
   4  wait_once unit=1 slot=1 stream=compute
   5  gemm layer=1 segment=proj units=1 stream=compute begin=1 end=2
   6  record_gate unit=1 slot=1 stream=compute
   7  ag_launch unit=0 slot=0 stream=copy
   8  wait_once unit=2 slot=2 stream=compute
   9  gemm layer=2 segment=proj units=2 stream=compute begin=2 end=3
  10  record_gate unit=2 slot=2 stream=compute
  11  record_outputs stream=compute
"""


def model_of(reads: Sequence[Sequence[int]], sizes: Sequence[int] | None = None) -> ModelSpec:
    """A model whose segment i reads the weights `reads[i]`; each weight becomes a unit of its own."""
    num = max((weight for read in reads for weight in read), default=-1) + 1
    sizes = sizes or [4096] * num
    weights = tuple(WeightSpec(f"layers.{w}.proj", (sizes[w],), "uint8") for w in range(num))
    segments = tuple(
        SegmentSpec("proj", layer, tuple(f"layers.{w}.proj" for w in read)) for layer, read in enumerate(reads)
    )
    return ModelSpec("small", weights, segments)


def plan_of(reads: Sequence[Sequence[int]], sizes: Sequence[int] | None = None, **options: object) -> Plan:
    """The scheduler's plan for `model_of(reads)` over two ranks."""
    options = {"units": "weight", "include": ("layers.*",), "world_size": 2, **options}
    return make_plan(model_of(reads, sizes), options.pop("world_size"), DEVICE, **options)


def program_of(reads: Sequence[Sequence[int]], **options: object) -> Program:
    """The scheduler's program for `model_of(reads)`."""
    return emit(model_of(reads), plan_of(reads, **options))


def good_programs(max_units: int = 5) -> Iterator[tuple[str, Program]]:
    """Small programs as users get them: chains, weights read twice, segments with two weights or none."""
    shapes: dict[str, list[tuple[int, ...]]] = {f"chain {m}": [(u,) for u in range(m)] for m in range(1, max_units + 1)}
    shapes["read twice"] = [(0,), (1,), (2,), (0,)]
    shapes["two a segment"] = [(0, 1), (1, 2), (2,), (3,)]
    shapes["segments without weights"] = [(), (0,), (0,), (), (1,), ()]
    for name, reads in shapes.items():
        if len(reads) > max_units:
            continue
        for head in ("inside", "tail", "outside"):
            for depth in (0, 1, 2):
                program = program_of(reads, head=head, prefetch_depth=depth)
                yield f"{name}, {head}, depth {depth}", program
                if depth == 1:
                    more = program_of(reads, head=head, prefetch_depth=depth, num_slots=program.num_slots + 1)
                    yield f"{name}, {head}, depth {depth}, a slot more", more


def random_reads(rng: random.Random) -> list[tuple[int, ...]]:
    """What 1 to 4 segments read of 1 to 3 weights, each weight at least once."""
    num = rng.randint(1, 3)
    reads = [(weight,) for weight in range(num)]
    for _ in range(rng.randint(0, 2)):
        reads.insert(rng.randint(0, len(reads)), tuple(sorted(rng.sample(range(num), rng.randint(0, min(2, num))))))
    return reads[:4] if {w for read in reads[:4] for w in read} == set(range(num)) else [(w,) for w in range(num)]


def wrong_step(
    program: Program, lowered: Lowered, following: Program, next_lowered: Lowered, num_copies: int
) -> str | None:
    """What the exact interpreter finds in a step of `program` and one of `following`: the harm in words, or None."""
    refill = {op.slot: op.unit for op in following.outside}
    if program != following:
        for slot, unit in enumerate(following.entry):
            if unit is not None and program.exit[slot] != unit:
                refill[slot] = unit
    outcome = explore(lowered, next_lowered, program.entry, refill, num_copies)
    return outcome.wrong or outcome.deadlock


def harm(program: Program, lowered: Lowered | None = None, num_copies: int = 2) -> str | None:
    """What the exact interpreter finds in two steps of `program`, with a list of one's own if wished."""
    lowered = lowered or lower(program, num_copies)
    return wrong_step(program, lowered, program, lowered, num_copies)
