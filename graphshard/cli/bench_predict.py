"""`bench step --predict`: what the cost model says of each row, beside what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graphshard.bench.step_rows import label_of
from graphshard.cli.common import Output
from graphshard.cli.planning import ANY_DEVICE
from graphshard.core.specs import StepShape
from graphshard.cost.hardware import HardwareSpec
from graphshard.cost.host_step import predict_step
from graphshard.cost.plain import plain_facts
from graphshard.cost.timeline import Prediction
from graphshard.report.tables import table_of
from graphshard.schedule.auto import make_plan

CLOSE = 0.2
"""A prediction is close if it is off by no more than this share of what was measured."""
COLUMNS = {
    "batch_size": "batch",
    "what": "run unit/depth/executor",
    "predicted_ms": "ms predicted",
    "median_ms": "measured",
    "spread": "spread",
    "predicted_ratio": "predicted / measured",
    "cpu_ms": "cpu ms",
    "predicted_ratio_cpu": "predicted / cpu",
}
PREDICTED_RUNS = ("replicated", "graph")
"""Captured steps. What Python adds to eager ones, and peers, are not part of the model."""


class Predictor:
    """Predicts steps of a llama checkpoint on a calibrated machine."""

    def __init__(
        self, folder: Path, world_size: int, max_batch_size: int, cache_length: int, hardware: HardwareSpec
    ) -> None:
        from graphshard.models.llama import load_llama  # imports torch

        self._spec = load_llama(folder, max_batch_size, cache_length).spec()
        self._hardware = hardware
        self._facts, self._world_size = plain_facts(self._spec, world_size), world_size

    def step(self, batch_size: int, **options: Any) -> Prediction:
        """One step of the plan that `make_plan` makes of `options`.

        Raises:
            SpecError: the hardware has no figures for the model's dtype or the transport.
        """
        shape = StepShape(batch_size)
        plan = make_plan(self._spec, self._world_size, ANY_DEVICE, step_shapes=[shape], **options)
        return predict_step(self._spec, self._facts, plan, shape, self._hardware)


def add_predictions(rows: Sequence[dict[str, Any]], predictor: Predictor) -> None:
    """Give each row `predicted_ms`, its ratio to the measured time and to the processor time, and the launches' spread.

    `spread` is (slowest - fastest) / median of the launches' medians. Rows that are not predicted have None.
    """
    for row in rows:
        medians = row["launch_medians_ms"]
        row["spread"] = (max(medians) - min(medians)) / row["median_ms"]
        row["predicted_ms"] = row["predicted_ratio"] = row["predicted_ratio_cpu"] = None
        if row["run"] not in PREDICTED_RUNS:
            continue
        options = {"replicated": True}
        if row["run"] != "replicated":
            options = {"units": row["unit"], "prefetch_depth": row["prefetch_depth"]}
        ms = predictor.step(row["batch_size"], executor=row["executor"], **options).duration_us / 1e3
        row["predicted_ms"] = ms
        row["predicted_ratio"] = ms / row["median_ms"]
        row["predicted_ratio_cpu"] = ms / row["cpu_ms"] if row["executor"] == "cooperative" else None


def say_predictions(out: Output, rows: Sequence[dict[str, Any]]) -> None:
    """A row for each that is predicted, and how many are close."""
    shown = [
        {**row, "what": label_of(row), "spread": f"{row['spread']:.0%}"}
        for row in rows
        if row["predicted_ms"] is not None
    ]
    out.say()
    out.say(table_of(shown, COLUMNS, "predicted; spread is (slowest - fastest) / median of the launches"))
    out.say(verdict(rows))


def verdict(rows: Sequence[dict[str, Any]]) -> str:
    """How many predictions are close, and the worst."""
    judged = [row for row in rows if row["predicted_ms"] is not None]
    if not judged:
        return "predicted: no row"
    close = [row for row in judged if abs(row["predicted_ratio"] - 1) <= CLOSE]
    worst = max(judged, key=lambda row: abs(row["predicted_ratio"] - 1))
    return (
        f"predicted: {len(close)} of {len(judged)} rows within {CLOSE:.0%} of the measured time; the worst is "
        f"{worst['predicted_ratio']:.2f} times as long ({worst['run']} {worst['unit'] or ''} at batch "
        f"{worst['batch_size']})"
    )
