"""What a capture does not permit, and why. The host refuses what a CUDA stream under capture refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from graphshard.core.errors import DeviceError

OpOverload = torch._ops.OpOverload

_INDEXING = {"index", "_unsafe_index", "index_put", "index_put_", "_unsafe_index_put", "_index_put_impl_"}
_STORAGE_CHANGES = {"resize_", "resize_as_", "set_", "resize", "resize_as"}
_FREEZABLE = (
    *(Tensor, bool, int, float, complex, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def not_permitted(what: str, reason: str) -> DeviceError:
    """The driver's error for `what`."""
    return DeviceError(f"{what}: operation not permitted when stream is capturing (900): {reason}")


def refuse(what: str, reason: str) -> NoReturn:
    """Raise the driver's error for `what`.

    Raises:
        DeviceError: always.
    """
    raise not_permitted(what, reason)


def check_permitted(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise if the ATen call `func(*args, **kwargs)` may not be captured.

    Raises:
        DeviceError: with the op's name and the reason.
    """
    reason = _why_not(func, args, kwargs)
    if reason is not None:
        refuse(str(func), reason)


def _why_not(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
    leaves = list(tree_iter((args, kwargs)))
    return (
        _why_not_arguments(leaves)
        or _why_not_values(func, args)
        or why_not_random(func, args, kwargs)
        or _why_not_memory(func, args)
    )


def _why_not_arguments(leaves: Iterable[object]) -> str | None:
    for leaf in leaves:
        if isinstance(leaf, torch.Generator):
            return "it draws random numbers, and a replay would draw other ones; draw them before the step"
        if not isinstance(leaf, _FREEZABLE):
            return f"its argument of type {type(leaf).__name__} cannot be frozen"
        if isinstance(leaf, Tensor):
            if type(leaf) not in (Tensor, torch.nn.Parameter):
                return f"it reads a {type(leaf).__name__}; only plain tensors can be captured"
            if leaf.layout is not torch.strided or leaf.device.type != "cpu":
                return f"it reads a tensor of layout {leaf.layout} on {leaf.device}; this device captures strided ones"
    return None


def _why_not_values(func: OpOverload, args: Sequence[Any]) -> str | None:
    if func.overloadpacket.__name__ in _INDEXING and func.namespace == "aten":
        return _why_not_indexing(func, args)
    if torch.Tag.dynamic_output_shape in func.tags:
        return "the shape of its result depends on values; use fixed shapes and a mask (torch.where, masked_fill)"
    if torch.Tag.data_dependent_output in func.tags:
        return "it reads a tensor's value on the host (.item(), bool(), int(), if); keep the value in a tensor"
    return None


def _why_not_indexing(func: OpOverload, args: Sequence[Any]) -> str | None:
    """A mask as an index is a `nonzero`, except where one value is put under one mask: that is a `masked_fill`."""
    indices = [index for index in args[1] if index is not None]
    if not any(index.dtype in (torch.bool, torch.uint8) for index in indices):
        return None
    if "index_put" in func.overloadpacket.__name__ and len(indices) == 1 and args[2].numel() == 1:
        return None
    return "indexing by a mask needs the number of its true elements; use torch.where or masked_fill"


def why_not_random(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
    """Why the ATen call may not be captured if it draws random numbers; None if it draws none."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    if any(a.name == "dropout_p" and given.get("dropout_p", 0.0) == 0.0 for a in func._schema.arguments):
        return None  # attention draws numbers only for its dropout
    return "it draws random numbers, and a replay would draw other ones; draw them before the step"


def _why_not_memory(func: OpOverload, args: Sequence[Any]) -> str | None:
    if func.namespace != "aten":
        return None
    if func.overloadpacket.__name__ == "lift_fresh" and args[0].dim() > 0:
        return (
            f"it brings {args[0].numel()} values from the host (torch.tensor([...]), from_numpy); "
            "make the tensor before the step, or fill it with torch.full or torch.arange"
        )
    if func.overloadpacket.__name__ in _STORAGE_CHANGES:
        return "it gives a tensor other memory, and addresses are frozen"
    return None


class HostReads(TorchFunctionMode):
    """Refuses calls that hand a tensor's bytes to the host without an ATen call that would show it."""

    _refused = frozenset(
        {Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.cpu, Tensor.apply_, Tensor.map_, Tensor.map2_}
    )

    def __init__(self) -> None:
        super().__init__()
        self.error: DeviceError | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Pass `func` on, unless it is refused."""
        if func in self._refused:
            self.error = not_permitted(
                f"Tensor.{func.__name__}", "it reads values on the host; return them in a buffer"
            )
            raise self.error
        return func(*args, **(kwargs or {}))
