"""`graphshard.compile` as commands call it: rank 0 shows how far its load is, where there is a terminal."""

from __future__ import annotations

from typing import Any

import graphshard
from graphshard.comm.group import Group
from graphshard.load.progress import load_bar
from graphshard.runtime.model import SegmentedModel
from graphshard.runtime.runtime import Runtime


def compile_shown(model: SegmentedModel, group: Group, **options: Any) -> Runtime:
    """A runtime; `options` are those of `graphshard.compile`."""
    with load_bar(group.rank) as on_load:
        return graphshard.compile(model, group, on_load=on_load, **options)
