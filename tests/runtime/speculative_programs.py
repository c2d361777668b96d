"""What ranks of the speculation tests do; for threads and processes alike: arguments and results are JSON."""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing
from dataclasses import replace
from typing import Any
from unittest import mock

from byte_model import ByteModel
from byte_steps import compile_bytes
from fault_tools import until
from lockstep_programs import outcome
from speculative_rig import DRAFT_LAYERS, OwnOps, Pair, Recorder, traced, words

import graphshard
from graphshard._core import DriverError
from graphshard.comm.group import Group
from graphshard.core.errors import DeviceError, GraphshardError
from graphshard.core.specs import StepShape
from graphshard.device.host import HostDevice
from graphshard.runtime.bind import Hooks
from graphshard.runtime.build import agree_on_device, build_runtime
from graphshard.runtime.compiled import Compiled, compile_plan
from graphshard.runtime.runtime import Runtime
from graphshard.runtime.weights.fill import SourceFiller
from graphshard.runtime.weights.recipe_source import RecipeSource
from graphshard.runtime.weights.tensors_in_hand import TensorsInHand
from graphshard.schedule.auto import make_plan

SIZES = [1, 8, 16]


class NoMemory:
    """While a context, devices have memory unless `is_gone`."""

    def __init__(self) -> None:
        self.is_gone = False
        self.num_refused = 0

    def __enter__(self) -> NoMemory:
        allocate = HostDevice.allocate

        def allocate_or_refuse(device: HostDevice, *arguments: Any, **more: Any) -> Any:
            if self.is_gone:
                self.num_refused += 1
                raise DeviceError("no memory is left")
            return allocate(device, *arguments, **more)

        self._patch = mock.patch.object(HostDevice, "allocate", allocate_or_refuse)
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


def two_runtimes(group: Group, transport: str, run: str) -> dict[str, Any]:
    """Two runtimes over one group: stepped in turn, a prefetch of one while the other steps, each updated."""
    with Pair(group, transport, run=run) as pair:
        wrong = [line for _ in range(3) for line in pair.step()]
        for name, runtime in pair.runtimes().items():
            runtime.update(pair.models[name].tensors(1))
            pair.versions[name] = 1
            wrong += pair.step()
        pair.draft.prefetch(1)
        pair.target.run(1)
        return {"wrong": wrong, "epochs": [runtime.epoch for runtime in pair.runtimes().values()]}


def issue_what_sequences_say(group: Group, transport: str, run: str, head: str, replays: int) -> list[list[Any]]:
    """Steps of every kind: [kind, what was issued, what the sequence of that kind says, what was wrong]."""
    with Pair(group, transport, run=run, head=head, num_draft_replays=replays) as pair:
        recorder, found = Recorder(pair), []

        def add(kind: str, wrong: list[str]) -> None:
            sequence = pair.spec.sequences.get(kind, pair.spec.sequences["step"])
            found.append([kind, recorder.take(), words(sequence), wrong])

        pair.spec.discard()
        pair.target.discard_prefetch()  # what its capture gathered
        recorder.take()
        add("cold", pair.step())
        add("step", pair.step())
        add("step", pair.step())
        add("skip", pair.step(skip=True))
        add("skip", pair.step(skip=True))
        add("step", pair.step())
        pair.spec.discard()
        pair.spec.discard()
        add("cold", pair.step())
        return found


def idle_in_the_middle(group: Group, transport: str, run: str, num_idle: int) -> dict[str, Any]:
    """Rank 1 has no requests at first, and again in the middle; batches of 1, 7, 16 and 0 elsewhere."""
    with Pair(group, transport, run=run, sizes=SIZES) as pair:
        trace, wrong = traced(pair), []
        for number in range(3 * num_idle):
            size = (1, 7, 16, 0)[(number + group.rank) % 4]
            if group.rank == 1 and number // num_idle != 1:
                size = 0
            if size:
                wrong += pair.step(size)
            else:
                pair.spec.idle()
        return {"wrong": wrong, "trace": trace, "needs_agreement": pair.spec.needs_agreement}


def idle_without_memory(group: Group, run: str, memory: NoMemory) -> dict[str, Any]:
    """No device has memory left once all ranks speculate. For ranks that are threads."""
    with Pair(group, "nccl", run=run, sizes=SIZES) as pair:
        group.barrier("all speculate")
        memory.is_gone = True
        wrong = pair.step()
        for number in range(6):
            if (number + group.rank) % 2:
                pair.spec.idle(16)
            else:
                wrong += pair.step(16)
        for tensor in pair.spec.graph(16).target.inputs.values():
            tensor.fill_(7)
        with OwnOps() as own:
            pair.spec.idle(16)
        left = {name: int(tensor.abs().max()) for name, tensor in pair.spec.graph(16).target.inputs.items()}
        group.barrier("all idled")
        memory.is_gone = False
        group.barrier("all close")
    return {"wrong": wrong, "left": left, "refused": memory.num_refused, "ops": sorted(own.names)}


def by_agreed_sizes(group: Group, follow: bool) -> dict[str, Any]:
    """Programs differ by step shape: ranks choose by the agreed size, or each by its own."""
    target = _unlike_by_shape(group)
    model = ByteModel(DRAFT_LAYERS, name="draft")
    draft = compile_bytes(group, model, capture_sizes=[1, 8], transport="nccl", head="outside", timeout_s=20.0)
    sizes, seconds = [], []
    with graphshard.speculate(target, draft, run="eager") as spec:
        told = ["", 0.0]
        for mine in (1, 8, 0, 3):
            mine = (mine + group.rank) % 9
            agreed = spec.agree(mine)
            sizes.append(agreed.batch_size)
            seconds.append(agreed.seconds)
            size = agreed.batch_size if follow else max(1, mine)

            def one_step(size: int = size, mine: int = mine) -> None:
                if mine == 0:
                    spec.idle(size)
                    return
                step = spec.graph(size)
                step.propose()
                step.verify()
                step.commit()

            told = outcome(one_step)
            if told[0]:
                break
        group.barrier("all were told")
        agreed = spec.agree(0) if not told[0] else None
        return {
            "needs": spec.needs_agreement,
            "sizes": sizes,
            "seconds": seconds,
            "told": told,
            "over": agreed is not None and agreed.is_over,
        }


def _unlike_by_shape(group: Group) -> Runtime:
    """The target, which gathers its first unit inside the step at 1x1, outside at 8x1."""
    model = ByteModel([[3000], [4000], [5000]], name="target")
    device = graphshard.open_device("host", num_ranks=group.world_size)
    small, large = StepShape(1), StepShape(8)
    with agree_on_device(group, device) as agreed:
        options = {"units": "layer", "prefetch_depth": 1, "min_shard_bytes": 0, "transport": "nccl", "head": "inside"}
        plan = make_plan(model.spec(), group.world_size, agreed.spec, step_shapes=[small, large], **options)
        inside = compile_plan(model.spec(), plan)
        outside = compile_plan(model.spec(), replace(plan, head="outside"))
        programs = {small: inside.programs[small], large: outside.programs[large]}
        compiled = Compiled(model.spec(), plan, inside.layout, programs)
        filler = SourceFiller(RecipeSource(TensorsInHand(model.tensors())))
        return build_runtime(
            compiled, model, filler, group, device, agreed=agreed, timeout_s=20.0, hooks=Hooks(poison=True)
        )


def end_at_unlike_lengths(group: Group, transport: str, run: str) -> dict[str, Any]:
    """Ranks have requests for 3, 5 and 8 steps; the loop ends on all when nobody has any."""
    with Pair(group, transport, run=run, sizes=SIZES) as pair:
        trace, wrong, num_turns = traced(pair), [], 0
        left = (3, 5, 8)[group.rank % 3]
        while True:
            size = 7 if left else 0
            if pair.spec.agree(size).is_over:
                break
            num_turns += 1
            if size:
                wrong += pair.step(size)
                left -= 1
            else:
                pair.spec.idle()
        return {"wrong": wrong, "num_turns": num_turns, "trace": trace}


def idle_badly(group: Group) -> dict[str, Any]:
    """Rank 1's segments raise while it is idle: in the draft, then in the target; peers go on beside it."""
    with Pair(group, "nccl", run="eager") as pair:
        trace, wrong, told = traced(pair), [], []
        is_broken = [False]
        for runtime in pair.runtimes().values():
            break_segment(runtime, 1, is_broken)
        for number in range(6):
            if group.rank == 1 and number % 2:
                is_broken[0] = True
                try:
                    pair.spec.idle()
                except ValueError as error:
                    told.append(str(error))
                is_broken[0] = False
            else:
                wrong += pair.step()
        return {"wrong": wrong, "told": told, "trace": trace}


def break_segment(runtime: Runtime, index: int, is_broken: list[bool]) -> None:
    """While `is_broken[0]`, the segment raises when it is run eagerly."""
    segment = runtime._compute.segments[index]
    run = segment.run

    def raise_or_run(state: Any) -> None:
        if is_broken[0]:
            raise ValueError(f"{runtime.model.name}: a segment's own fault")
        run(state)

    object.__setattr__(segment, "run", raise_or_run)


def speculate_unlike(group: Group, transport: str, what: str) -> str:
    """Rank 1 speculates with other settings; what all are told."""
    settings: dict[str, Any] = {"run": "graph", "num_draft_replays": 1}
    with Pair(group, transport) as pair, closing(_other_draft(group, transport)) as other:
        draft = pair.draft
        if group.rank == 1:
            settings |= {"run": {"run": "eager"}, "replays": {"num_draft_replays": 2}}.get(what, {})
            draft = other if what == "draft" else None if what == "no draft" else draft
        try:
            graphshard.speculate(pair.target, draft, **settings)
        except GraphshardError as error:
            return f"{type(error).__name__}: {error}"
        group.barrier("all speculate")
        return ""


def _other_draft(group: Group, transport: str) -> Runtime:
    model = ByteModel(DRAFT_LAYERS, name="draft")  # equal weights, another plan
    return compile_bytes(group, model, units="layer", prefetch_depth=0, transport=transport)


def run_unlike(group: Group, transport: str) -> list[Any]:
    """Rank 1 runs eagerly, the others replay; under pull that is nobody's business."""
    with Pair(group, transport, run="eager" if group.rank == 1 else "graph") as pair:
        return [line for _ in range(4) for line in pair.step()]


def never_call(group: Group, transport: str, missing: int, limit_s: float) -> dict[str, Any]:
    """Rank `missing` makes no call of the third step; what each is told, and is refused then."""
    with Pair(group, transport) as pair:
        wrong = [line for _ in range(2) for line in pair.step()]
        group.barrier("two steps")
        for runtime in pair.runtimes().values():
            runtime.timeout_s = limit_s
        told = ["", 0.0]
        if group.rank != missing:
            told = outcome(lambda: [pair.step() for _ in range(3)])
            group.barrier("the others are through")
        else:
            group.barrier("the others are through")
            told = outcome(pair.step)
        refused = [outcome(lambda r=runtime: r.run(1))[0] for runtime in pair.runtimes().values()]
        group.barrier("all were told")
    return {"told": told, "refused": refused, "wrong": wrong}


def refuse_a_launch(group: Group, transport: str, what: str) -> dict[str, Any]:
    """Rank 1's driver refuses to launch the target or the draft of the third step."""
    with Pair(group, transport, timeout_s=60.0) as pair:
        wrong = [line for _ in range(2) for line in pair.step()]
        runtime = pair.runtimes()[what]
        issue = runtime.issue

        def refuse(what: str, launch: Any) -> None:
            del launch
            issue(what, raise_driver_error)

        if group.rank == 1:
            runtime.issue = refuse  # type: ignore[method-assign]
        try:
            told = outcome(lambda: [pair.step() for _ in range(2)])
        except DriverError as error:
            told = [str(error), 0.0]
        refused = [outcome(lambda r=runtime: r.prefetch(1))[0] for runtime in pair.runtimes().values()]
        group.barrier("all were told")
    return {"told": told, "refused": refused, "wrong": wrong}


def raise_driver_error() -> None:
    raise DriverError("cuGraphLaunch failed: out of luck")


def die(group: Group, transport: str, when: str) -> dict[str, Any]:
    """Rank 1's process ends in the third step, before a call; what the others are told, and how long closing takes."""
    pair = Pair(group, transport, timeout_s=60.0)
    wrong = [line for _ in range(2) for line in pair.step()]
    group.barrier("two steps")
    step = pair.spec.graph(1)

    def third() -> None:
        for name, call in (("propose", step.propose), ("verify", step.verify), ("commit", step.commit)):
            if group.rank == 1 and name == when:
                os.kill(os.getpid(), signal.SIGKILL)
            call()

    told = outcome(third)
    if told[0] == "":
        until(lambda: pair.target._control.state(1) == "dead", "rank 1 has ended")
        told = outcome(pair.step)
    refused = [outcome(lambda r=runtime: r.run(1))[0] for runtime in pair.runtimes().values()]
    begin = time.monotonic()
    pair.close()
    return {"told": told, "refused": refused, "wrong": wrong, "closed_s": time.monotonic() - begin}


def accept_unlike(group: Group, run: str) -> dict[str, Any]:
    """Ranks accept different numbers of tokens; an autoregressive draft of three replays a step."""
    sizes = [(2, 4), (2, 2), (2, 1)]
    with Pair(group, "nccl", run=run, sizes=sizes, draft_tokens=(2, 1, 1)) as pair:
        trace, wrong, committed = traced(pair), [], []
        for number in range(6):
            accepted = (number * 7 + group.rank * 3) % 5
            step = pair.spec.graph(2, 4)
            for replay in range(3):
                step.propose(replay)
                wrong += pair.models["draft"].wrong(step.draft(replay).outputs)
            step.verify()
            step.target.inputs["accepted"].fill_(accepted)
            step.commit()
            committed.append(int(pair.target.buffers(StepShape(2, 4), "activation")["committed"][0]) == accepted)
            wrong += pair.models["target"].wrong(step.target.outputs)
        return {"wrong": wrong, "trace": trace, "committed": committed}


def update_models(group: Group, transport: str, which: list[str], run: str) -> dict[str, Any]:
    """A prefetch was made before; the next step's bytes are those of the update, on all ranks."""
    with Pair(group, transport, run=run) as pair:
        wrong = pair.step() + pair.step()
        was_prefetched = pair.draft.has_prefetched(1)
        reports = pair.spec.update(**{name: pair.models[name].tensors(1) for name in which})
        is_prefetched = pair.draft.has_prefetched(1)
        pair.versions |= dict.fromkeys(which, 1)
        for _ in range(3):
            wrong += pair.step()
        epochs = {name: runtime.epoch for name, runtime in pair.runtimes().items()}
        return {
            "wrong": wrong,
            "prefetched": [was_prefetched, is_prefetched],
            "epochs": epochs,
            "reports": sorted(reports),
        }


def refused_updates(group: Group, transport: str) -> list[str]:
    """What all ranks are told of updates that name nothing, too much, or unlike models; steps go on."""
    told = []
    with Pair(group, transport) as pair:
        tensors = {name: model.tensors(1) for name, model in pair.models.items()}
        unlike = "target" if group.rank == 0 else "draft"
        for given in ({}, tensors | {"only": "*"}, {unlike: tensors[unlike]}):
            try:
                pair.spec.update(**given)
            except GraphshardError as error:
                told.append(f"{type(error).__name__}: {error}")
        told += pair.step()
        return told
