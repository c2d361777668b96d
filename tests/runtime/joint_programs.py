"""What ranks of the tests of tensor-parallel steps do; apart from the tests, so that a rank need not import pytest."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from block_model import MODULUS, WIDTH, BlockModel, UpTo
from embed_api import OK, EmbeddedStep
from torch import Tensor

import graphshard
from graphshard.comm.checksums import checksum_of
from graphshard.comm.group import Group
from graphshard.core.specs import StepShape
from graphshard.runtime.bind import Hooks
from graphshard.runtime.evidence.inspection import traced_run
from graphshard.runtime.evidence.sequence import compare_runs
from graphshard.runtime.evidence.traced import TracedStep
from graphshard.runtime.runtime import Runtime

SHAPES = ((1, 1), (2, 1), (2, 3), (4, 3))
"""Step shapes; with `UpTo(4)` the last two gather every block."""


def compiled(group: Group, model: BlockModel, transport: str, **choices: Any) -> Runtime:
    """The model on this rank: blocks tensor-parallel at small step shapes, gathered at large ones."""
    defaults: dict[str, Any] = {
        "checkpoint": model.tensors(),
        "transport": transport,
        "capture_sizes": SHAPES,
        "dual": "auto",
        "chooser": UpTo(4),
        "min_shard_bytes": 0,
        "units": "layer",
        "prefetch_depth": 1,
        "hooks": Hooks(poison=True),
        "timeout_s": 30.0,
    }
    return graphshard.compile(model, group, **(defaults | choices))


def tokens_of(rank: int, step: int, shape: StepShape) -> Tensor:
    """A rank's own tokens."""
    generator = torch.Generator().manual_seed(step * 100 + rank)
    count = shape.batch_size * shape.tokens_per_sequence
    return torch.randint(0, MODULUS, (count, WIDTH), generator=generator).to(torch.float32)


def step_wrong(runtime: Runtime, model: BlockModel, shape: StepShape, number: int, run: str, version: int = 0) -> str:
    """Run a step; what is wrong with its outputs, if anything."""
    tokens = tokens_of(runtime.rank, number, shape)
    runtime.buffers(shape, "input")["tokens"].copy_(tokens)
    if run == "graph":
        runtime.graph(shape.batch_size, shape.tokens_per_sequence).replay()
    else:
        runtime.run(shape.batch_size, shape.tokens_per_sequence)
    result = runtime.buffers(shape, "output")["result"]
    num_slices = runtime.group.world_size if runtime.programs[shape].blocks else 1
    expected = model.expected(tokens, version, num_slices)
    return "" if torch.equal(result, expected) else f"step {number} of {shape} ({run}): {result} is not {expected}"


def all_steps(
    group: Group, transport: str, dual: str, own_ways: bool = False, more: dict[str, Any] | None = None
) -> list[Any]:
    """Every step shape, eager and captured, twice; what was wrong, and what memory was there before and after."""
    model = BlockModel()
    choices: dict[str, Any] = {} if dual == "auto" else {"dual": dual, "chooser": None}
    choices |= more or {}
    with compiled(group, model, transport, **choices) as runtime:
        before = _standing(runtime)
        wrong, number = [], 0
        for _ in range(2):
            for shape in runtime.programs:
                for run in ("eager", "graph"):
                    number += 1
                    if own_ways and (group.rank + number) % 2:
                        run = "eager" if run == "graph" else "graph"
                    wrong.append(step_wrong(runtime, model, shape, number, run))
        assert _standing(runtime) == before
        blocks = [len(program.blocks) for program in runtime.programs.values()]
        group.barrier()
        return [[text for text in wrong if text], blocks, runtime.layout.digest]


def _standing(runtime: Runtime) -> list[Any]:
    """What no step may change: digests, where everything lies, and the bytes of this rank's one shard."""
    shards = runtime.memory.shards
    assert shards is not None
    digests = [runtime.layout.digest, runtime.plan.digest, checksum_of(shards)]
    return [*digests, *(program.digest for program in runtime.programs.values()), *runtime.buffer_table()]


def in_turn(group: Group, transport: str, num_steps: int, last_dtype: str) -> str:
    """Steps of a shape with blocks and of one without, in turn, from one shard: the first that is wrong."""
    model = BlockModel(last_dtype=last_dtype)
    with compiled(group, model, transport) as runtime:
        before = None
        for number in range(num_steps):
            if number == num_steps // 2:
                before = [_standing(runtime), _resident_pages()]
            shape = StepShape(2, 1) if number % 2 else StepShape(2, 3)
            wrong = step_wrong(runtime, model, shape, number, "graph")
            if wrong:
                return wrong
        assert before is not None
        assert _standing(runtime) == before[0]
        grown = _resident_pages() - before[1]
        assert grown < 64 * num_steps, f"{grown} pages more after {num_steps // 2} steps"
        group.barrier()
    return ""


def _resident_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


def update_between(group: Group, transport: str) -> list[str]:
    """New weights between steps of both kinds; slices are the shard."""
    model = BlockModel()
    wrong = []
    with compiled(group, model, transport) as runtime:
        for version in (0, 1, 2):
            if version:
                runtime.update(model.tensors(version))
            for number, shape in enumerate(runtime.programs):
                for run in ("eager", "graph"):
                    wrong.append(step_wrong(runtime, model, shape, number, run, version))
        group.barrier()
    return [text for text in wrong if text]


def capture_again(group: Group) -> list[str]:
    """Step shapes are captured one by one between steps, and closed and captured again; rank 1 is late each time."""
    model = BlockModel()
    wrong = []
    with compiled(group, model, "pull", capture_sizes=[*SHAPES]) as runtime:
        for turn in range(3):
            with runtime.turn.lock:
                runtime.close_graphs()
            for number, shape in enumerate(runtime.programs):
                wrong.append(step_wrong(runtime, model, StepShape(1, 1), number, "eager"))
                if group.rank == 1:
                    time.sleep(0.02 * turn)  # others wait for it; nothing depends on how long
                runtime.capture([shape])
                wrong.append(step_wrong(runtime, model, shape, 10 + number, "graph"))
        group.barrier()
    return [text for text in wrong if text]


def speculate_idly(group: Group, transport: str, run: str) -> list[Any]:
    """Ranks have unlike numbers of requests, and some none: all take steps of the agreed size."""
    model = BlockModel()
    wrong, sizes = [], []
    with compiled(group, model, transport) as runtime, graphshard.speculate(runtime, None, run=run) as speculation:
        assert speculation.is_collective and speculation.needs_agreement
        for number in range(6):
            mine = (number + group.rank) % 3 if number < 5 else 0
            agreed = speculation.agree(mine)
            sizes.append([agreed.batch_size, agreed.is_over])
            if agreed.is_over:
                break
            if not mine:
                speculation.idle(agreed.batch_size, 3 if agreed.batch_size == 4 else 1)
                continue
            step = speculation.graph(agreed.batch_size)
            shape = StepShape(agreed.batch_size)
            tokens = tokens_of(group.rank, number, shape)
            step.target.inputs["tokens"].copy_(tokens)
            step.verify()
            step.commit()
            wrong.append(torch.equal(step.target.outputs["result"], model.expected(tokens)))
        group.barrier()
    return [all(wrong), sizes]


def look_at_graphs(group: Group, transport: str) -> dict[str, Any]:
    """A graph with tensor-parallel blocks, walked: what it says of gathers, and where it differs from an eager run."""
    model = BlockModel()
    with compiled(group, model, transport, hooks=Hooks()) as runtime:
        step = runtime.graph(2)
        told = step.report()
        seen = step.look().seen()
        difference = compare_runs(traced_run(runtime, step.shape), seen)
        calls = [index for index, kind, *_ in runtime._bound[step.shape].op_list.ops() if kind == "call"]
        traced = TracedStep(runtime, step.shape, calls)
        times = traced.replay()
        group.barrier()
        return {
            "gathers": len(told.gathers),
            "difference": difference and difference.text("eager", "graph"),
            "kinds": [f"{op.kind} {op.num_bytes}" for op in seen.ops if op.kind in ("flags", "exchange")],
            "times": len(times),
        }


def replay_from_c(group: Group, transport: str) -> list[str]:
    """C's replays of a shape with blocks, in turn with Python's and with eager steps, on all ranks alike."""
    model, wrong = BlockModel(), []
    shape = StepShape(2, 1)
    with compiled(group, model, transport, capture_sizes=[(2, 1)]) as runtime:
        graph = runtime.graph(2)
        graph.promise_alike()
        step = EmbeddedStep(graph.handle)
        for number, who in enumerate("ccpcecpe"):
            tokens = tokens_of(runtime.rank, number, shape)
            graph.inputs["tokens"].copy_(tokens)
            if who == "c":
                assert step.replay() == OK and step.wait() == OK, step.error
            elif who == "p":
                graph.replay()
            else:
                runtime.run(2)
            if not torch.equal(graph.outputs["result"], model.expected(tokens)):
                wrong.append(f"step {number} ({who})")
        group.barrier()
        step.release()
    return wrong


def built_in_inference_mode(group: Group) -> list[str]:
    """The runtime is made in a mode of torch's in which it is not stepped."""
    model = BlockModel()
    with torch.inference_mode():
        runtime = compiled(group, model, "pull", capture_sizes=[1])
    with runtime:
        wrong = [step_wrong(runtime, model, StepShape(1), number, run) for number, run in enumerate(("eager", "graph"))]
        group.barrier()
    return [text for text in wrong if text]
