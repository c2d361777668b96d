"""The report of `generate` as one rank measures it: sharded, then replicated, the same prompts on the same segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from graphshard.bench.memory import read_pss, settle
from graphshard.bench.trace import trace_timeline
from graphshard.cli.generate_peak import PeakMemory
from graphshard.comm.group import Group
from graphshard.core.specs import BufferRole, StepShape
from graphshard.core.timeline import unit_times
from graphshard.runtime.runtime import Runtime

ROLES: tuple[BufferRole, ...] = ("input", "output", "activation")


class Measure:
    """What a rank finds out about each way of keeping weights, `sharded` and `replicated`."""

    def __init__(self, group: Group, shape: StepShape) -> None:
        self._group, self._shape = group, shape
        self._found: dict[str, dict[str, Any]] = {"sharded": {}, "replicated": {}}
        self._hashes: dict[str, list[str]] = {}
        self._units: list[dict[str, Any]] = []
        self._facts: dict[str, Any] = {}

    def started(self, way: str, make: Callable[[], Runtime]) -> Runtime:
        """Build a runtime, and note the memory that it took at most."""
        settle()
        with PeakMemory() as peak:
            runtime = make()
        kept = {"startup_peak_rss_bytes": peak.rss_bytes, "startup_peak_pss_bytes": peak.pss_bytes}
        self._found[way] |= {**kept, "is_rss_peak_exact": peak.is_rss_exact}
        return runtime

    def run(self, way: str, runtime: Runtime, batches: Sequence[dict[str, Any]]) -> None:
        """Note what `runtime` holds, and what its steps took (collective: all ranks hold theirs meanwhile)."""
        self._hashes[way] = [one for batch in batches for one in batch["hashes"]]
        settle()
        self._group.barrier("before PSS")
        found = self._found[way]
        found["pss_bytes"] = read_pss().total_bytes
        self._group.barrier("after PSS")
        found["step_s"] = [seconds for batch in batches for seconds in batch["step_s"]]
        found |= _held(runtime, self._shape)
        if way == "sharded":
            self._trace(runtime)
            plan = runtime.plan
            self._facts = {key: getattr(plan, key) for key in ("unit_policy", "prefetch_depth", "head", "executor")}
            self._facts["reasons"] = list(plan.reasons)
        self._group.barrier("measured")

    def told(self) -> dict[str, Any]:
        """All of it, as JSON takes it."""
        identical = self._hashes["sharded"] == self._hashes["replicated"]
        return {**self._found, "identical": identical, "units": self._units, "plan": self._facts}

    def _trace(self, runtime: Runtime) -> None:
        units, layout = runtime.plan.units, runtime.layout
        times = unit_times(trace_timeline(runtime, self._shape, before_last=self._group.barrier).spans)
        for one in times:
            num_bytes = layout.units[one.unit].num_bytes
            self._units.append({**asdict(one), "name": units[one.unit].name, "num_bytes": num_bytes})


def _held(runtime: Runtime, shape: StepShape) -> dict[str, int]:
    """Bytes by what they are for; `kv_bytes_per_sequence` at this run's cache length."""
    layout = runtime.layout
    caches = runtime.buffers(shape, "cache").values()
    num_sequences = max((len(cache) for cache in caches), default=1)
    return {
        "weight_bytes": layout.shard_bytes + layout.slot_bytes + layout.resident_bytes,
        "chunk_bytes": layout.shard_bytes,
        "slot_bytes": layout.slot_bytes,
        "resident_bytes": layout.resident_bytes,
        "kv_bytes_per_sequence": sum(cache.nbytes for cache in caches) // num_sequences,
        "other_bytes": sum(one.nbytes for role in ROLES for one in runtime.buffers(shape, role).values()),
    }
