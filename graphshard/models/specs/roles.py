"""What a parameter of a decoder is, from its name and the module that owns it.

Names are those of Hugging Face's decoders; a name that no rule knows falls to a role that is never sharded wrongly: a
matrix of a layer is `mlp`, anything else `other`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from graphshard.cost.facts import Role, Split

ROUTERS = frozenset({"gate", "router", "shared_expert_gate", "router_gate"})
EXPERTS = frozenset({"experts", "moe_experts"})
SHARED = ("shared_expert", "shared_mlp", "residual_mlp")
LATENT = ("latent", "routed_expert_")
ATTENTION = ("attn", "attention", "mixer", "mamba", "temporal_block", "conv")
ROW = frozenset(
    (
        "o_proj",
        "out_proj",
        "c_proj",
        "dense",
        "down_proj",
        "w2",
        "fc2",
        "fc_out",
        "dense_4h_to_h",
        "wo",
        "output_proj",
        "proj_out",
        "down",
        "linear_2",
    )
)
"""Last projections of a block: tensor parallelism cuts their in_features."""
UNCUT = frozenset(
    ("q_a_proj", "kv_a_proj_with_mqa", "kv_a_proj", "f_a_proj", "g_a_proj", "wq_a", "wkv", "weights_proj")
)
"""Low-rank first halves: every tensor-parallel rank computes all of them."""
DELICATE = frozenset(
    ("kv_b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj", "b_proj", "in_proj_ba", "in_proj_b", "in_proj_a")
)
"""Small, or rewritten after loading: BF16 also where the rest is FP8."""
KEY_VALUE = frozenset({"k_proj", "v_proj"})
ABSORBED = "kv_b is absorbed into two batched weights after loading, then freed"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter is: `path` of its module inside the layer (or the model), and `attribute` in it."""

    path: tuple[str, ...]
    attribute: str

    @property
    def module(self) -> str:
        """The last name of the module's path; empty for the layer itself."""
        return self.path[-1] if self.path else ""

    def has(self, words: tuple[str, ...]) -> bool:
        """Whether a name on the path contains one of `words`."""
        return any(word in name for name in self.path for word in words)


def role_of(place: Place, owner: nn.Module, ndim: int) -> Role:
    """The role of a parameter inside the layers, `owner` being the module that has it."""
    if "Norm" in type(owner).__name__ or place.module.endswith("norm"):
        return "norm"
    if ROUTERS & set(place.path) or "router" in type(owner).__name__.lower():
        return "router"
    if EXPERTS & set(place.path):
        return "routed_expert" if ndim >= 2 else "other"
    if ndim != 2 or isinstance(owner, nn.Conv1d) or place.attribute != "weight":
        return "other"
    if isinstance(owner, nn.Embedding):
        return "embedding"
    if place.has(LATENT):
        return "latent"
    if place.has(SHARED):
        return "shared_expert"
    return "attention" if place.has(ATTENTION) else "mlp"


def split_of(place: Place, role: Role, ndim: int) -> Split:
    """How tensor parallelism cuts it. Biases of row-parallel weights are added once, after the sum, so not cut."""
    if role not in ("attention", "mlp", "shared_expert", "routed_expert", "other"):
        return "none"
    name = _projection(place)
    if name in UNCUT:
        return "none"
    is_row = name in ROW
    if place.attribute.endswith("bias") or (ndim == 1 and place.attribute == "bias"):
        return "none" if is_row else "column"
    if role == "other":
        return "column"
    return "row" if is_row else "column"


def is_input_last(owner: nn.Module, shape: tuple[int, ...], hidden_size: int, is_down: bool) -> bool:
    """Whether the last axis is in_features: not in GPT-2's Conv1D, nor where fused experts are `[experts, in, out]`."""
    if type(owner).__name__ == "Conv1D":
        return False
    is_transposed = getattr(owner, "is_transposed", None)
    if isinstance(is_transposed, bool):
        return not is_transposed
    if len(shape) == 3 and shape[-1] != shape[-2]:
        return (shape[-2] if is_down else shape[-1]) == hidden_size
    return True


def is_delicate(place: Place) -> bool:
    """Whether FP8 leaves it alone."""
    return _projection(place) in DELICATE


def why_kept(place: Place) -> str:
    """The reason for which a server's own treatment of a weight keeps it resident; empty for most."""
    return ABSORBED if _projection(place) == "kv_b_proj" else ""


def is_row(place: Place) -> bool:
    """Whether it is a last projection."""
    return _projection(place) in ROW


def is_key_value(place: Place) -> bool:
    """Whether it makes keys or values, of which there may be fewer heads than of queries."""
    return _projection(place) in KEY_VALUE


def _projection(place: Place) -> str:
    """The name that says which projection it is: the module's, or a fused expert's own (`down_proj_bias` too)."""
    name = place.module if place.attribute in ("weight", "bias") else place.attribute
    return name.removesuffix("_bias").removesuffix("_weight")
