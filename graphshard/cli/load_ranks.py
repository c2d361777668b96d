"""What rank processes of `bench load` run: entries for `graphshard.comm.launch`, JSON in, JSON out."""

from __future__ import annotations

from typing import Any

import torch

from graphshard.bench.gloo import gloo
from graphshard.bench.load import LoadRequest, measure_load
from graphshard.comm.group import Group

GLOO_TIMEOUT_S = 120.0


def load(group: Group, values: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint by byte ranges on one rank."""
    torch.set_num_threads(1)
    return measure_load(group, LoadRequest(**values))


def fsdp2(group: Group, values: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint by FSDP2 on one rank; `peer` says in which way."""
    from graphshard.bench.load_fsdp2 import measure_fsdp2  # before the baseline: its imports are not what is measured

    torch.set_num_threads(1)
    peer = values.pop("peer")
    with gloo(group, GLOO_TIMEOUT_S):
        return measure_fsdp2(group, LoadRequest(**values), peer)
