"""torch's own process group beside ours, for the peers that need one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch

from graphshard.comm.group import Group


@contextmanager
def gloo(group: Group, timeout_s: float) -> Iterator[None]:
    """`torch.distributed` over gloo and the same ranks (collective); they meet over a file: no port to collide with."""
    with tempfile.TemporaryDirectory() as folder:
        told = group.all_gather(folder, name="gloo's folder")
        store = Path(str(told[0][0])) / "store"
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=group.rank,
            world_size=group.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        try:
            yield
        finally:
            torch.distributed.destroy_process_group()
