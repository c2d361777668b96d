"""Parameters and buffers of the meta device get memory, and candidates a placeholder that only shows their shape.

A placeholder is one element expanded to the full shape: it has the right dtype, device and strides for whoever looks,
and torch refuses to copy into it, so that a loader that goes past the weight loader fails at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from graphshard.core.errors import SpecError
from graphshard.runtime.bind import POISON


def refuse_lost_buffers(module: nn.Module) -> None:
    """SpecError if the meta device has taken a buffer's values that no checkpoint holds."""
    for path, inner in module.named_modules():
        for name, buffer in inner._buffers.items():
            if buffer is not None and buffer.device.type == "meta" and name in inner._non_persistent_buffers_set:
                raise SpecError(
                    f"buffer {path}.{name} is on the meta device and in no checkpoint: make it on the CPU, "
                    "since nobody would load it"
                )


def placeholder(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """One element (of bytes that are NaN) shown as `shape`."""
    element = torch.full((dtype.itemsize,), POISON, dtype=torch.uint8, device="cpu")
    return element.view(dtype)[0].expand(shape)


def materialise(module: nn.Module, by_rows: Collection[nn.Parameter]) -> list[str]:
    """Give everything on the meta device memory, and each of `by_rows`, wherever it is, a placeholder.

    Parameters of the meta device become new objects with the old ones' attributes. Returns the names of what has
    memory that nobody has written to: it is filled with 0xFF.
    """
    candidates = {id(parameter) for parameter in by_rows}
    made: dict[int, Tensor] = {}
    unwritten = []
    for path, inner in module.named_modules():
        for table, again in ((inner._parameters, _like_parameter), (inner._buffers, _like_buffer)):
            for name, old in table.items():
                if old is None or (old.device.type != "meta" and id(old) not in candidates):
                    continue
                is_row = id(old) in candidates
                if id(old) not in made:
                    made[id(old)] = _made(old, is_row, again)
                    if not is_row:
                        unwritten.append(f"{path}.{name}" if path else name)
                table[name] = made[id(old)]
    return unwritten


def standing_at(module: nn.Module, name: str) -> Tensor | None:
    """The parameter or buffer that stands under `name` now, whoever put it or its module there; None if none does."""
    path, _, attribute = name.rpartition(".")
    try:
        inner = module.get_submodule(path)
    except AttributeError:
        return None
    return inner._parameters.get(attribute, inner._buffers.get(attribute))


def unwritten_rows(tensor: Tensor) -> int:
    """Rows that still hold what `materialise` filled memory with; integers count only if all of them do."""
    if not tensor.numel():
        return 0
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    rows = (flat.view(tensor.shape[0] if tensor.dim() else 1, -1) == POISON).all(dim=1)
    return int(rows.sum()) if tensor.is_floating_point() or bool(rows.all()) else 0


def _made(old: Tensor, is_row: bool, again: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    shape = tuple(old.shape)
    if is_row and old.device.type != "meta":
        old.data = placeholder(shape, old.dtype)
        return old
    if is_row:
        return again(old, placeholder(shape, old.dtype))
    data = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device="cpu")
    if data.numel():
        torch.empty(0, dtype=torch.uint8, device="cpu").set_(data.untyped_storage()).fill_(POISON)
    return again(old, data)


def _like_parameter(old: Tensor, data: Tensor) -> Tensor:
    new = torch.Tensor._make_subclass(type(old), data, old.requires_grad)
    new.__dict__.update(old.__dict__)
    return new


def _like_buffer(old: Tensor, data: Tensor) -> Tensor:
    return data
