"""Finding the list of layers of a module, and the order in which a step calls them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from graphshard.core.errors import SpecError
from graphshard.core.sizes import format_bytes

_AMBIGUOUS_SHARE = 0.5
"""A second list with this share of the largest one's bytes makes the choice the caller's."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True)
class LayerStack:
    """The layers of a module, each once, and the order of their calls."""

    path: str
    """Of the list inside the module; empty if the module itself is the list."""
    layers: tuple[nn.Module, ...]
    names: tuple[tuple[str, ...], ...]
    """The paths of each layer inside the module: several if the list holds it several times."""
    order: tuple[int, ...]
    """Indices into `layers`, one for each call in a step."""
    owner: nn.Module | None
    """The nearest module around the list that has a forward of its own; its calls begin and end steps."""


def find_layers(module: nn.Module, layers: str | None, order: Sequence[int] | None) -> LayerStack:
    """The layers at path `layers` (None: the list with the most parameters), called in `order` (None: as listed).

    Raises:
        SpecError: no list, several that could be meant, or an order that names no layer.
    """
    path = _largest_list(module) if layers is None else layers
    container = _module_at(module, path)
    _refuse_lists_of_lists(path, container)
    positions: dict[nn.Module, list[str]] = {}
    listed: list[nn.Module] = []
    for name, layer in _children(container):
        positions.setdefault(layer, []).append(f"{path}.{name}" if path else name)
        listed.append(layer)
    unique = tuple(positions)
    if not unique:
        raise SpecError(f"{path or type(module).__name__} is an empty list of layers; name another one with layers=")
    calls = tuple(unique.index(layer) for layer in listed) if order is None else tuple(order)
    wrong = [call for call in calls if not isinstance(call, int) or not 0 <= call < len(unique)]
    if wrong or not calls:
        raise SpecError(
            f"order={list(calls)} is refused: {path or 'the module'} has layers 0 to {len(unique) - 1}; "
            "name the layer of each call"
        )
    return LayerStack(path, unique, tuple(map(tuple, positions.values())), calls, _owner(module, path))


def parameter_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters, each counted once; uninitialised ones have none."""
    known = [p for p in module.parameters() if not isinstance(p, nn.UninitializedParameter)]
    return sum(parameter.numel() * parameter.element_size() for parameter in known)


def _children(container: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """By position, one that is listed twice included (`named_children` leaves it out)."""
    return ((name, layer) for name, layer in container._modules.items() if layer is not None)


def _largest_list(module: nn.Module) -> str:
    candidates = _outermost_lists(module, nn.ModuleList) or _outermost_lists(module, nn.Sequential)
    if not candidates:
        raise SpecError(
            f"{type(module).__name__} has no ModuleList of layers; name the module whose children are its layers, "
            "layers='path.to.it'"
        )
    sizes = Counter({path: parameter_bytes(found) for path, found in candidates.items()})
    (largest, most), *others = sizes.most_common()
    if others and others[0][1] > _AMBIGUOUS_SHARE * most:
        listed = ", ".join(f"{path!r} ({format_bytes(size)})" for path, size in sizes.most_common())
        raise SpecError(
            f"{type(module).__name__} has several lists of layers: {listed}; say which one is meant with layers="
        )
    return largest


def _outermost_lists(module: nn.Module, kind: type[nn.Module]) -> dict[str, nn.Module]:
    """The lists of callable layers that lie in no other such list, by path."""
    found: dict[str, nn.Module] = {}
    for path, inner in module.named_modules():
        inside = any(path.startswith(f"{outer}." if outer else "") for outer in found)
        if isinstance(inner, kind) and not inside and len(inner._modules) and not _lists_in(inner):
            found[path] = inner
    return found


def _lists_in(container: nn.Module) -> list[str]:
    """The children that are never called, since they have no forward."""
    return [name for name, layer in _children(container) if isinstance(layer, nn.ModuleList | nn.ModuleDict)]


def _refuse_lists_of_lists(path: str, container: nn.Module) -> None:
    lists = _lists_in(container)
    if lists:
        raise SpecError(
            f"{path or 'the module'} holds lists of modules ({', '.join(lists)}), which are never called themselves; "
            f"name an inner one, layers={'.'.join(filter(None, (path, lists[0])))!r}"
        )


def _module_at(module: nn.Module, path: str) -> nn.Module:
    try:
        return module.get_submodule(path)
    except AttributeError:
        known = ", ".join(map(repr, _outermost_lists(module, nn.ModuleList))) or "none"
        raise SpecError(
            f"{type(module).__name__} has no module at layers={path!r}; its lists of layers are {known}"
        ) from None


def _owner(module: nn.Module, path: str) -> nn.Module | None:
    while path:
        path = path.rpartition(".")[0]
        around = module.get_submodule(path)
        if not isinstance(around, _CONTAINERS):
            return around
    return None
