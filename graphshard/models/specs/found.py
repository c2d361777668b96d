"""The parameters of a module on the meta device, each once, with the place where it was found."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from graphshard.core.errors import SpecError
from graphshard.models.specs.roles import EXPERTS, Place
from graphshard.runtime.attach.layers import LayerStack

_EXPERT_INDEX = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class Found:
    """A parameter, or the same parameter of all of a layer's experts, stacked as servers keep them."""

    name: str
    owner: nn.Module
    place: Place
    shape: tuple[int, ...]
    dtype: str
    layers: tuple[int, ...]
    """Layers that read it, in order of first reading; empty outside the layers."""


def find_parameters(module: nn.Module, stack: LayerStack) -> list[Found]:
    """Every parameter of `module`, in the order of its modules; what several modules share is found once.

    Raises:
        SpecError: a parameter has bytes: the module was not made on the meta device.
    """
    layer_at = {name: layer for layer, names in enumerate(stack.names) for name in names}
    first: dict[int, Found] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.device.type != "meta":
            raise SpecError(
                f"weight {name} has bytes on {parameter.device}: make the module under torch.device('meta'), "
                "or attach it, which shards what is loaded"
            )
        prefix = next((path for path in _paths(name) if path in layer_at), None)
        layer = None if prefix is None else layer_at[prefix]
        known = first.get(id(parameter))
        layers = known.layers if known else ()
        if layer is not None and layer not in layers:
            layers = (*layers, layer)
        if known is None:
            path, _, attribute = name.rpartition(".")
            inner = tuple(name[len(prefix) + 1 if prefix else 0 :].split(".")[:-1])
            dtype = str(parameter.dtype).removeprefix("torch.")
            owner = module.get_submodule(path)
            first[id(parameter)] = Found(name, owner, Place(inner, attribute), tuple(parameter.shape), dtype, layers)
        else:
            first[id(parameter)] = Found(known.name, known.owner, known.place, known.shape, known.dtype, layers)
    return _stacked(list(first.values()))


def _paths(name: str) -> Iterator[str]:
    """The modules around a parameter, from the inside out."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _stacked(found: Sequence[Found]) -> list[Found]:
    """Experts that are modules of their own (`experts.7.w1`) become one weight with an axis in front."""
    groups: dict[str, list[Found]] = {}
    for one in found:
        groups.setdefault(_without_index(one), []).append(one)
    stacked = []
    for name, group in groups.items():
        head = group[0]
        if name == head.name:
            stacked += group
            continue
        shapes = {one.shape for one in group}
        if len(shapes) > 1:
            raise SpecError(f"experts of {name} differ in shape ({sorted(shapes)}): they cannot be one stacked weight")
        path = tuple(part for part in head.place.path if not part.isdecimal())
        place = Place(path, head.place.attribute)
        stacked.append(Found(name, head.owner, place, (len(group), *head.shape), head.dtype, head.layers))
    return stacked


def _without_index(one: Found) -> str:
    """The name without the expert's index; the name itself if it is no expert's."""
    for position, part in enumerate(one.place.path[:-1]):
        if part in EXPERTS and one.place.path[position + 1].isdecimal():
            inside = ".".join((*one.place.path, one.place.attribute))
            before = one.name[: len(one.name) - len(inside)]
            return before + _EXPERT_INDEX.sub(".", inside, count=1)
    return one.name
