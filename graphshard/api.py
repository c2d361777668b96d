"""The public surface: from a model and a group to a runtime in one call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from graphshard.comm.group import Group
from graphshard.core.errors import DeviceError, SpecError
from graphshard.core.patterns import patterns_of
from graphshard.core.specs import StepShape
from graphshard.device import Device, open_device
from graphshard.load.recipe import Recipes
from graphshard.load.shard_folder import ShardFolder
from graphshard.runtime.attach import Attached, attach_module, ways_to_call
from graphshard.runtime.bind import Hooks
from graphshard.runtime.borrowing import Borrowed, borrow_weights
from graphshard.runtime.build import Agreed, agree_on_device, build_runtime
from graphshard.runtime.compiled import Compiled
from graphshard.runtime.engine import Blocks, Prepared, RowRules, prepare_module
from graphshard.runtime.model import SegmentedModel
from graphshard.runtime.planning import Hardware, PlanChoice, PlanRequest, compile_request, limits_of
from graphshard.runtime.runtime import Runtime
from graphshard.runtime.weights.fill import Filler, SourceFiller
from graphshard.runtime.weights.recipe_source import RecipeSource, open_store
from graphshard.runtime.weights.shard_filler import ShardFiller, open_shards
from graphshard.runtime.weights.watch import OnLoad
from graphshard.schedule.units import DEFAULT_MIN_SHARD_BYTES


def compile(  # the field's verb, as in torch.compile; always used as graphshard.compile
    model: SegmentedModel,
    group: Group,
    *,
    checkpoint: str | Path | Mapping[str, Tensor],
    recipes: Recipes | None = None,
    ignore: str | Sequence[str] = (),
    on_load: OnLoad | None = None,
    plan: PlanChoice = "auto",
    capture_sizes: Sequence[int | tuple[int, int]] = (1,),
    device: str | Device = "host",
    hardware: Hardware = None,
    timeout_s: float = 30.0,
    hooks: Hooks | None = None,
    progress: bool = False,
    borrow: Runtime | None = None,
    **choices: Any,
) -> Runtime:
    """Shard `model` over `group`, verify its programs, load, bind and capture them. Collective.

    Args:
        model: a model cut into segments, e.g. `graphshard.models.llama.Llama`.
        group: the ranks that share one copy of the weights. Of `rejoin_group`: not collective, this rank takes a dead
            one's place and the others go on meanwhile.
        checkpoint: a safetensors file or folder; tensors by name; or what `Runtime.save_shards` of as many ranks wrote.
        recipes: how weights are made of the checkpoint's tensors, where one is not the tensor of its own name.
        ignore: patterns (`*`, `?`, `[a-z]`) of the checkpoint's tensors that no weight is made of; others are an error.
        on_load: told, a few times a second, of the bytes that this rank has loaded and of all that it is to load.
        plan: "auto" decides before anything is measured; "replicated" shards nothing (the yardstick); or a Plan.
        capture_sizes: batch sizes, or (batch_size, tokens_per_sequence), to capture; () captures nothing yet.
        device: "host", or an open device.
        hardware: figures for "auto", by published name or `graphshard calibrate`'s file; None: a GPU's by its name.
        timeout_s: the longest that the host waits for anything.
        hooks: what tests insert into bound lists.
        progress: gathers of transport nccl write how far they are: a timeout names the unit, and who is behind.
        borrow: the runtime that has what `model` borrows (`ModelSpec.borrowed`, if anything), resident; closed later.
        choices: what "auto" is not to choose: units, prefetch_depth, transport, dual, tune, ... (`make_plan`).

    Raises:
        SpecError, ProgramError, LoadError, CommError, DeviceError: see each class; on every rank alike.
    """
    limits, device = limits_of(timeout_s, hooks, progress), _opened(device, group)
    shapes = _shapes(capture_sizes)
    with agree_on_device(group, device) as agreed:
        shards = open_shards(group, checkpoint, model.spec)
        asked = PlanRequest(plan, choices, hardware, shapes, saved=None if shards is None else shards.manifest)
        compiled, limits["borrowed"] = group.agree("plan", lambda: _plan(model, group, agreed, asked, borrow, device))
        with _filler(group, compiled, shards, checkpoint, recipes, ignore, on_load) as (filler, more):
            limits |= more
            return _captured(build_runtime(compiled, model, filler, group, device, agreed=agreed, **limits), shapes)


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
        check: poison slots, and name weights that are read outside their layer's call. Slow; needs the hooks.
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
    settings = limits_of(timeout_s, hooks, progress) | ways_to_call(check, own_loop)
    device = _attachable(_opened(device, group))
    request = PlanRequest(plan, choices, hardware, defaults={"units": "layer"})
    with agree_on_device(group, device) as agreed:
        return attach_module(
            module,
            group,
            device,
            lambda model: compile_request(model, group, agreed, request),
            agreed=agreed,
            layers=layers,
            order=order,
            **settings,
        )


def prepare(
    module: nn.Module,
    group: Group,
    *,
    layers: str | None = None,
    order: Sequence[int] | None = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    min_shard_bytes: int = DEFAULT_MIN_SHARD_BYTES,
    row_multiple: int | Mapping[str, int] = 1,
    blocks: Mapping[str, Blocks] | None = None,
    follow: Mapping[str, int] | None = None,
    device: str | Device = "host",
    load_timeout_s: float = 3600.0,
) -> Prepared:
    """Let a server's own loaders fill `module`, of whose sharded weights no rank ever holds more than its rows.

    Collective. Weights that may be sharded show their full shape and have no memory; what is on the meta device gets
    some, if it stays whole. Load (`Prepared.load`, or `parameter.weight_loader(parameter, tensor, shard_id)`), let
    post-load processing work on this rank's rows, then `Prepared.finalize`. Names are matched by patterns (`*`, `?`,
    `[a-z]`); of several that match the first counts.

    Args:
        module: made on the meta device, or anywhere: what it holds of weights by rows is given up.
        group: the ranks that share one copy of the weights.
        layers: as in `attach`.
        order: as in `attach`.
        include: weights that are kept by rows, however small; all others stay whole.
        exclude: weights that stay whole.
        min_shard_bytes: smaller weights stay whole, as they are declared.
        row_multiple: ranks part a weight between so many rows, such as 128 for block scales; or that by pattern.
        blocks: by pattern, the rows of each part of a merged weight by shard id (`{"q": 4096, "k": 512, "v": 512}`), or
            in order for shard ids 0, 1, ...
        follow: by pattern, for parameters that have a row for each so many rows of the matrix by rows beside them: 1
            for scales of channels, 128 for those of blocks. They may come into being by post-load processing.
        device: "host", or an open device.
        load_timeout_s: the longest that ranks wait for one that still loads; one that has died is not waited for.

    Raises:
        SpecError: on all ranks, before the module is changed.
    """
    chosen = (patterns_of("include", include), patterns_of("exclude", exclude))
    named = (dict(blocks or {}), dict(follow or {}))
    rules = RowRules(*chosen, min_shard_bytes, row_multiple, *named)
    device = _attachable(_opened(device, group))
    limits_of(load_timeout_s, None, False)  # refuses what is no time to wait
    return prepare_module(module, group, device, layers=layers, order=order, rules=rules, load_timeout_s=load_timeout_s)


def _shapes(capture_sizes: Sequence[int | tuple[int, int]]) -> list[StepShape]:
    try:
        return [StepShape(*size) if isinstance(size, tuple) else StepShape(size) for size in capture_sizes]
    except TypeError:
        raise SpecError(
            f"capture_sizes is {capture_sizes!r}; it is a sequence of batch sizes, or of (batch_size, "
            "tokens_per_sequence), as in [1, 8] or [(1, 4)]"
        ) from None


def _opened(device: str | Device, group: Group) -> Device:
    if not isinstance(group, Group):
        raise SpecError(
            f"group is of type {type(group).__name__}: give what init_group() returned, or LocalGroup(n)[rank] in a "
            "thread of each rank"
        )
    if not isinstance(device, str) and not hasattr(device, "driver"):
        raise SpecError(f"device is of type {type(device).__name__}: give 'host', or what open_device() returned")
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


def _plan(
    model: SegmentedModel, group: Group, agreed: Agreed, asked: PlanRequest, lender: Runtime | None, device: Device
) -> tuple[Compiled, Borrowed]:
    """What is decided before anything is reserved, and what lies in a lender's memory on the device already."""
    spec = model.spec()
    if lender is not None and not isinstance(lender, Runtime):
        raise SpecError(f"borrow= is of type {type(lender).__name__}: give what graphshard.compile returned")
    return compile_request(spec, group, agreed, asked), borrow_weights(spec, lender, device)


@contextmanager
def _filler(
    group: Group,
    compiled: Compiled,
    shards: ShardFolder | None,
    checkpoint: str | Path | Mapping[str, Tensor],
    recipes: Recipes | None,
    ignore: str | Sequence[str],
    on_load: OnLoad | None,
) -> Iterator[tuple[Filler, dict[str, Any]]]:
    """What fills the memory, and what else `build_runtime` is told of the weights."""
    ignore = patterns_of("ignore", ignore)
    if shards is not None:
        with closing(ShardFiller(shards, on_load)) as filler:
            yield filler, {"epoch": shards.manifest.epoch, "recipes": recipes, "ignore": ignore}
    else:
        with ExitStack() as stack:  # closes also where another rank's checkpoint cannot be opened
            open_here = partial(open_store, checkpoint, compiled.model)
            store = group.agree("checkpoint", lambda: stack.enter_context(closing(open_here())))
            yield SourceFiller(RecipeSource(store, recipes, ignore), on_load), {"recipes": recipes, "ignore": ignore}


def _captured(runtime: Runtime, shapes: Sequence[StepShape]) -> Runtime:
    """`runtime`, with `shapes` captured; closed if that fails."""
    try:
        if shapes:
            runtime.capture(shapes)
    except BaseException:
        runtime.close()
        raise
    return runtime
