"""`attach(check=True)`: slots are poisoned before they are released, and weights read at a wrong time are named.

A module may read a layer's weight outside that layer's call: a helper that is handed `layer.weight`, a view made once
and kept. Without a check it would compute with another layer's bytes. The check watches every ATen call of a forward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

from graphshard.core.errors import ProgramError
from graphshard.core.layout import Layout
from graphshard.core.plan import Residency
from graphshard.runtime.aten import AtenMode
from graphshard.runtime.bind import POISON
from graphshard.runtime.loop import LayerCall
from graphshard.runtime.runtime import Runtime

_SHAPES_ONLY = ("empty", "zeros", "ones", "full", "rand", "randn", "randint")
"""`zeros_like(weight)`, `weight.new_empty(...)`: the weight's bytes are not read."""


class WeightWatch:
    """Which weights may be read now; entered around each forward, on its thread."""

    def __init__(self, runtime: Runtime, parameters: Mapping[str, nn.Parameter]) -> None:
        self._runtime = runtime
        self._layout: Layout = runtime.layout
        self._stays = runtime.plan.residencies
        self._slots = [runtime.memory.slot(slot.slot) for slot in runtime.layout.slots]
        self._pages = [slot.numpy() for slot in self._slots]
        self._unit_of = {name: unit.index for unit in runtime.plan.units for name in unit.weights}
        self._readable: set[Residency] = set()
        self._names: Any = WeakIdKeyDictionary()
        for name, parameter in parameters.items():
            if name in self._unit_of:
                self._names[parameter] = name
        self._modes = threading.local()
        self.progress: Callable[[], str] = lambda: "no step is open"
        self.after_step()
        for page in self._pages:
            page[:] = POISON

    def enter(self) -> None:
        """Watch this thread's ATen calls from here on; calls nest."""
        modes = self._modes.__dict__.setdefault("stack", [])
        mode = _Watching(self) if not modes else None
        modes.append(mode)
        if mode is not None:
            mode.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """Undo the last `enter`, if there is one."""
        modes = self._modes.__dict__.get("stack", [])
        mode = modes.pop() if modes else None
        if mode is not None:
            mode.__exit__(None, None, None)

    def before_call(self, call: LayerCall) -> None:
        """The units that cover `call` may be read."""
        self._readable |= {stay for stay in self._stays if stay.begin <= call.begin < stay.end}

    def after_call(self, call: LayerCall) -> None:
        """The units that nobody reads after `call` may not be read: whoever does sees NaN."""
        for stay in [stay for stay in self._readable if stay.end <= call.end]:
            self._readable.remove(stay)
            self._pages[stay.slot][:] = POISON

    def after_step(self) -> None:
        """Nothing may be read, and what was poisoned must be gathered again."""
        self._readable.clear()
        self._runtime.forget_slots()

    def check(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """ProgramError if `func` reads, or writes, a sharded weight that is not there."""
        written = {id(tensor) for tensor in _written(func, args, kwargs)}
        for tensor in tree_iter((args, kwargs)):
            slot = self._slot_of(tensor)
            if slot is None:
                continue
            name = self._names.get(tensor)
            if id(tensor) in written:
                raise ProgramError(f"weight {name or self._names_at(tensor, slot)} is written by {func}: {_READ_ONLY}")
            stays = [stay for stay in self._readable if stay.slot == slot]
            if not stays or (name is not None and all(stay.unit != self._unit_of[name] for stay in stays)):
                raise ProgramError(
                    f"weight {name or self._names_at(tensor, slot)} is read by {func} while its slot holds other bytes "
                    f"({self.progress()}): {_READ_INSIDE}"
                )

    def follow(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Views of a weight keep its name."""
        name = next(
            (self._names[t] for t in tree_iter((args, kwargs)) if self._slot_of(t) is not None and t in self._names),
            None,
        )
        for tensor in tree_iter(result):
            if name is not None and self._slot_of(tensor) is not None:
                self._names[tensor] = name

    def _slot_of(self, tensor: object) -> int | None:
        """The slot in which a tensor's bytes lie."""
        if type(tensor) not in (Tensor, nn.Parameter):
            return None
        assert isinstance(tensor, Tensor)
        if tensor.device.type != "cpu" or not tensor.numel():
            return None
        address = tensor.data_ptr()
        for index, slot in enumerate(self._slots):
            if slot.data_ptr() <= address < slot.data_ptr() + slot.numel():
                return index
        return None

    def _names_at(self, tensor: Tensor, slot: int) -> str:
        """All weights that a tensor of unknown origin may be a view of."""
        offset = tensor.data_ptr() - self._slots[slot].data_ptr()
        units = sorted({stay.unit for stay in self._stays if stay.slot == slot})
        names = [
            view.weight
            for unit in units
            for view in self._layout.units[unit].views
            if view.offset <= offset < view.offset + view.num_bytes
        ]
        return " or ".join(names) or f"at byte {offset} of slot {slot}"


_READ_INSIDE = "read it inside its own layer's call, or keep it whole with exclude="
_READ_ONLY = "a sharded weight is read only, since its slot is overwritten; keep it whole with exclude="


class _Watching(AtenMode):  # type: ignore[no-untyped-call]
    """Sees every ATen call of one thread."""

    def __init__(self, watch: WeightWatch) -> None:
        super().__init__()
        self._watch = watch

    def on_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Check, call, follow views."""
        if func.is_view or func.overloadpacket.__name__ in ("detach", "alias"):
            result = func(*args, **kwargs)
            self._watch.follow(args, kwargs, result)
            return result
        if not _reads_shapes_only(func):
            self._watch.check(func, args, kwargs)
        return func(*args, **kwargs)


def _reads_shapes_only(func: Any) -> bool:
    name = func.overloadpacket.__name__
    return any(name in (f"{kind}_like", f"new_{kind}", "new_empty_strided") for kind in _SHAPES_ONLY)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_iter(value) if isinstance(leaf, Tensor))
