"""What a rank of `graphshard calibrate` runs: all ranks measure at once, since they share the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from graphshard.bench.calibrate import contention, copy_us, fan_out_us, gemm_times, launch_cost
from graphshard.bench.pieces import NUM_WARMUPS, Pieces, PieceTimer, build_split, time_pieces
from graphshard.comm.group import Group
from graphshard.core.specs import StepShape
from graphshard.models.llama import Llama, load_llama

TIMEOUT_S = 60.0
PEAK_SIZE = 1024
PEAK_DTYPES = ("float32", "bfloat16")
RUNS: dict[str, dict[str, Any]] = {
    "replicated": {"replicated": True},
    "gathered": {"units": "weight", "prefetch_depth": 0, "executor": "cooperative"},
    "layers": {"units": "layer", "prefetch_depth": 0, "executor": "cooperative"},
}
"""Of the last only the gathers count: a layer is more than a cache holds."""


def calibrate(group: Group, values: dict[str, Any]) -> dict[str, Any]:
    """Everything that this rank measured, as plain data."""
    torch.set_num_threads(1)
    folder, sizes, repeats = Path(values["model"]), values["batch_sizes"], values["repeats"]
    model = load_llama(folder, max(sizes), values["cache_length"])
    replays = len(RUNS) * len(sizes) * (NUM_WARMUPS + repeats)
    with _progress(group.rank == 0, replays + 5) as on_done:
        pieces = _pieces(group, model, folder, sizes, repeats, lambda: on_done(1))
        copies = copy_us(group, repeats)
        on_done(1)
        fan_out = fan_out_us(group, repeats)
        on_done(1)
        launch = launch_cost(group, repeats)
        on_done(1)
        cold, hot = gemm_times(group, _gemm_shapes(model, sizes), repeats)
        on_done(1)
        config = model.config
        beside = contention(group, config.intermediate_size, config.hidden_size)
        on_done(1)
        group.barrier("calibrated")
    return {
        "model": model.spec().digest,
        "pieces": [{"run": run, "batch_size": size, **asdict(one)} for (run, size), one in pieces.items()],
        "copy_us": copies,
        "fan_out_us": fan_out,
        "launch": asdict(launch),
        "gemm": [[*shape, us] for shape, us in cold.items()],
        "gemm_cached": [[*shape, us] for shape, us in hot.items()],
        "contention": asdict(beside),
    }


def _pieces(
    group: Group, model: Llama, folder: Path, sizes: list[int], repeats: int, on_replay: Callable[[], None]
) -> dict[tuple[str, int], Pieces]:
    """Segments of the replicated step, and of one whose weights were gathered just before; and its gathers."""
    with ExitStack() as stack:
        timers: dict[tuple[str, int], PieceTimer] = {}
        for run, options in RUNS.items():
            runtime = stack.enter_context(build_split(model, group, folder, sizes, TIMEOUT_S, **options))
            for size in sizes:
                timers[run, size] = PieceTimer(runtime, StepShape(size))
        found = time_pieces(timers, repeats, on_replay)
        group.barrier("pieces measured")
        return found


def _gemm_shapes(model: Llama, sizes: list[int]) -> list[tuple[int, int, int, str]]:
    """Of the model's matrices at each batch size, and a large square one of each dtype for the peak."""
    shapes = {(weight.shape, weight.dtype) for weight in model.spec().weights if len(weight.shape) == 2}
    found = [(m, n, k, dtype) for (n, k), dtype in sorted(shapes) for m in sizes]
    return found + [(PEAK_SIZE, PEAK_SIZE, PEAK_SIZE, dtype) for dtype in PEAK_DTYPES]


@contextmanager
def _progress(show: bool, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error."""
    if not show:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("calibrating", total=total)
        yield lambda count: bar.advance(task, count)
