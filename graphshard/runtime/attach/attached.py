"""`attach`: any module with a list of layers, its weights sharded over the group, its code unchanged.

Parameters stay the same objects; inside their layer's call they are views at fixed addresses in a slot. Module hooks
drive the same op list that `run` issues. After `attach` returns everything is local: other ranks may be idle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType

import torch
from torch import Tensor, nn

from graphshard.comm.group import Group
from graphshard.core.errors import GraphshardError, ProgramError, SpecError
from graphshard.core.plan import Plan
from graphshard.core.sizes import format_bytes
from graphshard.core.specs import ModelSpec
from graphshard.device.base import Device
from graphshard.runtime.attach.check import WeightWatch
from graphshard.runtime.attach.guard import Guard
from graphshard.runtime.attach.hooks import LayerHooks
from graphshard.runtime.attach.layers import LayerStack, find_layers
from graphshard.runtime.attach.placement import Placement
from graphshard.runtime.attach.source import ModuleSource, weight_hash
from graphshard.runtime.attach.spec import ModuleSegments, ModuleSpec, module_spec
from graphshard.runtime.attach.updates import by_first_name, outside_of
from graphshard.runtime.bind import Hooks
from graphshard.runtime.build import Agreed, build_runtime
from graphshard.runtime.compiled import Compiled
from graphshard.runtime.compute import segment_weights
from graphshard.runtime.loop import StepLoop, layer_calls
from graphshard.runtime.runtime import Runtime
from graphshard.runtime.update.report import UpdateReport
from graphshard.runtime.weights.fill import SourceFiller
from graphshard.runtime.weights.replicated import check_replicated
from graphshard.runtime.weights.whole import whole_weight


def ways_to_call(check: bool, own_loop: bool) -> dict[str, bool]:
    """Both, as `Attached` takes them; SpecError for `check` without the hooks through which it sees calls."""
    if check and own_loop:
        raise SpecError(
            "check=True sees reads through the module's hooks, and own_loop=True installs none: check the module as it "
            "is called, then attach it with own_loop=True alone"
        )
    return {"check": check, "own_loop": own_loop}


class Attached:
    """A module whose weights are sharded. Made by `graphshard.attach`; `detach` or `close` it, or use it as a context.

    The module keeps its attachment alive. `parameters()` and `named_parameters()` give the same objects as before, but
    outside its layer's call a sharded one shows other bytes: `whole_weight` and `state_dict` give the right ones.
    """

    def __init__(
        self,
        module: nn.Module,
        stack: LayerStack,
        spec: ModuleSpec,
        runtime: Runtime,
        *,
        check: bool,
        own_loop: bool,
        since: str = "attach()",
        notes: Sequence[str] = (),
    ) -> None:
        """`since`: the call that made it, for messages. `notes`: lines of the report about how weights came here."""
        self.module, self.runtime, self.layers = module, runtime, stack
        self._spec, self._notes = spec, tuple(notes)
        self._binding = _Binding(runtime, stack, spec.parameters, check, since)
        runtime.observer = self._binding
        with runtime.turn.lock:
            self._look_outside()
            runtime.note_visible()
        self._guard = Guard(module, stack.layers, spec.holders, self.whole_weight)
        self._guard.install()
        self._hooks = None if own_loop else LayerHooks(module, stack, runtime)
        if self._hooks is not None and self._binding.watch is not None:
            self._hooks.watch(module, self._binding.watch)
        self._detached = False

    @property
    def plan(self) -> Plan:
        """What is sharded and why, slots, depth."""
        return self.runtime.plan

    def begin_step(self) -> StepLoop:
        """Begin a step whose layers the caller calls; the module must have been attached with `own_loop=True`."""
        if self._hooks is not None:
            raise ProgramError(
                "this module's own hooks begin its steps: attach it with own_loop=True, or call the module"
            )
        parameters = (parameter for layer in self.layers.layers for parameter in layer.parameters())
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters):
            raise ProgramError(
                "a step was begun with autograd on and parameters that require a gradient: weights are overwritten "
                "before any backward; run the loop under torch.inference_mode() or no_grad()"
            )
        return self.runtime.begin_step()

    def whole_weight(self, name: str) -> Tensor:
        """A private copy of the weight called `name` in the module, gathered now. Between steps only; local."""
        return whole_weight(self.runtime, name)

    def update(
        self,
        tensors: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor],
        *,
        only: str | Iterable[str] | None = None,
        keep: str | Iterable[str] = (),
    ) -> UpdateReport:
        """Put new weights in the place of the module's, those outside its layers too, by its own names; collective.

        See `Runtime.update`. The module's other tensors (embedding, head, persistent buffers) are written in place; a
        weight with several names is written once, and may come under any of them, or under all with the same bytes.
        Where tensors come as a checkpoint has them, set `runtime.recipes` first: how weights are made of them.
        """
        pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
        self._look_outside()  # what was replaced has moved, and is refused
        return self.runtime.update(by_first_name(self.module, self._spec.parameters, pairs), only=only, keep=keep)

    def _look_outside(self) -> None:
        self.runtime.outside = outside_of(self.module, self._spec.parameters, self._binding.fixed)

    def report(self) -> str:
        """What is sharded, what is not, and why; memory on this rank."""
        layout, plan = self.runtime.layout, self.plan
        names = [*self.runtime.model.weights]
        width = max((len(weight.name) for weight in names), default=0)
        lines = [
            f"{self.runtime.model.name}: {len(self.layers.layers)} layers of {self.layers.path or 'the module'}, "
            f"{len(self.layers.order)} calls a step, over {plan.world_size} ranks",
            f"sharded {format_bytes(layout.shardable_bytes)} in {len(plan.units)} units: "
            f"{format_bytes(layout.shard_bytes)} chunks + {format_bytes(layout.slot_bytes)} slots on each rank; "
            f"{format_bytes(layout.resident_bytes)} resident inside the layers",
            f"units {plan.unit_policy}, prefetch_depth {plan.prefetch_depth}, {plan.num_slots} slots",
            *plan.reasons,
            *self._notes,
        ]
        for decision in plan.decisions:
            where = "resident" if decision.unit is None else f"unit {decision.unit}"
            lines.append(f"  {decision.weight:<{width}}  {where:<9}  {decision.reason}")
        lines += [f"  {name:<{width}}  untouched  {reason}" for name, reason in self._spec.kept.items()]
        return "\n".join(lines) + "\n"

    def detach(self) -> None:
        """Give the module whole private parameters again, with the bytes that it had, and close. Local, idempotent.

        Raises:
            ProgramError: the attachment was closed, so the bytes are gone.
        """
        if self._detached:
            return
        with torch.inference_mode(False):
            whole = {name: self.whole_weight(name) for name in self._spec.parameters}
            for name, parameter in self._spec.parameters.items():
                parameter.data = whole[name]
        self._guard.remove()
        if self._hooks is not None:
            self._hooks.remove()
        self._detached = True
        self.close()

    def close(self) -> None:
        """Give the memory back; unless it was detached, the module refuses to run from here on. Local, idempotent."""
        self.runtime.close()

    def __enter__(self) -> Attached:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Binding:
    """The parameters' views, told by the runtime which layer call is open."""

    def __init__(
        self, runtime: Runtime, stack: LayerStack, parameters: Mapping[str, nn.Parameter], check: bool, since: str
    ) -> None:
        self._calls = layer_calls(runtime.model)
        views = segment_weights(runtime.model, runtime.plan, runtime.layout, runtime.memory)
        self._moves: list[list[tuple[str, nn.Parameter, Tensor]]] = [[] for _ in self._calls]
        seen: dict[str, set[int]] = {}
        for position, call in enumerate(self._calls):
            for name, view in views[runtime.model.segments[call.begin].path].items():
                if name not in seen:
                    parameters[name].data = view
                seen.setdefault(name, set()).add(view.data_ptr())
                self._moves[position].append((name, parameters[name], view))
        for moves in self._moves:  # most weights have one address for all calls, and never move
            moves[:] = [(name, parameter, view) for name, parameter, view in moves if len(seen[name]) > 1]
        for unread in runtime.layout.resident:
            if unread.weight not in seen:
                parameters[unread.weight].data = runtime.memory.resident(unread)
        self.fixed = tuple(name for name in parameters if len(seen.get(name, ())) < 2)
        """The weights that have one address for all calls."""
        self.watch = WeightWatch(runtime, parameters) if check else None
        layers = [(names[0], layer) for names, layer in zip(stack.names, stack.layers, strict=True)]
        self._placement = Placement(layers, parameters, since)

    def before_step(self) -> None:
        """See StepObserver. ProgramError if a weight is no longer where it was bound."""
        self._placement.check()

    def before_call(self, position: int) -> None:
        """See StepObserver. A layer that is called twice may find its weights in another slot."""
        for name, parameter, view in self._moves[position]:
            parameter.data = view
            self._placement.move(name, view.data_ptr())
        if self.watch is not None:
            self.watch.before_call(self._calls[position])

    def after_call(self, position: int) -> None:
        """See StepObserver."""
        if self.watch is not None:
            self.watch.after_call(self._calls[position])

    def after_step(self) -> None:
        """See StepObserver."""
        if self.watch is not None:
            self.watch.after_step()


def attach_module(
    module: nn.Module,
    group: Group,
    device: Device,
    compile_spec: Callable[[ModelSpec], Compiled],
    *,
    agreed: Agreed,
    layers: str | None,
    order: Sequence[int] | None,
    check: bool,
    own_loop: bool,
    timeout_s: float,
    hooks: Hooks,
    progress: bool = False,
) -> Attached:
    """Shard `module` over `group` (collective); see `graphshard.attach`. Nothing is changed until all ranks agree."""
    stack, spec = group.agree("attach", lambda: _take_stock(module, layers, order))
    compiled = group.agree("plan", lambda: compile_spec(spec.model))
    sharded = [name for unit in compiled.plan.units for name in unit.weights]
    if agreed.welcome is None:  # a rank that came back is alone; its shards' checksums are compared
        check_replicated(group, sharded, lambda name: weight_hash(spec.parameters[name]), may_differ=True)
    source = ModuleSource(spec.parameters)
    with torch.inference_mode(False):  # what it makes outlives the caller's mode
        try:
            runtime = build_runtime(
                compiled,
                ModuleSegments(spec.model),
                SourceFiller(source),
                group,
                device,
                agreed=agreed,
                timeout_s=timeout_s,
                hooks=hooks,
                progress=progress,
            )
        except GraphshardError as error:
            if not source.num_released:
                raise
            gone = f"{source.num_released} weights of the module are gone: load it again"
            raise type(error)(f"{error}. {gone}") from error
        return Attached(module, stack, spec, runtime, check=check, own_loop=own_loop)


def _take_stock(module: nn.Module, layers: str | None, order: Sequence[int] | None) -> tuple[LayerStack, ModuleSpec]:
    stack = find_layers(module, layers, order)
    return stack, module_spec(module, stack)
