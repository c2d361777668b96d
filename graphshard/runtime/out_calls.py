"""Finding the cheapest call that computes an ATen op into memory that already exists.

torch's own Python bindings parse their arguments in half the time that an OpOverload takes. Which overload a binding
picks is its own affair, so the recorder checks the bits of what it gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

OpOverload = torch._ops.OpOverload
Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A function, its positional and its keyword arguments."""

_FACTORY_OPTIONS = frozenset({"dtype", "layout", "device", "pin_memory"})


def out_calls(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], targets: Sequence[Tensor]
) -> Iterator[Call]:
    """Calls that should write `func(*args, **kwargs)` into `targets`, cheapest first. The caller must check the bits.

    Out variants are found by schema: the same arguments by name and type, plus one out argument a result.
    """
    for variant, out_names, dropped in _variants(func):
        if len(out_names) != len(targets):
            continue
        kept = {name: value for name, value in kwargs.items() if name not in dropped}
        outs = dict(zip(out_names, targets, strict=True))
        binding = _function(func)
        if out_names == ("out",) and binding is not None:
            yield binding, args, {**kept, **outs}
        yield variant._op, args, {**kept, **outs}


def in_place_calls(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Call]:
    """Bindings that should do what the mutable op `func` does to `self` or `out`. The caller must check the bits."""
    binding = _function(func) if "out" in kwargs else _method(func)
    if binding is not None:
        yield binding, args, kwargs


def _function(func: OpOverload) -> Callable[..., Any] | None:
    binding = getattr(torch, func.overloadpacket.__name__, None) if func.namespace == "aten" else None
    return binding if isinstance(binding, type(torch.mul)) else None


def _method(func: OpOverload) -> Callable[..., Any] | None:
    binding = getattr(torch._C.TensorBase, func.overloadpacket.__name__, None) if func.namespace == "aten" else None
    return binding if isinstance(binding, type(Tensor.add_)) else None


@cache
def _variants(func: OpOverload) -> tuple[tuple[OpOverload, tuple[str, ...], frozenset[str]], ...]:
    """Overloads with `func`'s arguments and out arguments: (overload, names of the outs, arguments it lacks)."""
    wanted = {argument.name: str(argument.type) for argument in func._schema.arguments}
    found = []
    for name in func.overloadpacket.overloads():
        overload = getattr(func.overloadpacket, name)
        arguments = overload._schema.arguments
        outs = tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write and a.kwarg_only)
        taken = {a.name: str(a.type) for a in arguments if a.name not in outs}
        dropped = wanted.keys() - taken.keys()
        same = all(wanted.get(name) == type_ for name, type_ in taken.items())
        if outs and same and dropped <= _FACTORY_OPTIONS:
            found.append((overload, outs, frozenset(dropped)))
    return tuple(found)
