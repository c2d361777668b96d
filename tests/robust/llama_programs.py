"""Rank processes that generate with the real model until told to stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from signs import is_ordered, tell

import graphshard
from graphshard.bench.decode import clear_state, decode
from graphshard.comm.group import Group
from graphshard.models.llama import load_llama

PROMPTS = [[1, 504, 2365, 6354, 16438], [1, 3725, 28, 451, 359]]
NUM_TOKENS = 8
CACHE_LENGTH = 16


def generate(group: Group, folder: str, model_folder: str) -> dict[str, Any]:
    """Rank r continues prompt r mod 2 again and again; every time must give the same logits, bit for bit."""
    torch.set_num_threads(1)
    place = Path(model_folder)
    model = load_llama(place, 1, CACHE_LENGTH)
    found: set[tuple[str, ...]] = set()
    tokens: list[list[int]] = []
    prompt = PROMPTS[group.rank % 2]
    with graphshard.compile(model, group, checkpoint=place, capture_sizes=[1], timeout_s=60.0) as runtime:
        step = runtime.graph(batch_size=1)
        times = 0
        while not times or not is_ordered(folder, "stop"):
            clear_state(runtime, step.shape)
            done = decode(step, [prompt], NUM_TOKENS, num_positions=CACHE_LENGTH)
            found.add(tuple(done.hashes))
            tokens = done.tokens
            times += 1
            if times == 1:
                tell(folder, "ready")
        return {"hashes": sorted(found), "tokens": tokens, "times": times, "pinned": runtime.pinned_by_dead()}
