"""The largest magnitudes of a weight of which each rank has rows: those of the whole, or one error on all ranks."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from ranks import run_on_ranks, try_on_ranks
from server_modules import PARTS, WIDTH, checkpoint_of, loaded, qkv, server_model

from graphshard.comm.group import Group

QKV = "layers.0.qkv.weight"


def amax_rank(group: Group) -> list[Any]:
    prepared = loaded(group)
    rows, tensor = prepared.rows[QKV], checkpoint_of(server_model(PARTS, WIDTH, "cpu"))
    whole = tensor[QKV].float().abs()
    amax = prepared.combined_amax(QKV)
    by_part = [float(prepared.combined_amax(QKV, shard_id=part)) for part in "qkv"]
    channel = prepared.combined_amax(QKV, per="channel")
    return [
        amax.shape == (1,) and float(amax) == float(whole.max()),
        by_part == [float(part.max()) for part in whole.split(PARTS)],
        torch.equal(channel, whole.amax(dim=1)[slice(*rows)]),
    ]


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_amax_of_rows_is_that_of_the_whole_and_of_each_part(world_size: int) -> None:
    assert run_on_ranks(amax_rank, world_size) == [[True] * 3] * world_size


def bad_amax_rank(group: Group) -> None:
    prepared = loaded(group)
    if group.rank == 1:
        qkv(prepared).weight.data[0, 0] = float("nan")
    prepared.combined_amax(QKV)


def unknown_amax_rank(group: Group, name: str, shard_id: str | None) -> None:
    loaded(group).combined_amax(name, shard_id=shard_id)


@pytest.mark.parametrize(
    ("name", "shard_id", "expected"),
    [("embed.weight", None, "'embed.weight' is not kept by rows; those are"), (QKV, "z", "has no part 'z'; known")],
)
def test_amax_of_what_is_not_there_is_the_same_error_on_all(name: str, shard_id: str | None, expected: str) -> None:
    for outcome in try_on_ranks(unknown_amax_rank, 2, name, shard_id):
        assert f"amax of {name} failed on rank 0 (and on rank 1): weight" in outcome.error, outcome
        assert expected in outcome.error


def test_a_nan_in_one_ranks_rows_is_everybodys_error() -> None:
    for outcome in try_on_ranks(bad_amax_rank, 2):
        assert outcome.error_type == "LoadError" and re.search(r"rank 1: weight layers\.0\.qkv\.weight", outcome.error)
