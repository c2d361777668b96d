"""What rank processes run for the command line: entries for `graphshard.comm.launch`, JSON in, JSON out."""

from __future__ import annotations

from typing import Any

from graphshard.comm.group import Group


def gather(group: Group, request: dict[str, Any]) -> list[dict[str, object]]:
    """`bench gather` on one rank."""
    from graphshard.bench.gather import GatherRequest, measure_gather

    return measure_gather(group, GatherRequest(**request))
