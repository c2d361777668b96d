"""What a rank of `graphshard tune` runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import graphshard
from graphshard.bench.merging import measured_rates, merging_note
from graphshard.bench.tune import OnMeasured, TuneRequest, tune
from graphshard.comm.group import Group
from graphshard.core.plan import Mode, Transport
from graphshard.core.specs import DeviceSpec
from graphshard.cost.auto_plan import figures_of
from graphshard.cost.hardware_file import named_hardware
from graphshard.cost.merged import Rates, rates_of
from graphshard.device import open_device
from graphshard.models.open import OpenedModel, load_config, open_model
from graphshard.report.machine import machine_facts
from graphshard.runtime.model import SegmentedModel
from graphshard.runtime.runtime import Runtime
from graphshard.schedule.tune_file import tune_content

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class TuneJob:
    """What was asked for; the same on all ranks."""

    path: str
    model: str
    tokens: list[int]
    num_steps: int
    num_layers: int
    cache_length: int
    transport: Transport
    device: str
    choices: dict[str, Any]
    """Of `make_plan`."""
    hardware: str | None


def measure(group: Group, values: dict[str, Any]) -> dict[str, Any]:
    """The whole file, as plain data; rank 0 has written it."""
    torch.set_num_threads(1)
    job = TuneJob(**values)
    folder = Path(job.model)
    opened = open_model(folder, max(job.tokens), job.cache_length, dual=True)
    device = open_device(job.device, num_ranks=group.world_size, local_rank=group.local_rank).spec()
    merged = merging_note(opened.model.spec(), job.tokens, group.world_size, _rates(group, job, device))
    request = TuneRequest(
        path=Path(job.path),
        tokens=tuple(job.tokens),
        num_steps=job.num_steps,
        num_layers=job.num_layers,
        transport=job.transport,
        device_kind=device.kind,
        device=device.name,
        settings={"cache_length": job.cache_length, **job.choices},
        notes={"machine": machine_facts(), "merged": merged},
        vocab_size=load_config(folder).vocab_size,
    )
    with _progress(group.rank == 0) as on_measured:
        tuned = tune(group, opened.model, _Builder(group, job, opened), request, on_measured)
    return tune_content(tuned)


@dataclass(frozen=True)
class _Builder:
    """Runtimes of a part of the opened model; what they load is of its folder."""

    group: Group
    job: TuneJob
    opened: OpenedModel

    def __call__(self, model: SegmentedModel, mode: Mode, tokens: Sequence[int]) -> Runtime:
        """With every block in `mode`."""
        kept = {weight.name for weight in model.spec().weights}
        return graphshard.compile(
            model,
            self.group,
            checkpoint=self.job.model,
            recipes={name: recipe for name, recipe in self.opened.recipes.items() if name in kept},
            ignore="*",  # the layers that are left out
            capture_sizes=tokens,
            device=self.job.device,
            timeout_s=TIMEOUT_S,
            transport=self.job.transport,
            dual=mode,
            **self.job.choices,
        )


def _rates(group: Group, job: TuneJob, device: DeviceSpec) -> Rates | None:
    """Of a given machine, of this one as measured, or of a GPU by its name; None if nothing is known of it."""
    if job.hardware is not None:
        return rates_of(named_hardware(job.hardware))
    if device.kind == "host":
        return measured_rates(group, job.transport) if group.world_size > 1 else None
    figures = figures_of(device)
    return None if figures is None else rates_of(figures)


@contextmanager
def _progress(show: bool) -> Iterator[OnMeasured]:
    """A bar on standard error, a measurement at a time."""
    if not show:
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("measuring", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
