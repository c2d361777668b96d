"""The order in which a layer runs its weights, and the segments that this makes: one for each matrix.

Modules are registered in any order (norms after what they feed, experts before their router), so weights are put in the
order of a decoder layer: norm, attention, norm, router, experts, shared experts or MLP, norm; last projections last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphshard.core.specs import SegmentSpec
from graphshard.models.specs.part import Part
from graphshard.models.specs.roles import ATTENTION, ROUTERS, Place, is_row

_AFTER_MLP = ("post_feedforward", "post_mlp", "post_ffn")
_AFTER_ATTENTION = ("post_attention", "post_self_attn", "pre_feedforward", "pre_mlp", "post_attn")


@dataclass(frozen=True)
class Placed:
    """A part and where it lies in its layer."""

    part: Part
    place: Place


def in_running_order(placed: Sequence[Placed]) -> list[Placed]:
    """The parts of one layer, sorted; equals keep the order of their modules."""
    first_norm = next((one for one in placed if _is_layer_norm(one) and not _is_late(one)), None)
    first = first_norm.place.path if first_norm else ()
    keys = {
        id(one): (_stage(one, one.place.path == first), is_row(one.place), index) for index, one in enumerate(placed)
    }
    return sorted(placed, key=lambda one: keys[id(one)])


def layer_segments(layer: int, ordered: Sequence[Placed]) -> list[SegmentSpec]:
    """One segment for each module with a matrix; small weights join the next one, a layer's last ones the last."""
    made: list[tuple[str, list[str]]] = []
    waiting: list[str] = []
    open_module: tuple[str, ...] = ()
    for one in ordered:
        path = one.place.path
        name = ".".join(path if one.place.attribute in ("weight", "bias") else (*path, one.place.attribute))
        if one.part.is_gemm:
            made.append((name or "weight", [*waiting, one.part.name]))
            waiting, open_module = [], path
        elif made and path == open_module:
            made[-1][1].append(one.part.name)  # a bias, a scale
        else:
            waiting.append(one.part.name)
    if waiting and not made:
        made.append(("weights", []))
    if waiting:
        made[-1][1].extend(waiting)
    return [SegmentSpec(name, layer, tuple(reads)) for name, reads in made]


def _stage(one: Placed, is_first_norm: bool) -> int:
    name, role = one.place.module, one.part.role
    if one.place.has(ATTENTION) and not (role == "norm" and len(one.place.path) == 1):
        return _moe_stage(one) if role in ("router", "routed_expert", "shared_expert", "latent") else 1
    if role == "norm" and len(one.place.path) <= 1:
        if is_first_norm:
            return 0
        return 7 if name.startswith(_AFTER_MLP) else 2
    return _moe_stage(one)


def _moe_stage(one: Placed) -> int:
    role = one.part.role
    if role == "latent":
        return 5 if "up" in one.place.module else 3
    if role == "router" or ROUTERS & set(one.place.path):
        return 3
    if role == "routed_expert":
        return 4
    return 1 if role == "attention" else 6


def _is_layer_norm(one: Placed) -> bool:
    return one.part.role == "norm" and len(one.place.path) == 1


def _is_late(one: Placed) -> bool:
    return one.place.module.startswith((*_AFTER_ATTENTION, *_AFTER_MLP))
