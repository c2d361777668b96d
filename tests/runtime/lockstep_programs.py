"""What ranks of the NCCL tests do; apart from the tests, so that a rank process need not import pytest.

All return [error text, seconds until it came, ...]; under `pull` the same programs run undisturbed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from byte_model import ByteModel
from byte_steps import compile_bytes, wrong_after
from fault_tools import InThread, Latch, gemms_of, until
from small_modules import Stack

import graphshard
from graphshard._core import Calls, DriverError
from graphshard.comm.group import Group
from graphshard.core.errors import CommError
from graphshard.core.specs import StepShape
from graphshard.runtime.bind import Hooks
from graphshard.runtime.model import Segment, StepState
from graphshard.runtime.runtime import Runtime

LAYERS = [[3000, 5], [4000], [5000]]
LIMIT_S = 2.0
"""The longest that a rank waits where it is to give up."""
PATIENT_S = 40.0
"""Where it is to be told earlier than that."""


def compiled(group: Group, model: ByteModel, transport: str = "nccl", **choices: Any) -> Runtime:
    """The byte model, a layer a unit, one unit ahead."""
    defaults: dict[str, Any] = {"units": "layer", "prefetch_depth": 1, "transport": transport, "timeout_s": LIMIT_S}
    return compile_bytes(group, model, **(defaults | choices))


def outcome(call: Callable[[], object]) -> list[Any]:
    """The text of the CommError that `call` raises, and the seconds until then; "" if it raises none."""
    begin = time.monotonic()
    try:
        call()
    except CommError as error:
        return [str(error), time.monotonic() - begin]
    return ["", time.monotonic() - begin]


def stepper(runtime: Runtime, run: str) -> Callable[[], object]:
    """One step, as `run` says."""
    return runtime.graph(1).replay if run == "graph" else (lambda: runtime.run(1))


def skip_a_step(group: Group, skipping: int, run: str, progress: bool, transport: str) -> list[Any]:
    """Rank `skipping` does not come to the third step; what all are told, and what they are refused then."""
    model = ByteModel(LAYERS)
    with compiled(group, model, transport, progress=progress) as runtime:
        act = stepper(runtime, run)
        wrong = [line for _ in range(2) for line in wrong_after(runtime, model, act)]
        if group.rank != skipping:
            first = outcome(act)
            group.barrier("the others gave up")
        else:
            group.barrier("the others gave up")
            first = outcome(act)
        refused = [outcome(call)[0] for call in (act, runtime.capture, lambda: runtime.prefetch(1))]
        group.barrier("all were told")
    return [*first, refused, wrong, runtime.must_exit]


def stop_earlier(group: Group, transport: str) -> list[Any]:
    """Ranks stop after 3, 5, 5 steps; the first to stop goes on with another model."""
    model, other = ByteModel(LAYERS), ByteModel(LAYERS, name="draft")
    with compiled(group, model, transport, timeout_s=PATIENT_S) as runtime, compiled(group, other, transport) as draft:
        act = stepper(runtime, "graph")
        found = ["", 0.0]
        for _ in range(5 if group.rank else 3):
            if found[0] == "":
                found = outcome(act)
        if group.rank == 0:
            runtime.close()
            group.barrier("all stopped")
        else:
            group.barrier("all stopped")
        wrong = wrong_after(draft, other, stepper(draft, "graph"))  # the other communicator is not concerned
        group.barrier("all drafted")
    return [*found, wrong]


def mix_shapes(group: Group) -> list[Any]:
    """Each rank replays a graph of its own batch size; gathers are the same in all of them."""
    model = ByteModel(LAYERS)
    with compiled(group, model, capture_sizes=[1, 2, 4]) as runtime:
        wrong = []
        for number in range(6):
            graph = runtime.graph((1, 2, 4)[(number + group.rank) % 3])
            graph.replay()
            wrong += model.wrong(graph.outputs)
        gathers = {runtime._bound[shape].gathers for shape in runtime.programs}
        return [wrong, len(gathers)]


def mix_runs(group: Group, transport: str) -> list[Any]:
    """Rank 0 replays, the others run eagerly."""
    model = ByteModel(LAYERS)
    with compiled(group, model, transport, timeout_s=PATIENT_S) as runtime:
        runtime.run(1)
        found = outcome(stepper(runtime, "graph" if group.rank == 0 else "eager"))
        group.barrier("all were told")
    return found


def gather_another(group: Group, transport: str) -> list[Any]:
    """Rank 1 gathers layer 1 where the others gather layer 0, of the same size."""
    model = ByteModel([[4096]] * 3)
    with compiled(group, model, transport, timeout_s=PATIENT_S) as runtime:
        unit = 1 if group.rank == 1 else 0
        found = outcome(lambda: runtime.gather_now(unit, 0))
        group.barrier("all were told")
    return found


def swap_runtimes(group: Group, swapped: bool) -> list[Any]:
    """Target and draft, each with a communicator; with `swapped`, rank 1 steps the draft first."""
    target, draft = ByteModel(LAYERS), ByteModel([[700], [800]], name="draft")
    with compiled(group, target) as first, compiled(group, draft) as second:
        acts = [stepper(first, "graph"), stepper(second, "graph")]
        for _ in range(20):
            for act in acts:
                act()
        wrong = target.wrong(first.buffers(StepShape(1), "output")) + draft.wrong(
            second.buffers(StepShape(1), "output")
        )
        if swapped and group.rank == 1:
            acts.reverse()
        told = [outcome(act) for act in acts]
        group.barrier("all were told")
        begin = time.monotonic()
        first.close()
        second.close()
        closed_s = time.monotonic() - begin
    return [told, wrong, closed_s, [first.must_exit, second.must_exit]]


def step_on_two_threads(group: Group) -> list[Any]:
    """Two threads of each rank replay one graph; steps do not meet."""
    model = ByteModel(LAYERS)
    with compiled(group, model, timeout_s=PATIENT_S) as runtime:
        graph = runtime.graph(1)
        threads = [InThread(lambda: [graph.replay() for _ in range(20)]) for _ in range(2)]
        for thread in threads:
            thread.result()
        return [model.wrong(graph.outputs), runtime.num_steps]


def every_order(group: Group, head: str, orders: list[list[str]]) -> list[str]:
    """Eager steps, replays, prefetches and captures follow each other in `orders`."""
    model = ByteModel(LAYERS)
    wrong = []
    with compiled(group, model, head=head, timeout_s=PATIENT_S, capture_sizes=[1, 2]) as runtime:
        acts: dict[str, Callable[[], object]] = {
            "eager": lambda: runtime.run(1),
            "replay": lambda: runtime.graph(1).replay(),
            "prefetch": lambda: runtime.prefetch(1),
            "capture": lambda: (runtime.graph(1).close(), runtime.capture([StepShape(1)])),
            "gather": lambda: runtime.gather_now(0, runtime.plan.residencies[0].slot),
        }
        for order in orders:
            for name in order:
                if name in ("eager", "replay"):
                    wrong += [f"{order}: {line}" for line in wrong_after(runtime, model, acts[name])]
                else:
                    acts[name]()
    return wrong


def stall_inside(group: Group, transport: str) -> list[Any]:
    """The last compute of rank 1's replay stands still for longer than the limit; then a capture is tried."""
    model = ByteModel(LAYERS)
    latch = Latch(is_open=True)
    with compiled(group, model, transport, timeout_s=PATIENT_S, capture_sizes=()) as probe:
        gemms = gemms_of(probe.programs[StepShape(1)])
    stalls = latch.stalls(gemms[0]) if group.rank == 1 else {}
    with compiled(group, model, transport, progress=True, hooks=Hooks(poison=True, stalls=stalls)) as runtime:
        act = stepper(runtime, "graph")
        wrong = wrong_after(runtime, model, act)
        group.barrier("warm")
        latch.close()
        first = outcome(act)
        refused = outcome(runtime.capture)[0] if runtime.is_collective else ""
        group.barrier("all were told")
        latch.open()
    return [*first, refused, wrong]


def end_in_a_step(group: Group, how: str, transport: str) -> list[Any]:
    """Rank 1's process ends, stops, or closes its runtime before the third step."""
    model = ByteModel(LAYERS)
    timeout_s = LIMIT_S if how == "SIGSTOP" else PATIENT_S
    with compiled(group, model, transport, timeout_s=timeout_s) as runtime:
        act = stepper(runtime, "graph")
        act()
        act()
        group.barrier("two steps")
        if group.rank == 1:
            if how == "close":
                runtime.close()
                return ["", 0.0]
            os.kill(os.getpid(), getattr(signal, how))
        found = ["", 0.0]
        for _ in range(3):
            found = found if found[0] else outcome(act)
        if how == "SIGSTOP" and group.rank == 0:
            os.kill(group.processes[1].pid, signal.SIGKILL)
        return found


def refuse_a_launch(group: Group, transport: str) -> list[Any]:
    """Rank 1's driver refuses to launch its step."""
    model, shape = ByteModel(LAYERS), StepShape(1)

    def refuse() -> None:
        raise DriverError("cuGraphLaunch failed: out of luck")

    with compiled(group, model, transport, timeout_s=PATIENT_S) as runtime:
        act = stepper(runtime, "graph")
        act()
        if group.rank == 1:
            bound = runtime._bound[shape]
            act = lambda: runtime.step(shape, bound, refuse, Calls([]))  # noqa: E731
        try:
            found = outcome(act)
        except DriverError as error:
            found = [str(error), 0.0]
        group.barrier("all were told")
    return found


def fail_in_compute(group: Group, run: str, head: str) -> list[Any]:
    """One rank's segment raises in the third step: it is that rank's own affair, and all go on in step."""
    model = ByteModel(LAYERS)
    is_broken = [False]
    segment = model.segments[1]

    def raise_once(state: StepState) -> None:
        if is_broken[0]:
            raise ValueError("a segment's own fault")
        segment.run(state)

    model.segments = (model.segments[0], Segment(segment.spec, raise_once), *model.segments[2:])
    with compiled(group, model, head=head, timeout_s=PATIENT_S) as runtime:
        act = stepper(runtime, run)
        wrong = wrong_after(runtime, model, act)
        is_broken[0] = group.rank == 1
        error = ""
        try:
            act()
        except ValueError as failure:
            error = str(failure)
        is_broken[0] = False
        for other in ("eager", "graph", run):
            wrong += wrong_after(runtime, model, stepper(runtime, other))
        return [error, wrong, runtime.num_steps]


def abort_a_loop(group: Group, head: str) -> list[Any]:
    """Rank 1 gives a loop up after its first layer: what it would have gathered is gathered."""
    model = ByteModel(LAYERS)
    with compiled(group, model, head=head, timeout_s=PATIENT_S) as runtime:
        for number in range(4):
            step = runtime.begin_step(1)
            for layer in range(len(LAYERS)):
                if group.rank == 1 and number == 1 and layer == 1:
                    step.abort()
                    break
                step.before_layer(layer)
                step.after_layer(layer)
            else:
                step.end()
        return [wrong_after(runtime, model, lambda: runtime.run(1)), runtime.num_steps]


def with_another_variable(group: Group, when: str) -> None:
    """Rank 1 has a variable of NCCL's set that the others have not, from the start or from before captures on."""
    if when == "start" and group.rank == 1:
        os.environ["NCCL_GRAPH_MIXING_SUPPORT"] = "1"
    with compiled(group, ByteModel(LAYERS), capture_sizes=[]) as runtime:
        if group.rank == 1:
            os.environ["NCCL_GRAPH_MIXING_SUPPORT"] = "1"
        runtime.capture()


def come_back(group: Group) -> list[str]:
    """Rank 1 ends; a process in its place is told why it cannot come in."""
    with compiled(group, ByteModel(LAYERS), timeout_s=PATIENT_S) as runtime:
        runtime.graph(1).replay()
        group.barrier("a step")
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        until(lambda: runtime._control.state(1) == "dead", "rank 1 has ended")
        return outcome(lambda: graphshard.rejoin_group(group.job, 1, timeout_s=LIMIT_S))[:1]


def attached_forwards(group: Group) -> list[bool]:
    """Whether forwards of a sharded module give the bits of the whole one."""
    generator = torch.Generator().manual_seed(1)  # of its own: ranks may be threads
    module = Stack(3, 16)
    x = torch.randn(2, 16, generator=generator)
    with torch.inference_mode():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        expected = module(x).clone()
        with graphshard.attach(module, group, min_shard_bytes=0, transport="nccl"):
            return [bool(torch.equal(module(x), expected)) for _ in range(3)]
