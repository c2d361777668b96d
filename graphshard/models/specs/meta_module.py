"""Any decoder that was made on the meta device, as planning sees it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from graphshard.core.errors import SpecError
from graphshard.core.specs import SegmentSpec
from graphshard.cost.deployment import Deployment
from graphshard.cost.facts import PlanningModel, Role
from graphshard.models.specs.assemble import assemble
from graphshard.models.specs.formats import FP8, MXFP4, MXFP4_BLOCK, MXFP4_SCALE, WIDE
from graphshard.models.specs.found import Found, find_parameters
from graphshard.models.specs.layer_facts import layer_fact
from graphshard.models.specs.order import Placed, in_running_order, layer_segments
from graphshard.models.specs.part import Part, Parts
from graphshard.models.specs.replicated import SHARED_ROLES
from graphshard.models.specs.roles import (
    is_delicate,
    is_input_last,
    is_key_value,
    is_row,
    role_of,
    split_of,
    why_kept,
)
from graphshard.runtime.attach.layers import LayerStack, find_layers

MIN_LARGE_ELEMENTS = 2**16
"""Smaller matrices keep their dtype under FP8."""
TOP_K_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "experts_per_token")


def module_spec_on_meta(
    module: nn.Module,
    deployment: Deployment,
    name: str | None = None,
    stored: str = "",
    notes: Sequence[str] = (),
    layers: str | None = None,
) -> PlanningModel:
    """What one rank of `deployment` holds of `module`, whose parameters are on the meta device.

    Args:
        module: a decoder; its `config`, if it has one, tells heads, windows and routing.
        deployment: over what it is cut and replicated.
        name: of the model; None: its class.
        stored: `fp8` or `mxfp4` where the checkpoint keeps large weights in that; empty: as the parameters are.
        notes: what of the model was left out before.
        layers: path of the list of layers; None: the list with the most parameters.

    Raises:
        SpecError: a parameter has bytes, the layers are not found, or the deployment does not divide the model.
    """
    return assemble(_Reader(module, deployment, stored, layers).parts(name or type(module).__name__, notes), deployment)


class _Reader:
    """Parts, segments and layer facts of a module."""

    def __init__(self, module: nn.Module, deployment: Deployment, stored: str, layers: str | None) -> None:
        self._module = module
        self._deployment = deployment
        self._stored = stored
        self._config = getattr(module, "config", None)
        self._stack: LayerStack = find_layers(module, layers, None)
        self._found = find_parameters(module, self._stack)
        self._hidden = self._hidden_size()
        self._ends = _Ends(module)

    def parts(self, name: str, notes: Sequence[str]) -> Parts:
        inside: dict[int, list[Placed]] = {layer: [] for layer in range(len(self._stack.layers))}
        parts: list[Part] = []
        before: list[Part] = []
        after: list[Part] = []
        for one in self._found:
            if one.layers:
                placed = self._placed(one)
                for layer in one.layers:
                    inside[layer] += placed
            else:
                part = self._outside(one)
                (before if part.role == "embedding" or self._ends.is_tied(one.name) else after).append(part)
        segments = [SegmentSpec("embed", None, tuple(part.name for part in before))] if before else []
        parts += before
        facts, known = [], {part.name for part in before}
        for position, layer in enumerate(self._stack.order):
            ordered = in_running_order(inside[layer])
            segments += layer_segments(position, ordered)
            facts.append(layer_fact(position, ordered, self._config, self._deployment))
            parts += [one.part for one in ordered if one.part.name not in known]
            known |= {one.part.name for one in ordered}
        tied = [part.name for part in before if self._ends.is_tied(part.name)]
        if after or tied:
            segments.append(SegmentSpec("head", None, (*(part.name for part in after), *tied)))
        parts += after
        vocab = next((part.shape[0] for part in parts if part.role == "head"), 0)
        heads = getattr(self._config, "num_attention_heads", 0)
        heads = heads if isinstance(heads, int) else 0  # some models have a number for each layer
        return Parts(name, parts, segments, facts, self._hidden, vocab, heads, notes)

    def _placed(self, found: Found) -> list[Placed]:
        """The part of a parameter inside the layers; two, values and scales, where it is stored in 4 bits."""
        role = role_of(found.place, found.owner, len(found.shape))
        block = found.name.rsplit(".", 2 if found.place.attribute in ("weight", "bias") else 1)[0]
        if role == "routed_expert" and len(found.shape) == 3:
            return self._experts(found, block)
        is_matrix = len(found.shape) == 2 and role not in ("norm", "other", "routed_expert")
        n_axis, k_axis = self._axes(found) if is_matrix else (None, None)
        part = Part(
            name=found.name,
            shape=found.shape,
            dtype=found.dtype,
            role=role,
            block=block,
            out_axis=n_axis,
            in_axis=k_axis,
            split=split_of(found.place, role, len(found.shape)),
            num_experts=found.shape[0] if role == "routed_expert" else 0,
            top_k=self._top_k() if role == "routed_expert" else 0,
            heads=self._key_value_heads() if is_key_value(found.place) else 0,
            is_large=is_matrix and self._is_large(found, role),
            keep=why_kept(found.place),
        )
        return [Placed(self._as_stored(part), found.place)]

    def _experts(self, found: Found, block: str) -> list[Placed]:
        """All experts' matrices in one parameter."""
        n_axis, k_axis = self._axes(found)
        part = Part(
            name=found.name,
            shape=found.shape,
            dtype=found.dtype,
            role="routed_expert",
            block=block,
            out_axis=n_axis,
            in_axis=k_axis,
            split=split_of(found.place, "routed_expert", 3),
            num_experts=found.shape[0],
            top_k=self._top_k(),
            is_large=True,
        )
        if self._stored != "mxfp4" or self._deployment.weights == "bf16":
            return [Placed(self._as_stored(part), found.place)]
        n, k = found.shape[n_axis], found.shape[k_axis]
        placed = []
        for suffix, packed, dtype in (("_blocks", 2, MXFP4), ("_scales", MXFP4_BLOCK, MXFP4_SCALE)):
            shape = (found.shape[0], n, -(-k // packed))
            stored = replace(
                part, name=part.name + suffix, shape=shape, dtype=dtype, packed=packed, out_axis=-2, in_axis=-1
            )
            placed.append(Placed(stored, found.place))
        return placed

    def _outside(self, found: Found) -> Part:
        role: Role = "other"
        axes: tuple[int | None, int | None] = (None, None)
        if self._ends.is_head(found.name):
            role, axes = "head", (0, 1)
        elif isinstance(found.owner, nn.Embedding):
            role, axes = "embedding", (0, 1)
        elif "Norm" in type(found.owner).__name__:
            role = "norm"
        elif isinstance(found.owner, nn.Linear) and len(found.shape) == 2:
            role, axes = ("other" if self._ends.has_head else "head"), (0, 1)
        is_cut = self._ends.is_head(found.name) or self._ends.is_embedding(found.name)
        return Part(found.name, found.shape, found.dtype, role, "model", *axes, "column" if is_cut else "none")

    def _axes(self, found: Found) -> tuple[int, int]:
        is_last = is_input_last(found.owner, found.shape, self._hidden, is_row(found.place))
        return (-2, -1) if is_last else (-1, -2)

    def _is_large(self, found: Found, role: Role) -> bool:
        return role in SHARED_ROLES and math.prod(found.shape) >= MIN_LARGE_ELEMENTS and not is_delicate(found.place)

    def _as_stored(self, part: Part) -> Part:
        """`part` in FP8, where the checkpoint keeps it so."""
        if self._stored != "fp8" or not part.is_large or part.dtype not in WIDE:
            return part
        return replace(part, dtype=FP8)

    def _hidden_size(self) -> int:
        """As the config says; else the most frequent in_features of the layers."""
        known = getattr(self._config, "hidden_size", None)
        if isinstance(known, int):
            return known
        sizes = Counter(one.shape[-1] for one in self._found if one.layers and len(one.shape) == 2)
        if not sizes:
            raise SpecError(f"{type(self._module).__name__} has no matrix in its layers: there is nothing to plan for")
        return sizes.most_common(1)[0][0]

    def _top_k(self) -> int:
        for key in TOP_K_KEYS:
            value = getattr(self._config, key, None)
            if isinstance(value, int) and value > 0:
                return value
        raise SpecError(
            f"{type(self._module).__name__} has routed experts, and its config no number above 0 under any of "
            f"{', '.join(TOP_K_KEYS)}: add the number of experts that a token is sent to"
        )

    def _key_value_heads(self) -> int:
        value = getattr(self._config, "num_key_value_heads", None) or getattr(self._config, "num_attention_heads", 0)
        return value if isinstance(value, int) else 0


class _Ends:
    """The input and output embeddings of a Hugging Face model, by the name of their weights; they may be one weight."""

    def __init__(self, module: nn.Module) -> None:
        self._head = self._weight(module, "get_output_embeddings")
        self._embedding = self._weight(module, "get_input_embeddings")
        first: dict[int, str] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            first.setdefault(id(parameter), name)
        self._head_name = first.get(id(self._head), "")
        self._embedding_name = first.get(id(self._embedding), "")

    @property
    def has_head(self) -> bool:
        """Whether the module says which weight is its head."""
        return bool(self._head_name)

    def is_head(self, name: str) -> bool:
        return bool(self._head_name) and name == self._head_name

    def is_embedding(self, name: str) -> bool:
        """Whether tokens are looked up in it; positions are in others."""
        return bool(self._embedding_name) and name == self._embedding_name

    def is_tied(self, name: str) -> bool:
        """Whether `name` is looked up by the embedding and multiplied by the head."""
        return self.is_head(name) and self._head is self._embedding

    @staticmethod
    def _weight(module: nn.Module, getter: str) -> object:
        get = getattr(module, getter, None)
        return getattr(get() if callable(get) else None, "weight", None)
