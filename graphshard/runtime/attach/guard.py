"""An attached module to the rest of the world: right bytes where they are asked for, refusals where they would be lost.

Outside its layer's call a sharded parameter shows other bytes. `state_dict`, and with it `save_pretrained`, gives
gathered private copies. What would convert, copy, pickle or overwrite a slot is refused, naming the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from graphshard.core.errors import ProgramError
from graphshard.runtime.attach.spec import ATTACHED, Holder

_GUARDS = "_graphshard_guards"
"""On each guarded module: the attachments that guard it (two lists of layers of one module may be attached)."""

_REFUSED = {
    "_apply": ("to(), half(), cuda() and their kin would convert", "convert it before attaching"),
    "__deepcopy__": ("deepcopy would copy", "copy it before attaching"),
    "__reduce_ex__": ("pickling would store", "use state_dict"),
    "load_state_dict": ("load_state_dict would overwrite", "load it before attaching"),
    "tie_weights": ("tie_weights would replace", "tie them before attaching"),
    "compile": ("torch.compile does not run the hooks that gather", "run it as it is"),
}


class Guard:
    """What is installed on a module for as long as it is attached."""

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[nn.Module],
        holders: Sequence[Holder],
        whole: Callable[[str], Tensor],
    ) -> None:
        """`whole(weight)` gives a private copy of a weight's right bytes."""
        self._module, self._layers, self._holders, self._whole = module, layers, holders, whole
        self._handles: list[RemovableHandle] = []
        self._guarded: list[nn.Module] = []

    def install(self) -> None:
        """Guard the module and every submodule with a weight in `holders`."""
        mine = {id(holder.parameter) for holder in self._holders}
        for inner in self._module.modules():
            if inner is self._module or any(id(parameter) in mine for parameter in inner.parameters()):
                self._guarded.append(inner)
                _guard(inner, self)
        for layer in self._layers:
            layer.__dict__[ATTACHED] = True
        by_module: dict[nn.Module, list[Holder]] = {}
        for holder in self._holders:
            by_module.setdefault(holder.module, []).append(holder)
        for inner, holders in by_module.items():
            self._handles.append(inner.register_state_dict_post_hook(_gathered(holders, self._whole)))  # type: ignore[no-untyped-call]
        # a module around this one loads its children without calling their load_state_dict
        for inner in dict.fromkeys((self._module, *by_module)):
            self._handles.append(inner.register_load_state_dict_pre_hook(_refuse_load))  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Leave no trace."""
        for handle in self._handles:
            handle.remove()
        for inner in self._guarded:
            _unguard(inner, self)
        for layer in self._layers:
            layer.__dict__.pop(ATTACHED, None)
        self._handles, self._guarded = [], []


def _guard(inner: nn.Module, guard: Guard) -> None:
    guards = inner.__dict__.setdefault(_GUARDS, [])
    guards.append(guard)
    if len(guards) == 1:
        for name, (what, way) in _REFUSED.items():
            if name == "__deepcopy__" or hasattr(inner, name):
                inner.__dict__[name] = _refusal(type(inner).__name__, what, way)
        inner.__dict__["_apply"] = _unless_nothing_changes(inner, inner.__dict__["_apply"])


def _unguard(inner: nn.Module, guard: Guard) -> None:
    guards = inner.__dict__[_GUARDS]
    guards.remove(guard)
    if not guards:
        for name in (_GUARDS, *_REFUSED):
            inner.__dict__.pop(name, None)


def _refusal(module: str, what: str, way: str) -> Callable[..., Any]:
    def refuse(*arguments: object, **named: object) -> Any:
        raise ProgramError(
            f"{module}: {what} weights that are sharded, and whose memory shows other bytes outside their layer; "
            f"call detach() of the attached module first, or {way}"
        )

    return refuse


def _unless_nothing_changes(inner: nn.Module, refuse: Callable[..., Any]) -> Callable[..., nn.Module]:
    """`_apply` that lets through what leaves every weight as it is: `.to("cpu")` here, `.float()` of float32."""

    def apply(function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for dtype, dim in {(parameter.dtype, parameter.dim()) for parameter in inner.parameters()}:
            probe = torch.empty((2,) * dim, dtype=dtype, device="cpu")
            result = function(probe)
            if result is not probe or probe.is_shared():  # type: ignore[no-untyped-call]
                refuse()
        applied: nn.Module = type(inner)._apply(inner, function, recurse)  # type: ignore[no-untyped-call]
        return applied

    return apply


def _gathered(holders: Sequence[Holder], whole: Callable[[str], Tensor]) -> Callable[..., None]:
    def replace(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: object) -> None:
        for holder in holders:
            if not holder.holds:
                continue
            key = prefix + holder.attribute
            if key not in state_dict or _saves_in_its_own_way(module):
                what = "state_dict would save, in a way of its own or under other names,"
                _refusal(type(module).__name__, what, "take whole_weight(name) of each weight")()
            state_dict[key] = whole(holder.weight)

    return replace


def _saves_in_its_own_way(module: nn.Module) -> bool:
    """Whether what it saves may be made of a weight's bytes otherwise than by its name."""
    theirs = (type(module)._save_to_state_dict, type(module).get_extra_state)
    return theirs != (nn.Module._save_to_state_dict, nn.Module.get_extra_state)


def _refuse_load(module: nn.Module, *arguments: object) -> None:
    what, way = _REFUSED["load_state_dict"]
    _refusal(type(module).__name__, what, way)()
