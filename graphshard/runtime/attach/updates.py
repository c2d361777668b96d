"""Updates of an attached module: tensors that it keeps beside the runtime, and weights that have several names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from graphshard.comm.checksums import checksum_of_pieces
from graphshard.core.errors import LoadError
from graphshard.core.sizes import DTYPE_BITS
from graphshard.runtime.attach.spec import dtype_name
from graphshard.runtime.update.outside import Outside
from graphshard.runtime.weights.tensors_in_hand import TensorsInHand


def outside_of(module: nn.Module, sharded: Mapping[str, nn.Parameter], fixed: Collection[str]) -> Outside:
    """What of `module` an update writes beside the runtime's weights: all else that is in its `state_dict`.

    Args:
        module: the attached module.
        sharded: the runtime's weights, by name.
        fixed: those that have one address for all calls.
    """
    mine = {id(parameter) for parameter in sharded.values()}
    tensors: dict[str, Tensor] = {}
    places: set[tuple[int, int]] = set()
    for name, tensor in _named(module):
        if id(tensor) in mine or not _is_plain(tensor):
            continue
        place = (tensor.data_ptr(), tensor.nbytes)
        if not tensor.numel() or place not in places:  # else it shares the bytes of one that is there
            tensors[name] = tensor
        places.add(place)
    return Outside(tensors, {name: sharded[name] for name in fixed})


def by_first_name(
    module: nn.Module, sharded: Mapping[str, nn.Parameter], tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """`tensors`, each weight of several names once, under the name that comes first in the module.

    Raises:
        LoadError: two names of one weight come with unlike bytes.
    """
    mine = {id(parameter) for parameter in sharded.values()}
    first: dict[object, str] = {}
    names: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        has_place = id(parameter) not in mine and parameter.numel() > 0  # slots show several weights at one address
        key = (parameter.data_ptr(), parameter.nbytes) if has_place else id(parameter)
        names[name] = first.setdefault(key, name)
    tied = {names[name] for name in names if names[name] != name}
    came: dict[str, tuple[str, int]] = {}
    for name, tensor in tensors:
        known = names.get(name, name)
        if known in tied and isinstance(tensor, Tensor):
            checksum = _checksum(tensor)
            before, same = came.setdefault(known, (name, checksum))
            if before != name:
                if same != checksum:
                    raise LoadError(f"{before} and {name} are one weight of the module, and come with unlike bytes")
                continue
        yield known, tensor


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    for path, inner in module.named_modules():
        for name, buffer in inner._buffers.items():
            if buffer is not None and name not in inner._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_quantized
        and type(tensor) in (Tensor, nn.Parameter)
        and dtype_name(tensor) in DTYPE_BITS
    )


def _checksum(tensor: Tensor) -> int:
    store = TensorsInHand({"": tensor})
    data = bytearray(store.entries[""].num_bytes)
    store.read_into("", 0, memoryview(data))
    return checksum_of_pieces([data])
