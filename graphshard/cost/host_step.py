"""A step on the host, by executor: which of a segment's measured times count, and what a gather costs.

- *cooperative*: one worker does everything in turn (`timeline.predict`).
- *threaded*: a copy thread fills slots one unit ahead. Weights are then read from the cache that it shares with the
  computing thread, so cached times count; each gather costs a wake-up beside its bytes (`THREADED_PULL`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from graphshard.core.layout import Layout, build_layout
from graphshard.core.plan import Plan, Transport
from graphshard.core.specs import ModelSpec, StepShape
from graphshard.cost.dual_choice import block_times
from graphshard.cost.facts import ModelFacts
from graphshard.cost.hardware import HardwareSpec
from graphshard.cost.segments import SegmentKinds, SegmentTime, StepTimes, step_times
from graphshard.cost.timeline import Prediction, predict
from graphshard.schedule.emit import emit

THREADED_PULL = "pull_threaded"
"""The `pull` link of a hardware file as a copy thread of its own has it."""


def predict_step(
    model: ModelSpec,
    facts: ModelFacts,
    plan: Plan,
    shape: StepShape,
    hardware: HardwareSpec,
    context_tokens: int = 1,
    kinds: SegmentKinds | None = None,
) -> Prediction:
    """One step of `plan` at `shape`, on a host or any other machine; `kinds` as in `step_times`.

    Raises:
        SpecError: the hardware has no figures for a dtype or the transport.
    """
    layout = build_layout(model, plan)
    alone = step_times(model, facts, shape, hardware, context_tokens, kinds=kinds)
    times, transport = times_of_plan(model, layout, plan, alone, hardware)
    program = emit(model, plan, shape)
    if program.blocks:
        tokens = shape.batch_size * shape.tokens_per_sequence
        times = replace(times, blocks=tuple(block_times(model, hardware, plan.world_size, tokens)))
    return predict(
        program,
        layout,
        times,
        hardware,
        transport=cast("Transport", transport),
        executor=plan.executor,
        num_copy_streams=plan.num_copy_streams,
    )


def times_of_plan(
    model: ModelSpec, layout: Layout, plan: Plan, times: StepTimes, hardware: HardwareSpec
) -> tuple[StepTimes, str]:
    """(segments as they are under `plan`, whose link's figures its gathers have); `times` are the segments alone."""
    transport: str = plan.transport
    if hardware.kind == "host" and plan.executor == "threaded" and plan.units:
        times = _beside_copies(model, layout, times, hardware)
        known = any(link.transport == THREADED_PULL for link in hardware.links)
        transport = THREADED_PULL if known and transport == "pull" else transport
    return times, transport


def _beside_copies(model: ModelSpec, layout: Layout, times: StepTimes, hardware: HardwareSpec) -> StepTimes:
    """Segments that read a gathered unit small enough find it in the cache."""
    unit_bytes = {view.weight: unit.num_bytes for unit in layout.units for view in unit.views}
    found: list[SegmentTime] = []
    for segment, one in zip(model.segments, times.segments, strict=True):
        sizes = [unit_bytes[name] for name in segment.reads if name in unit_bytes]
        is_cached = bool(sizes) and max(sizes) <= hardware.cache_bytes
        alone = one.cached_us if is_cached else one.alone_us
        found.append(replace(one, alone_us=alone, shared_us=alone * hardware.overlap_compute))
    return replace(times, segments=tuple(found))
