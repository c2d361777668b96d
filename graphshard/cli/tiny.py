"""Small runtimes for `show bound` and `show graph`: real binding and capture, no-op segments or a real model."""

from __future__ import annotations

from collections import Counter
from typing import Any

from graphshard.bench.noop import noop_runtime
from graphshard.bench.trace import bound_of, bound_rows
from graphshard.cli.loading import compile_shown
from graphshard.cli.planning import ANY_DEVICE, PlanRequest
from graphshard.comm.group import Group
from graphshard.core.specs import StepShape
from graphshard.models.open import open_model
from graphshard.runtime.runtime import Runtime
from graphshard.schedule.auto import make_plan
from graphshard.schedule.synthetic import synthetic_model

SHAPE = StepShape(1)


class TinyRuntimes:
    """One runtime a rank; ranks are threads."""

    def __init__(self, request: PlanRequest) -> None:
        self._request = request

    def bound(self, group: Group) -> dict[str, Any]:
        """Rank 0's bound list, as text without addresses."""
        with self._runtime(group) as runtime:
            bound = bound_of(runtime, SHAPE)
            rows = bound_rows(bound, group.world_size, group.rank)
            group.barrier("bound shown")  # nobody unmaps before all have looked
        kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(row.kind for row in rows).items())
        lines = [f"bound rank={group.rank} world_size={group.world_size} num_ops={len(rows)} ({kinds})"]
        for i, row in enumerate(rows):
            source = "-" if row.source < 0 else str(row.source)
            lines.append(f"{i:4d}  {row.stream:<8} {row.kind:<8} op={source:<4} {row.text}")
        listed = [{"index": i, "kind": r.kind, "stream": r.stream, "op": r.source} for i, r in enumerate(rows)]
        return {"text": "\n".join(lines) + "\n", "rows": listed}

    def graph(self, group: Group) -> dict[str, Any]:
        """The nodes of rank 0's captured graph, by kind."""
        with self._runtime(group) as runtime:
            if group.rank == 0 or runtime.is_collective:  # else capture is local, and one is shown
                runtime.capture([SHAPE])
                nodes = runtime.graph(1).num_nodes()
            else:
                nodes = {}
            group.barrier("graph shown")
        lines = [f"graph step_shape={SHAPE} num_nodes={sum(nodes.values())}"]
        lines += [f"  {kind:<12} {count}" for kind, count in nodes.items() if count]
        listed = [{"kind": kind, "num_nodes": count} for kind, count in nodes.items()]
        return {"text": "\n".join(lines) + "\n", "rows": listed}

    def _runtime(self, group: Group) -> Runtime:
        choices = {**self._request.choices(), "step_shapes": [SHAPE]}
        if self._request.model is not None:
            folder = self._request.model
            model, recipes, ignore = open_model(folder, max_batch_size=1, dual=self._request.dual != "off")
            plan = make_plan(model.spec(), group.world_size, ANY_DEVICE, **choices)
            return compile_shown(
                model, group, checkpoint=folder, recipes=recipes, ignore=ignore, plan=plan, capture_sizes=()
            )
        spec = synthetic_model(self._request.layers, (("proj", (1024,)),), dtype="float32")
        plan = make_plan(spec, group.world_size, ANY_DEVICE, min_shard_bytes=0, **choices)
        return noop_runtime(spec, plan, group)
