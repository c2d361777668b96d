"""`prepare`: a module is loaded by a server's own loaders, keeps this rank's rows only, and is then sharded.

    prepare     weights that may be sharded show their full shape and have no memory to speak of
    load        loaders take whole tensors; a weight whose parts are all there shows this rank's rows
    processing  the server's own, on these rows: dtype and row bytes may change
    finalize    a plan from what stands there, redistribution into chunks, `Attached`

No rank holds a whole sharded weight at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graphshard.comm.group import Group
from graphshard.comm.rejoin import Newcomer
from graphshard.core.counts import counted, some_of
from graphshard.core.errors import GraphshardError, LoadError, ProgramError, SpecError
from graphshard.core.plan import Plan
from graphshard.core.sizes import format_bytes
from graphshard.device.base import Device
from graphshard.runtime.attach.attached import Attached, ways_to_call
from graphshard.runtime.attach.layers import LayerStack, find_layers
from graphshard.runtime.attach.spec import ModuleSegments
from graphshard.runtime.bind import Hooks
from graphshard.runtime.build import Agreed, agree_on_device, build_runtime
from graphshard.runtime.compiled import Compiled
from graphshard.runtime.engine.amax import AmaxPer, combined_amax
from graphshard.runtime.engine.cut import ShardId
from graphshard.runtime.engine.filler import RowFiller
from graphshard.runtime.engine.guard import PreparedGuard
from graphshard.runtime.engine.ledger import Ledger
from graphshard.runtime.engine.materialise import materialise, refuse_lost_buffers
from graphshard.runtime.engine.rows import RowSlice
from graphshard.runtime.engine.standing import (
    Standing,
    refuse_differing,
    refuse_unlike,
    refuse_unlike_loads,
    standing_of,
)
from graphshard.runtime.engine.stock import RowRules, Stock, take_stock
from graphshard.runtime.planning import Hardware, PlanChoice, PlanRequest, compile_request, limits_of
from graphshard.runtime.runtime import Runtime


class Prepared:
    """A module between `prepare` and `finalize`. Made by `graphshard.prepare`.

    `load` is local, and so are the weight loaders that it gave to parameters; `combined_amax` and `finalize` are
    collective.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        device: Device,
        stack: LayerStack,
        rules: RowRules,
        stock: Stock,
        load_timeout_s: float,
    ) -> None:
        """Change the module; its ranks agreed on `stock`."""
        self.module, self.group = module, group
        self._device, self._stack, self._rules, self._load_timeout_s = device, stack, rules, load_timeout_s
        unwritten = materialise(module, [stock.spec.parameters[name] for name in stock.rows])
        self._ledger = Ledger(module, stock, unwritten, group.rank, device)
        self._before = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
        self._failure: Exception | None = None
        self._rows: Mapping[str, RowSlice] = self._ledger.rows
        self._attached: Attached | None = None
        self._is_over = ""
        self._guard = PreparedGuard(module, stack, tuple(stock.rows))
        self._give_loaders(self._ledger.loads_by_parts())

    @property
    def rows(self) -> Mapping[str, tuple[int, int]]:
        """The weights that are kept by rows, and which `[begin, end)` this rank keeps."""
        return {name: (row.begin, row.end) for name, row in self._ledger.rows.items()}

    def full_shape(self, name: str) -> tuple[int, ...]:
        """The shape of the whole weight, for whoever picks kernels, after loading too.

        Raises:
            SpecError: no weight is kept by rows under this name.
        """
        return self._row(name).spec.shape

    def load(self, name: str, tensor: Tensor, shard_id: ShardId | None = None) -> None:
        """Load a whole tensor as the parameter or buffer `name`, or as its part `shard_id`; local.

        Of a weight that is kept by rows only this rank's are copied, and no more of `tensor` is read.

        Raises:
            LoadError: an unknown name or part, another shape or dtype, or it was loaded before. All ranks hear of it
                in `finalize`.
            ProgramError: the parameter was replaced before it was loaded; or it is too late.
        """
        if self._is_over:
            raise ProgramError(f"weight {name} cannot be loaded: {self._is_over}; {_UPDATE}")
        try:
            self._ledger.load(name, tensor, shard_id)
        except Exception as error:
            self._failure = self._failure or error
            raise

    def combined_amax(self, name: str, per: AmaxPer = "tensor", shard_id: ShardId | None = None) -> Tensor:
        """The largest magnitudes of the weight `name` as it stands, float32 (collective).

        Args:
            name: a weight by rows, all of which is loaded.
            per: "tensor": one number, [1], the same on every rank, of the whole weight; "channel": one for each of this
                rank's rows, [rows].
            shard_id: only of this part of a merged weight.

        Raises:
            LoadError: a value is infinite or NaN, or the weight is not all there; on every rank.
            SpecError: no weight is kept by rows under this name, or `per` is unknown.
        """
        self._wait_for_loaders()
        return combined_amax(name, self._row, per, shard_id, self.group)

    def finalize(
        self,
        *,
        plan: PlanChoice = "auto",
        check: bool = False,
        own_loop: bool = False,
        hardware: Hardware = None,
        timeout_s: float = 30.0,
        hooks: Hooks | None = None,
        progress: bool = False,
        **choices: Any,
    ) -> Attached:
        """Shard what stands in the module now (collective); rows are given back weight by weight.

        Arguments are those of `graphshard.attach`. What `prepare` was told to include, to exclude and to call small
        holds here too, unless `choices` or a finished plan say otherwise.

        Raises:
            LoadError: a weight was not loaded, or not all of it, or a loader failed before.
            ProgramError: what stands under a weight's name are no longer its rows.
            SpecError: ranks processed their rows unlike each other. All errors are the same on every rank.
        """
        if self._is_over:
            raise ProgramError(f"finalize() was called again: {self._is_over}")
        limits, ways = limits_of(timeout_s, hooks, progress), ways_to_call(check, own_loop)
        defaults = {} if isinstance(plan, Plan) or plan == "replicated" else self._rules.plan_choices()
        request = PlanRequest(plan, {**defaults, **choices}, hardware, defaults={"units": "layer"})
        self._wait_for_loaders()
        with agree_on_device(self.group, self._device) as agreed, torch.inference_mode(False):
            standing = self.group.agree("finalize", self._look)
            refuse_unlike_loads(self.group, standing.rows)
            refuse_differing(self.group, standing.new)
            refuse_unlike(self.group, "finalize", standing.text())
            model = standing.spec.model
            compiled = self.group.agree("plan", lambda: compile_request(model, self.group, agreed, request))
            runtime = self._build(standing, compiled, agreed, limits)
            return self._attach(standing, runtime, ways)

    @property
    def freed_bytes(self) -> int:
        """The bytes of rows that `finalize` gave back, measured: of storages that are gone."""
        return sum(row.released_bytes for row in self._rows.values() if row.is_freed)

    @property
    def held_bytes(self) -> int:
        """The bytes of rows that `finalize` gave up and somebody else still holds."""
        return sum(row.released_bytes for row in self._rows.values() if not row.is_freed)

    @property
    def peak_bytes(self) -> int:
        """The most that lay beside chunks, slots and resident weights in `finalize`: rows, and a temporary window."""
        return 0 if self._attached is None else self._attached.runtime.load_report.temporary_bytes

    # --- inside ---

    def _row(self, name: str) -> RowSlice:
        found = self._rows.get(name)
        if found is None:
            raise SpecError(f"weight {name!r} is not kept by rows; those are {some_of(list(self._rows)) or 'none'}")
        return found

    def _wait_for_loaders(self) -> None:
        """Ranks load apart: one that is slow is waited for, one that is gone is an error at once."""
        self.group.barrier("loading", timeout_s=self._load_timeout_s)

    def _look(self) -> Standing:
        """What stands in the module, if all of it was loaded. Changes nothing."""
        if self._failure is not None:
            is_ours = isinstance(self._failure, GraphshardError)
            kind, told = (type(self._failure), str(self._failure)) if is_ours else (LoadError, repr(self._failure))
            raise kind(f"{told}. A load failed with this: make the module anew, prepare and load it again")
        self._ledger.refuse_incomplete()
        rank, device = self.group.rank, self._device
        return standing_of(self.module, self._stack, self._ledger.rows, self._before, self._rules, rank, device)

    def _build(self, standing: Standing, compiled: Compiled, agreed: Agreed, limits: Mapping[str, Any]) -> Runtime:
        self._rows = standing.rows
        filler = RowFiller(standing.rows, standing.spec.parameters, self._device, self.group)
        segments = ModuleSegments(standing.spec.model)
        try:
            return build_runtime(compiled, segments, filler, self.group, self._device, agreed=agreed, **limits)
        except GraphshardError as error:
            if not filler.num_released:
                raise
            self._is_over = f"{counted(filler.num_released, 'weight')} of the module are gone, as finalize() failed"
            raise type(error)(f"{error}. {self._is_over}: make it anew, prepare and load it again") from error

    def _attach(self, standing: Standing, runtime: Runtime, ways: dict[str, bool]) -> Attached:
        self._guard.remove()
        self._is_over = "the module was finalized"
        self._give_loaders({name: standing.spec.parameters[name] for name in standing.rows})  # processing made new ones
        notes = [self._ledger.text(), *self._memory_notes(runtime)]
        attached = Attached(
            self.module,
            self._stack,
            standing.spec,
            runtime,
            **ways,
            since="finalize()",
            notes=notes,
        )
        self._attached = attached
        return attached

    def _memory_notes(self, runtime: Runtime) -> list[str]:
        held = [name for name, row in self._rows.items() if not row.is_freed]
        lines = [
            f"rows redistributed: {format_bytes(self.freed_bytes)} freed on this rank; at most "
            f"{format_bytes(runtime.load_report.temporary_bytes)} lay beside chunks, slots and resident weights"
        ]
        if held:
            lines.append(f"{format_bytes(self.held_bytes)} of rows are still held by somebody: {some_of(held)}")
        return lines

    def _give_loaders(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Set what a server's loading code calls; the parameter that it hands over is not looked at."""

        def loader_of(name: str) -> Callable[..., None]:
            def weight_loader(param: Tensor, loaded_weight: Tensor, shard_id: ShardId | None = None) -> None:
                self.load(name, loaded_weight, shard_id)

            return weight_loader

        for name, parameter in parameters.items():
            parameter.weight_loader = loader_of(name)  # type: ignore[attr-defined]


_UPDATE = "Runtime.update brings new weights, and detach() gives the module whole parameters again"


def prepare_module(
    module: nn.Module,
    group: Group,
    device: Device,
    *,
    layers: str | None,
    order: Sequence[int] | None,
    rules: RowRules,
    load_timeout_s: float,
) -> Prepared:
    """See `graphshard.prepare` (collective). Nothing is changed until all ranks agree."""
    if isinstance(group, Newcomer):
        raise SpecError(
            "a rank that came back cannot prepare a module: its peers hold chunks, not rows. Load the whole module and "
            "attach it, or compile from a checkpoint"
        )
    stack, stock = group.agree("prepare", lambda: _take_stock(module, layers, order, rules, group.world_size))
    refuse_unlike(group, "prepare", stock.text())
    with torch.inference_mode(False):
        return group.agree("placeholders", lambda: Prepared(module, group, device, stack, rules, stock, load_timeout_s))


def _take_stock(
    module: nn.Module, layers: str | None, order: Sequence[int] | None, rules: RowRules, world_size: int
) -> tuple[LayerStack, Stock]:
    refuse_lost_buffers(module)
    stack = find_layers(module, layers, order)
    return stack, take_stock(module, stack, rules, world_size)
