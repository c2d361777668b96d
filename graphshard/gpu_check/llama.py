"""A llama of several GB in bfloat16: sharded steps bit-equal to replicated, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from graphshard.comm.group import Group, LocalGroup
from graphshard.core.errors import DeviceError
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
from graphshard.gpu_check.plain import PlainGraph
from graphshard.gpu_check.recorder import Recorder, Row
from graphshard.gpu_check.setup import Setup, by_first, on_threads
from graphshard.models.llama import Llama
from graphshard.runtime.graphs import StepGraph
from graphshard.runtime.runtime import Runtime

NUM_RANKS = 2
MAX_LAUNCH_RATIO = 1.05
"""A replay may cost this much of a plain graph's."""


@dataclass
class _Reference:
    """The replicated runtime, and the logits of its steps."""

    model: Llama
    weights: Weights
    tokens: Tensor
    runtime: Runtime
    logits: Tensor

    @property
    def graph(self) -> StepGraph:
        return self.runtime.graph(batch_size=BATCH_SIZE)


def check_llama(recorder: Recorder, setup: Setup) -> None:
    """Replicated, then sharded over two ranks with windows in device memory and in pinned host memory."""
    made: list[_Reference] = []
    with LocalGroup(1) as groups:
        recorder.run("replicated", lambda row: made.append(_replicated(row, setup, groups[0])))
        for place, is_pinned in (("device memory", False), ("pinned host memory", True)):

            def sharded(row: Row, is_pinned: bool = is_pinned) -> None:
                if not made:
                    row.skip("there is no replicated run to compare with")
                reason = setup.why_no_pinned_windows() if is_pinned else None
                if reason is not None:
                    row.skip(reason)
                on_threads(lambda group: _sharded(row, setup, group, made[0], is_pinned), NUM_RANKS)

            recorder.run(f"sharded, windows in {place}", sharded)
        for reference in made:
            reference.runtime.close()


def _replicated(row: Row, setup: Setup, group: Group) -> _Reference:
    config = setup.pick(llama_config(4096, 14336, 9, 32, 32_000), llama_config(64, 224, 3, 4, 128))
    model = Llama(config, BATCH_SIZE)
    weights = random_weights(model, setup.torch_device())
    row.add(weight_bytes=sum(tensor.nbytes for tensor in weights.values()), num_layers=config.num_layers)
    tokens = random_tokens(model, setup.pick(16, 4))
    runtime = compile_llama(group, setup, model, weights, plan="replicated")
    logits = logits_of(runtime, setup, tokens, "graph")
    row.require(bool(logits.isfinite().all()), "the replicated logits are not finite")
    row.require(
        first_unlike_step(logits_of(runtime, setup, tokens, "eager"), logits) is None, "eager differs from graph"
    )
    return _Reference(model, weights, tokens, runtime, logits)


def _sharded(row: Row, setup: Setup, group: Group, reference: _Reference, is_pinned: bool) -> None:
    with compile_llama(
        group, setup, reference.model, reference.weights, pinned_windows=is_pinned, units="layer", prefetch_depth=1
    ) as runtime:
        by_first(group, "measured", lambda: _measure(row, setup, runtime, reference, is_pinned))


def _measure(row: Row, setup: Setup, runtime: Runtime, reference: _Reference, is_pinned: bool) -> None:
    """Rank 0's; the other's window is all that is needed of it."""
    layout = runtime.layout
    row.add(shard_bytes=layout.shard_bytes, slot_bytes=layout.slot_bytes, num_units=len(layout.units))
    row.require(len(layout.units) > 1, f"the plan shards {len(layout.units)} units")
    for run in ("graph", "eager", "graph"):
        at = first_unlike_step(logits_of(runtime, setup, reference.tokens, run), reference.logits)
        row.append("runs", {"run": run, "first_unlike_step": at})
        row.require(at is None, f"{run} differs from replicated at step {at}")
    _report(row, runtime)
    graph = runtime.graph(batch_size=BATCH_SIZE)
    contenders: dict[str, Any] = {"replicated": reference.graph.replay, "sharded": graph.replay}
    plain = None
    if setup.is_card and not is_pinned:
        plain = PlainGraph(runtime, graph.shape, setup.torch_device())
        _note_nodes(row, plain)
        contenders["plain"] = plain.replay
    else:
        row.add(why_no_plain_graph="windows are on the host" if is_pinned else "a plain graph needs a CUDA device")
    times = time_in_turns(setup, contenders, setup.pick(20, 3))
    exposed_us = (times["sharded"]["us"] - times["replicated"]["us"]) / len(layout.units)
    row.add(times=times, exposed_us_per_unit=exposed_us)
    if plain is not None:
        ratio = times["sharded"]["us"] / times["plain"]["us"]
        row.add(replay_to_plain=ratio, max_ratio=MAX_LAUNCH_RATIO)
        row.require(ratio <= MAX_LAUNCH_RATIO, f"a replay takes {ratio:.3f} x a plain graph of the same nodes")
        plain.close()


def _note_nodes(row: Row, plain: PlainGraph) -> None:
    try:
        row.add(plain_nodes=plain.num_nodes())
    except DeviceError as error:
        row.require(False, str(error))


def _report(row: Row, runtime: Runtime) -> None:
    try:
        report = runtime.graph(batch_size=BATCH_SIZE).report(strict=False, num_launches=20)
    except DeviceError as error:  # what is timed next does not depend on it
        row.require(False, str(error))
        return
    row.add(
        nodes=dict(report.nodes),
        gathers=len(report.gathers),
        gather_copies=report.num_copies,
        gather_bytes=report.num_bytes,
        gather_kernels=report.num_kernels,
        claim=report.claim,
        launch_us=report.launch.median_us if report.launch else None,
    )
    row.require(report.num_kernels == 0, report.claim)
