"""A llama of random weights: made on the device, compiled sharded or replicated, decoded step by step, and timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import graphshard
from graphshard.bench.stats import summarize
from graphshard.comm.group import Group
from graphshard.gpu_check.setup import TIMEOUT_S, Setup
from graphshard.models.config import LlamaConfig
from graphshard.models.llama import Llama
from graphshard.runtime.runtime import Runtime

BATCH_SIZE = 8
NUM_ROUNDS = 12
"""Turns that contenders take in one measurement."""

Weights = dict[str, Tensor]


def llama_config(hidden: int, intermediate: int, num_layers: int, heads: int, vocab_size: int) -> LlamaConfig:
    """A llama in bfloat16 with four query heads to a kv head."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=heads // 4,
        head_dim=hidden // heads,
        dtype="bfloat16",
    )


def random_weights(model: Llama, device: torch.device, seed: int = 0) -> Weights:
    """Weights on the host, drawn on `device`: several GB take seconds there."""
    generator = torch.Generator(device).manual_seed(seed)
    weights = {}
    for spec in model.spec().weights:
        values = torch.randn(spec.shape, generator=generator, device=device, dtype=torch.bfloat16)
        is_norm = spec.name.endswith("norm.weight")
        weights[spec.name] = (1 + values / 10 if is_norm else values / spec.shape[-1] ** 0.5).cpu()
    return weights


def compile_llama(
    group: Group, setup: Setup, model: Llama, weights: Weights, *, pinned_windows: bool = False, **choices: Any
) -> Runtime:
    """The model on this rank (collective)."""
    if not setup.is_card and choices.get("plan") != "replicated":
        choices["min_shard_bytes"] = 0  # the small model has no weight that is worth it
    return graphshard.compile(
        model,
        group,
        checkpoint=weights,
        device=setup.device(group.local_rank, num_ranks=group.world_size, pinned_windows=pinned_windows),
        capture_sizes=[BATCH_SIZE],
        timeout_s=TIMEOUT_S,
        **choices,
    )


def logits_of(runtime: Runtime, setup: Setup, tokens: Tensor, run: str) -> Tensor:
    """Logits of the steps that feed `tokens` `[steps, batch, 1]` from clean caches; `run` is eager or graph."""
    graph = runtime.graph(batch_size=BATCH_SIZE)
    for tensor in runtime.buffers(graph.shape, "cache").values():
        tensor.zero_()
    found = []
    for position, row in enumerate(tokens):
        graph.inputs["tokens"].copy_(row)
        graph.inputs["positions"].fill_(position)
        if run == "graph":
            graph.replay()
        else:
            runtime.run(BATCH_SIZE)
        found.append(graph.outputs["logits"].clone())
    setup.synchronize()
    return torch.stack(found)


def random_tokens(model: Llama, num_steps: int) -> Tensor:
    """`[steps, batch, 1]`."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(model.config.vocab_size, (num_steps, BATCH_SIZE, 1), generator=generator)


def first_unlike_step(found: Tensor, expected: Tensor) -> int | None:
    """The first step whose logits differ in any bit, NaN included; None if none does."""
    for step, (one, other) in enumerate(zip(found, expected, strict=True)):
        if not torch.equal(one.view(torch.int16), other.view(torch.int16)):
            return step
    return None


def time_in_turns(
    setup: Setup, contenders: Mapping[str, Callable[[], object]], num_calls: int
) -> dict[str, dict[str, float]]:
    """For each contender the device's microseconds a call, and the host's for handing it over; medians of rounds."""
    device_us: dict[str, list[float]] = {name: [] for name in contenders}
    host_us: dict[str, list[float]] = {name: [] for name in contenders}
    for call in contenders.values():  # warm
        call()
        setup.synchronize()
    order = list(contenders)
    for turn in range(setup.pick(NUM_ROUNDS, 3)):
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            call = contenders[name]
            setup.synchronize()
            begin = time.perf_counter()
            for _ in range(num_calls):
                call()
            handed_over = time.perf_counter()
            setup.synchronize()
            device_us[name].append((time.perf_counter() - begin) * 1e6 / num_calls)
            host_us[name].append((handed_over - begin) * 1e6 / num_calls)
    return {
        name: {
            "us": summarize(device_us[name]).median,
            "p10_us": summarize(device_us[name]).p10,
            "p90_us": summarize(device_us[name]).p90,
            "host_us": summarize(host_us[name]).median,
        }
        for name in contenders
    }
