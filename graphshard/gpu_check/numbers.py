"""Bandwidth, overlap and latency on one GPU. On the host the same code runs, and its times mean nothing."""

from __future__ import annotations

import time
from typing import Any

from graphshard.bench.stats import quantile
from graphshard.comm.group import Group, LocalGroup
from graphshard.gpu_check.decoding import (
    BATCH_SIZE,
    Weights,
    compile_llama,
    first_unlike_step,
    llama_config,
    logits_of,
    random_tokens,
    random_weights,
    time_in_turns,
)
from graphshard.gpu_check.limits import check_limits
from graphshard.gpu_check.overlap import check_slow_down
from graphshard.gpu_check.plain import PlainGraph
from graphshard.gpu_check.recorder import Recorder, Row
from graphshard.gpu_check.setup import Setup, by_first, on_threads
from graphshard.models.llama import Llama
from graphshard.runtime.runtime import Runtime

PLACES = (("device memory", False), ("pinned host memory", True))
DEPTHS = (0, 1, 2)


def check_numbers(recorder: Recorder, setup: Setup) -> None:
    """Latency first: a run that is cut short has it."""
    recorder.run("latency of replays", lambda row: _check_latency(row, setup))
    for place, is_pinned in PLACES:

        def bandwidth(row: Row, is_pinned: bool = is_pinned) -> None:
            check_limits(row, setup, is_pinned)

        def slow_down(row: Row, is_pinned: bool = is_pinned) -> None:
            check_slow_down(row, setup, is_pinned)

        def exposed(row: Row, is_pinned: bool = is_pinned) -> None:
            _check_exposed(row, setup, is_pinned)

        recorder.run(f"bandwidth from {place}", bandwidth)
        recorder.run(f"a gemm beside copies from {place}", slow_down)
        recorder.run(f"exposed time by depth, windows in {place}", exposed)


def _model(setup: Setup) -> tuple[Llama, Weights]:
    """Half a GB on a card."""
    config = setup.pick(llama_config(2048, 8192, 4, 16, 8192), llama_config(64, 224, 2, 4, 128))
    model = Llama(config, BATCH_SIZE)
    return model, random_weights(model, setup.torch_device())


def _check_latency(row: Row, setup: Setup) -> None:
    model, weights = _model(setup)
    row.add(weight_bytes=sum(tensor.nbytes for tensor in weights.values()), num_replays=setup.pick(10_000, 200))

    def rank(group: Group) -> None:
        with compile_llama(group, setup, model, weights, units="layer", prefetch_depth=1) as runtime:
            by_first(group, "latency", lambda: _latency(row, setup, runtime))

    on_threads(rank, 2)


def _latency(row: Row, setup: Setup, runtime: Runtime) -> None:
    graph = runtime.graph(batch_size=BATCH_SIZE)
    contenders: dict[str, Any] = {"sharded": graph.replay}
    plain = None
    if setup.is_card:
        plain = PlainGraph(runtime, graph.shape, setup.torch_device())
        contenders["plain"] = plain.replay
    else:
        row.add(why_no_plain_graph="a plain graph needs a CUDA device")
    for name, replay in contenders.items():
        samples = []
        for _ in range(row.values["num_replays"]):
            begin = time.perf_counter()
            replay()
            setup.synchronize()
            samples.append((time.perf_counter() - begin) * 1e6)
        ordered = sorted(samples)
        row.append("latency", {"what": name} | {f"p{q}_us": quantile(ordered, q / 100) for q in (1, 50, 90, 99)})
    row.add(in_a_row=time_in_turns(setup, contenders, setup.pick(50, 3)))
    if plain is not None:
        plain.close()


def _check_exposed(row: Row, setup: Setup, is_pinned: bool) -> None:
    """Sharded at each depth less replicated, over the number of units."""
    reason = setup.why_no_pinned_windows() if is_pinned else None
    if reason is not None:
        row.skip(reason)
    model, weights = _model(setup)
    tokens = random_tokens(model, setup.pick(8, 3))
    with LocalGroup(1) as groups, compile_llama(groups[0], setup, model, weights, plan="replicated") as replicated:
        expected = logits_of(replicated, setup, tokens, "graph")

        def rank(group: Group, depth: int) -> None:
            choices: dict[str, Any] = {"units": "layer", "prefetch_depth": depth, "pinned_windows": is_pinned}
            with compile_llama(group, setup, model, weights, **choices) as runtime:
                by_first(group, "exposed", lambda: measure(runtime, depth))

        def measure(runtime: Runtime, depth: int) -> None:
            at = first_unlike_step(logits_of(runtime, setup, tokens, "graph"), expected)
            row.require(at is None, f"depth {depth} differs from replicated at step {at}")
            replays = {"replicated": replicated.graph(batch_size=BATCH_SIZE), "sharded": runtime.graph(BATCH_SIZE)}
            times = time_in_turns(setup, {name: graph.replay for name, graph in replays.items()}, setup.pick(20, 3))
            exposed_us = (times["sharded"]["us"] - times["replicated"]["us"]) / len(runtime.layout.units)
            row.append("depths", {"depth": depth, "exposed_us_per_unit": exposed_us, "times": times})

        for depth in DEPTHS:

            def at_depth(group: Group, depth: int = depth) -> None:
                rank(group, depth)

            on_threads(at_depth, 2)
