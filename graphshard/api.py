"""The public surface: from a model and a group to a runtime in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from graphshard.comm.group import LONGEST_TIMEOUT_S, Group
from graphshard.core.errors import DeviceError, SpecError
from graphshard.core.plan import Plan
from graphshard.core.specs import ModelSpec, StepShape
from graphshard.cost.auto_plan import auto_plan, read_figures
from graphshard.cost.hardware import HardwareSpec
from graphshard.device import Device, open_device
from graphshard.runtime.attach import Attached, attach_module
from graphshard.runtime.bind import Hooks
from graphshard.runtime.build import Agreed, agree_on_device, build_runtime
from graphshard.runtime.compiled import Compiled, compile_plan
from graphshard.runtime.model import SegmentedModel
from graphshard.runtime.runtime import Runtime
from graphshard.runtime.weights.fill import SourceFiller
from graphshard.runtime.weights.recipe_source import RecipeSource, open_store
from graphshard.schedule.auto import make_plan

PlanChoice = Plan | Literal["auto", "replicated"]
Hardware = HardwareSpec | str | Path | None


def compile(  # the field's verb, as in torch.compile; always used as graphshard.compile
    model: SegmentedModel,
    group: Group,
    *,
    checkpoint: str | Path | Mapping[str, Tensor],
    ignore: Sequence[str] = (),
    plan: PlanChoice = "auto",
    capture_sizes: Sequence[int | tuple[int, int]] = (1,),
    device: str | Device = "host",
    hardware: Hardware = None,
    timeout_s: float = 30.0,
    hooks: Hooks | None = None,
    progress: bool = False,
    **choices: Any,
) -> Runtime:
    """Shard `model` over `group`, verify its programs, load, bind and capture them. Collective.

    Not with a group from `rejoin_group`: this rank takes a dead one's place, the others go on meanwhile.

    Args:
        model: a model cut into segments, e.g. `graphshard.models.llama.Llama`.
        group: the ranks that share one copy of the weights.
        checkpoint: a safetensors file or folder, or tensors by weight name.
        ignore: patterns (`*`, `?`, `[a-z]`) of the checkpoint's tensors that no weight is made of; others are an error.
        plan: "auto" decides before anything is measured; "replicated" shards nothing (the same segments, the same
            memory rules: the yardstick); or a Plan.
        capture_sizes: batch sizes, or (batch_size, tokens_per_sequence), to capture; () captures nothing yet.
        device: "host", or an open device.
        hardware: figures for "auto", by published name or `graphshard calibrate`'s file; None: a GPU's by its name.
        timeout_s: the longest that the host waits for anything.
        hooks: what tests insert into bound lists.
        progress: gathers of transport nccl write how far they are: a timeout names the unit, and who is behind.
        choices: what "auto" is not to choose: units, prefetch_depth, head, transport, executor, ... (`make_plan`).

    Raises:
        SpecError, ProgramError, LoadError, CommError, DeviceError: see each class; on every rank alike.
    """
    limits = _limits(timeout_s, hooks, progress)
    device = _opened(device, group)
    shapes = [StepShape(*size) if isinstance(size, tuple) else StepShape(size) for size in capture_sizes]
    with agree_on_device(group, device) as agreed:
        compiled = group.agree("plan", lambda: _compile(model.spec(), group, agreed, plan, shapes, choices, hardware))
        with closing(group.agree("checkpoint", lambda: open_store(checkpoint, compiled.model))) as store:
            filler = SourceFiller(RecipeSource(store, ignore=ignore))
            runtime = build_runtime(compiled, model, filler, group, device, agreed=agreed, **limits)
    return _captured(runtime, shapes)


def attach(
    module: nn.Module,
    group: Group,
    *,
    layers: str | None = None,
    order: Sequence[int] | None = None,
    plan: PlanChoice = "auto",
    check: bool = False,
    own_loop: bool = False,
    device: str | Device = "host",
    hardware: Hardware = None,
    timeout_s: float = 30.0,
    hooks: Hooks | None = None,
    progress: bool = False,
    **choices: Any,
) -> Attached:
    """Shard the layers of any module over `group`, in place. Collective; the module is called as before, locally.

    Args:
        module: holds whole weights, equal on all ranks. Run it under `torch.inference_mode()` or `torch.no_grad()`.
        group: the ranks that share one copy of the weights.
        layers: path of the ModuleList (or Sequential) of layers; None: the one with the most parameters.
        order: the layers that one forward calls, by index, where that is not each once as listed.
        plan: as in `compile`; units are layers unless `choices` say otherwise.
        check: poison slots, and name weights that are read outside their layer's call. Slow.
        own_loop: no hooks: the caller runs the layers, between `before_layer(i)` and `after_layer(i)` of `begin_step`.
        device: "host", or an open device.
        hardware: as in `compile`.
        timeout_s: as in `compile`.
        hooks: as in `compile`.
        progress: as in `compile`.
        choices: as in `compile`.

    Raises:
        SpecError: the module cannot be attached: on all ranks, before it is changed. Other errors as in `compile`.
    """
    limits, device = _limits(timeout_s, hooks, progress), _attachable(_opened(device, group))
    with agree_on_device(group, device) as agreed:
        return attach_module(
            module,
            group,
            device,
            lambda model: _compile(model, group, agreed, plan, [], choices, hardware, {"units": "layer"}),
            agreed=agreed,
            layers=layers,
            order=order,
            check=check,
            own_loop=own_loop,
            **limits,
        )


def _limits(timeout_s: float, hooks: Hooks | None, progress: bool) -> dict[str, Any]:
    if not 0 < timeout_s <= LONGEST_TIMEOUT_S:
        longest = f"{LONGEST_TIMEOUT_S:.0f} (a day)"
        raise SpecError(f"timeout_s={timeout_s} is not a time to wait: give seconds above 0, at most {longest}")
    return {"timeout_s": timeout_s, "hooks": hooks or Hooks(), "progress": progress}


def _opened(device: str | Device, group: Group) -> Device:
    if not isinstance(device, str):
        return device
    return open_device(device, num_ranks=group.world_size, local_rank=group.local_rank)


def _attachable(device: Device) -> Device:
    """`device`, if modules can be attached there."""
    if device.kind != "host":
        raise DeviceError(
            f"modules cannot be attached on {device.name}: this version attaches modules on the host; models made of "
            "segments run there (graphshard.compile), captured or as loops of one's own (Runtime.begin_step)"
        )
    return device


def _captured(runtime: Runtime, shapes: Sequence[StepShape]) -> Runtime:
    """`runtime`, with `shapes` captured; closed if that fails."""
    try:
        if shapes:
            runtime.capture(shapes)
    except BaseException:
        runtime.close()
        raise
    return runtime


def _compile(
    model: ModelSpec,
    group: Group,
    agreed: Agreed,
    plan: PlanChoice,
    shapes: list[StepShape],
    choices: dict[str, Any],
    hardware: Hardware = None,
    defaults: dict[str, Any] | None = None,
) -> Compiled:
    if isinstance(plan, Plan):
        if choices:
            raise SpecError(f"{', '.join(choices)} cannot be chosen beside a finished plan: make_plan takes them")
        return compile_plan(model, plan)
    if plan not in ("auto", "replicated"):
        raise SpecError(f"unknown plan {plan!r}; known: auto, replicated, or a graphshard.Plan")
    shapes, device = shapes or [StepShape(1)], agreed.spec
    if plan == "replicated":
        made = make_plan(model, group.world_size, device, replicated=True, step_shapes=shapes, **choices)
    else:
        made = auto_plan(model, group.world_size, device, read_figures(hardware), shapes, choices, defaults)
    return compile_plan(model, made)
