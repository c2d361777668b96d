"""A prepared module to the rest of the world: until `finalize` its weights are placeholders, or one rank's rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.utils.hooks import RemovableHandle

from graphshard.core.errors import ProgramError
from graphshard.runtime.attach.layers import LayerStack
from graphshard.runtime.attach.spec import PREPARED

_REFUSED = {
    "__deepcopy__": "deepcopy would copy",
    "__reduce_ex__": "pickling would store",
    "load_state_dict": "load_state_dict would overwrite",
}


class PreparedGuard:
    """Refuses calls of the layers, and what would take placeholders for weights."""

    def __init__(self, module: nn.Module, stack: LayerStack, names: tuple[str, ...]) -> None:
        """`names`: the weights that are kept by rows."""
        self._layers = stack.layers
        self._handles: list[RemovableHandle] = []
        holders = {module.get_submodule(name.rpartition(".")[0]) for name in names}
        # weak: what processing puts another module in place of is freed
        self._guarded = WeakSet(inner for inner in module.modules() if not holders.isdisjoint(inner.modules()))
        for layer in stack.layers:
            layer.__dict__[PREPARED] = True
            self._handles.append(layer.register_forward_pre_hook(_refuse_call))
        for inner in self._guarded:
            self._handles.append(inner.register_state_dict_pre_hook(_refuse_state))  # type: ignore[no-untyped-call]
            for attribute, what in _REFUSED.items():
                inner.__dict__[attribute] = _refusal(inner, what)

    def remove(self) -> None:
        """Leave no trace."""
        for handle in self._handles:
            handle.remove()
        for layer in self._layers:
            layer.__dict__.pop(PREPARED, None)
        for inner in self._guarded:
            for attribute in _REFUSED:
                inner.__dict__.pop(attribute, None)


def _refusal(inner: nn.Module, what: str) -> Callable[..., Any]:
    kind = type(inner).__name__

    def refuse(*arguments: object, **named: object) -> Any:
        raise ProgramError(
            f"{kind}: {what} weights that are placeholders, or this rank's rows alone, until finalize(). Load by "
            "load() or weight_loader and finalize first; named_parameters() tells names, shapes and dtypes"
        )

    return refuse


def _refuse_state(module: nn.Module, *arguments: object) -> None:
    _refusal(module, "state_dict would give")()


def _refuse_call(layer: nn.Module, arguments: object) -> None:
    raise ProgramError(
        f"{type(layer).__name__} was called before finalize(): its weights are placeholders, or this rank's rows "
        "alone; finalize the module first"
    )
