"""`graphshard bench load`: a checkpoint by byte ranges: memory, bytes and time, beside plain reads and FSDP2."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from graphshard.bench.load_rows import WAYS, Ranks, Row, load_row, missed, time_share
from graphshard.cli.common import COUNT, Json, Names, Output, Size, answering, rank_values
from graphshard.core.errors import DeviceError
from graphshard.core.sizes import format_bytes
from graphshard.report.tables import table_of

RUN_TIMEOUT_S = 1800.0
AFTER_FAILURE_S = 10.0
SPARE_BYTES = 2**30
"""Left over on the disk, and in memory for the ranks themselves."""
PEERS = ("read", "fsdp2")
COLUMNS = {
    "what": "what",
    "size": "checkpoint",
    "peak_bytes": "peak",
    "limit_bytes": "limit",
    "bytes_read": "read",
    "x_checkpoint": "x",
    "seconds": "s",
    "spread": "p10-p90",
    "n": "n",
    "cpu_s": "cpu s",
    "GBps": "GB/s",
    "x_read": "x plain",
}

JSON_HELP = """JSON keys: `peak_bytes` (the highest sum over ranks of anonymous and shared memory, shared pages once as
in PSS, sampled every 50 ms while the model is compiled, less what they held when all was imported), `limit_bytes`
(chunks + resident + 64 MiB, of all ranks), `pss_bytes` (of all ranks when they are done and stand still, less what it
was), `bytes_read` (as the loader counts, all ranks), `checkpoint_bytes`, `seconds` (open, account, reserve, fill: from
a barrier to the slowest rank, the median), `x_read` (over the plain read, the median over turns), `num_wrong`,
`missed` (targets, a line each), `peers` and `rows` {what, seconds, p10_s, p90_s, n, samples_s, cpu_s (all ranks), GBps,
bytes_read, peak_bytes, pss_bytes, limit_bytes} (FSDP2 is timed while it is sampled, bytes it reads are pages of the
files that it touched), `why_not` (peers that were left out, and why); of one rank:
`chunk_bytes`, `slot_bytes`, `resident_bytes`, `temporary_bytes`, `num_threads`, `ways`."""


@click.command("load", epilog=JSON_HELP)
@click.option("--size", type=Size(), default="4GiB", show_default=True, help="Of the checkpoint that is made for it.")
@click.option("--world-size", type=COUNT, default=4, show_default=True, help="Rank processes.")
@click.option("--peers", type=Names(PEERS), default=",".join(PEERS), show_default=True, help="What else is timed.")
@click.option("--fsdp2-size", type=Size(), default="1GiB", show_default=True, help="Of the checkpoint beside FSDP2.")
@click.option("--num-files", type=COUNT, default=4, show_default=True, help="Of the checkpoint.")
@click.option("--folder", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Where files are made.")
@click.option("--repeats", type=COUNT, default=3, show_default=True, help="Times that a load is timed.")
@answering
def command(
    out: Output,
    size: int,
    world_size: int,
    peers: list[str],
    fsdp2_size: int,
    num_files: int,
    folder: Path | None,
    repeats: int,
) -> bool:
    """Load a synthetic checkpoint on rank processes, each its own bytes; weights are fused by recipes.

    A plain read gets each rank's equal share of the files with preadv, by as many threads, into fresh memory that holds
    it, of the kind that peers can map, reserved within the time, as the loader's is. `private` is the same into memory
    that they cannot map, `again` into one small buffer, over and over. Files are in the page cache, and removed
    afterwards. Exit code 1: a target was missed (memory, bytes, 1.3 x the plain read's time), or a byte is wrong.
    """
    job = _Job(out, Path(folder or tempfile.gettempdir()), num_files, world_size)
    with job.checkpoint(size) as request:
        ranks = job.run("load", {**request, "num_repeats": repeats})
    rows = _rows(ranks, peers)
    why_not: dict[str, str] = {}
    if "fsdp2" in peers:
        reason = _why_not_fsdp2()
        if reason is None:
            rows += _beside_fsdp2(job, fsdp2_size)
        else:
            why_not["fsdp2"] = reason
    return _answer(out, rows, ranks, why_not, f"load, {world_size} ranks, {num_files} files")


class _Job:
    """Makes checkpoints and runs ranks over them."""

    def __init__(self, out: Output, folder: Path, num_files: int, world_size: int) -> None:
        self._out, self._folder, self._num_files, self._world_size = out, folder, num_files, world_size

    @contextmanager
    def checkpoint(self, num_bytes: int) -> Iterator[Json]:
        """The request of a checkpoint of about `num_bytes`, which is removed afterwards."""
        from graphshard.bench.synthetic import SyntheticModel, write_checkpoint  # imports torch

        model = SyntheticModel.of_size(num_bytes)
        _check_room(self._folder, model.num_bytes)
        with tempfile.TemporaryDirectory(prefix="graphshard-load-", dir=self._folder) as folder:
            begin = time.perf_counter()
            write_checkpoint(Path(folder), model, self._num_files)
            seconds = time.perf_counter() - begin
            self._out.say(f"{format_bytes(model.num_bytes)} in {self._num_files} files were made in {seconds:.1f} s")
            yield {"folder": folder, "width": model.width, "num_layers": model.num_layers, "num_repeats": 1}

    def run(self, entry: str, request: Json) -> list[Any]:
        """What each rank's `entry` of `load_ranks` found."""
        entry = f"graphshard.cli.load_ranks:{entry}"
        return rank_values(self._out, entry, self._world_size, request, RUN_TIMEOUT_S, AFTER_FAILURE_S)


def _check_room(folder: Path, num_bytes: int) -> None:
    """DeviceError unless the disk takes the files, and memory both their pages and what is loaded of them."""
    need, free = num_bytes + SPARE_BYTES, shutil.disk_usage(folder).free
    if need > free:
        raise DeviceError(
            f"{folder} has {format_bytes(free)} free, {format_bytes(need)} are needed: use another --folder, or a "
            "smaller --size"
        )
    need, free = 2 * num_bytes + SPARE_BYTES, _available_bytes()
    if need > free:
        raise DeviceError(
            f"{format_bytes(free)} of memory are available, {format_bytes(need)} are needed for the files' pages and "
            "what is loaded of them: use a smaller --size"
        )


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _why_not_fsdp2() -> str | None:
    """Why FSDP2 cannot be measured here, or None."""
    import torch

    if importlib.util.find_spec("safetensors") is None:
        return "safetensors is not installed: pip install 'graphshard[demo]'"
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        return f"torch {torch.__version__} is built without torch.distributed over gloo"
    return None


def _rows(ranks: Ranks, peers: Sequence[str]) -> list[Row]:
    """Ours, judged, and the plain reads."""
    if "read" not in peers:
        return [load_row("graphshard", ranks)]
    runs = {"graphshard": "load", "plain read": "read", "private": "private", "again": "again"}
    return [load_row(what, ranks, run) | {"x_read": time_share(ranks, run)} for what, run in runs.items()]


def _beside_fsdp2(job: _Job, size: int) -> list[Row]:
    """Both on one checkpoint, each in processes of its own."""
    with job.checkpoint(size) as request:
        rows = [load_row("graphshard", job.run("load", request))]
        return rows + [load_row(peer, job.run("fsdp2", {**request, "peer": peer})) for peer in WAYS]


def _answer(out: Output, rows: list[Row], ranks: Ranks, why_not: Json, title: str) -> bool:
    """Say and write all there is to say; whether every target was met."""
    ours, num_wrong = rows[0], sum(rank["num_wrong"] for rank in ranks)
    too_much = missed(ours, num_wrong)
    shown = [
        {**row, "spread": f"{row['p10_s']:.3g}-{row['p90_s']:.3g}", "size": format_bytes(row["checkpoint_bytes"])}
        for row in rows
    ]
    out.say(table_of(shown, COLUMNS, f"{title}, {ranks[0]['num_threads']} threads a rank"))
    for peer, how in (*WAYS.items(), *why_not.items()):
        if peer in why_not or any(row["what"] == peer for row in rows):
            out.say(f"  {peer}: {how}")
    for line in too_much:
        out.say(f"MISSED: {line}")
    if not too_much:
        judged = "memory and bytes" if ours["x_read"] is None else "memory, bytes and time"
        out.say(f"{judged} are within their limits, and every byte is the checkpoint's")
    keys = ("chunk_bytes", "slot_bytes", "resident_bytes", "temporary_bytes", "num_threads", "ways")
    facts = {key: ranks[0][key] for key in keys}
    facts |= {"num_wrong": num_wrong, "missed": too_much, "why_not": why_not}
    out.emit(rows, **_without(ours, "what"), **facts, peers=rows[1:])
    return not too_much


def _without(row: Row, key: str) -> Row:
    return {name: value for name, value in row.items() if name != key}
