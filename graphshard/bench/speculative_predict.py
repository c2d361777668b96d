"""The steps of `bench speculative` as the cost model sees them: by a calibrated machine, or by what a run measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphshard.bench.speculative import SHAPE, SpeculativeRequest, alone, models_of, plan_of, sequence_of
from graphshard.bench.speculative_models import LayeredModel
from graphshard.bench.stats import quantile
from graphshard.core.layout import build_layout
from graphshard.core.plan import Plan
from graphshard.core.sequence import COMMIT_FOLD
from graphshard.core.specs import ModelSpec
from graphshard.core.timeline import Overlap, prefetch_name
from graphshard.cost.hardware import HardwareSpec, Link, Measured
from graphshard.cost.host_step import times_of_plan
from graphshard.cost.plain import plain_facts
from graphshard.cost.segments import SegmentTime, StepTimes, step_times
from graphshard.cost.speculative import GraphCost, SequencePrediction, predict_sequence
from graphshard.schedule.emit import emit
from graphshard.schedule.sequence import DRAFT, TARGET

BY_RUN = (
    "durations that this run measured: gathers and the fold alone, segments as traced; nothing is slowed by anything "
    "beside it"
)
MARKED = (COMMIT_FOLD, prefetch_name(DRAFT, 0), prefetch_name(TARGET, 0))
"""Names of the spans that a picture shows in colours of their own."""
Ranks = Sequence[Mapping[str, Any]]


class SpeculativePredictor:
    """Predicts steps of each setting."""

    def __init__(self, request: SpeculativeRequest, ranks: Ranks, hardware: HardwareSpec | None) -> None:
        """`ranks` are what each rank measured, traced steps included if there is no `hardware`."""
        self._request, self._ranks, self._world_size = request, ranks, len(ranks)
        self._target, self._draft = models_of(request, ranks[0]["num_records"])
        self._hardware = hardware or self._measured_hardware()
        measured = hardware is None
        self._costs = {
            name: self._measured_cost(name, model) if measured else self._cost(name, model)
            for name, model in ((TARGET, self._target), (DRAFT, self._draft))
        }
        at_once = ", of all ranks at once" if request.in_turn else ""
        by_file = f"figures of {self._hardware.name}{at_once}; the fold as this run measured it"
        self.source = BY_RUN if measured else by_file
        """Where its durations come from."""

    def step(self, setting: str) -> SequencePrediction:
        """A step of `setting`, in steady state."""
        specs = self._target.spec(), self._draft.spec()
        programs = [emit(spec, self._plan(spec)) for spec in specs]
        return predict_sequence(sequence_of(programs[0], programs[1], setting), self._costs, self._hardware)

    def overlap(self, setting: str) -> Overlap:
        """Of the draft's gather with the fold, in such a step."""
        return self.step(setting).overlap(DRAFT, COMMIT_FOLD)

    def _plan(self, spec: ModelSpec) -> Plan:
        return plan_of(spec, self._world_size, self._request.transport)

    def _folds_us(self, name: str) -> dict[str, float]:
        return {COMMIT_FOLD: alone(self._ranks)["fold_us"].median} if name == TARGET else {}

    def _cost(self, name: str, model: LayeredModel) -> GraphCost:
        """By a machine's figures."""
        spec = model.spec()
        plan = self._plan(spec)
        layout = build_layout(spec, plan)
        facts = plain_facts(spec, self._world_size)
        found = step_times(spec, facts, SHAPE, self._hardware, context_tokens=1)
        times, transport = times_of_plan(spec, layout, plan, found, self._hardware)
        return GraphCost(layout, times, transport, self._num_copies, folds_us=self._folds_us(name))

    def _measured_cost(self, name: str, model: LayeredModel) -> GraphCost:
        """By this run's own durations, the median over ranks."""
        spec = model.spec()
        layers = zip(*(rank["segments_us"][name] for rank in self._ranks), strict=True)
        medians = [quantile(sorted(layer), 0.5) for layer in layers]
        times = StepTimes(SHAPE, tuple(SegmentTime(us, us, us) for us in medians))
        layout = build_layout(spec, self._plan(spec))
        return GraphCost(layout, times, self._request.transport, self._num_copies, folds_us=self._folds_us(name))

    @property
    def _num_copies(self) -> int:
        return 1 if self._request.transport == "nccl" else self._world_size

    def _measured_hardware(self) -> HardwareSpec:
        """A host of which nothing is known but what gathers of these units take."""
        found, transport = alone(self._ranks), self._request.transport
        sizes = {self._ranks[0][f"{name}_bytes"]: found[f"{name}_us"].median for name in (DRAFT, TARGET)}
        gathers = [Measured("gather", (transport, size, self._world_size), us) for size, us in sizes.items()]
        return HardwareSpec(
            name="measured in this run", kind="host", memory_bytes=2**40, memory_bytes_per_s=1.0, memory_efficiency=1.0,
            links=(Link(transport, 1.0, 0.0),), derate=(), activation_bytes_per_s=1.0, activation_t0_us=0.0,
            peak_flops=(("float32", 1.0),), gemm_efficiency=1.0, kernel_us=0.0, launch_us=0.0, launch_us_per_node=0.0,
            max_domain=64, measured=tuple(gathers),
        )  # fmt: skip
