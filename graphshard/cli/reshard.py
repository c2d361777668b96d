"""`graphshard reshard`: shard files for another number of ranks, or a plain checkpoint, made of shard files."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from graphshard.cli.common import Output, answering, check_writable
from graphshard.cli.planning import RANKS
from graphshard.core.counts import counted
from graphshard.core.sizes import format_bytes
from graphshard.load.progress import byte_bar
from graphshard.load.reshard import reshard
from graphshard.load.shard_manifest import MANIFEST_NAME
from graphshard.load.shard_reader import ShardReader
from graphshard.load.unshard import unshard

JSON_HELP = """JSON keys: `rows` {file, num_bytes} of what was written; `world_size` of OUT (null for a checkpoint) and
`from_world_size`, `epoch`, `bytes_read`, `bytes_written`, `seconds`."""


@click.command("reshard", epilog=JSON_HELP)
@click.argument("source", metavar="IN", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--world-size", type=RANKS, help="Ranks that OUT, a new folder, is for.")
@click.option("--to-checkpoint", is_flag=True, help="Make OUT a safetensors file of whole weights instead.")
@answering
def command(out: Output, source: Path, target: Path, world_size: int | None, to_checkpoint: bool) -> None:
    """Turn the shard files in the folder IN (`Runtime.save_shards`) into ones for another number of ranks.

    Needs no GPU, no ranks and a few MiB of memory. Units stay as they are; every byte that is read is verified by its
    checksum. OUT is whole or it is not there: the manifest, or the checkpoint's name, comes last.
    """
    if (world_size is None) is not to_checkpoint:
        raise click.UsageError("give one of --world-size, for shard files, and --to-checkpoint, for a plain checkpoint")
    if to_checkpoint:
        check_writable("OUT", target)
    begin = time.perf_counter()
    with byte_bar() as bar, ShardReader(source, bar.step) as reader:
        bar.begin("resharding", reader.num_bytes)
        if world_size is None:
            files = {target: unshard(reader, target)}
        else:
            result = reshard(reader, target, world_size)
            names = [*(result.file_name(rank) for rank in range(world_size)), MANIFEST_NAME]
            files = {target / name: (target / name).stat().st_size for name in names}
        found: dict[str, Any] = {
            "world_size": world_size,
            "from_world_size": reader.manifest.world_size,
            "epoch": reader.manifest.epoch,
            "bytes_read": reader.num_bytes_read,
            "bytes_written": sum(files.values()),
            "seconds": time.perf_counter() - begin,
        }
    what = "a checkpoint" if world_size is None else f"shard files for {counted(world_size, 'rank')}"
    source_ranks = counted(found["from_world_size"], "rank")
    read, written = format_bytes(found["bytes_read"]), format_bytes(found["bytes_written"])
    rate = found["bytes_read"] / found["seconds"] / 1e9
    out.say(
        f"wrote {target}: {what}, {written}, of those for {source_ranks} (epoch {found['epoch']}); "
        f"{read} read and verified in {found['seconds']:.2f} s ({rate:.2f} GB/s)"
    )
    out.emit([{"file": str(file), "num_bytes": num_bytes} for file, num_bytes in files.items()], **found)
