"""A layer's attention or recurrence, from the shapes of its weights; what they do not say, from the config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphshard.core.errors import SpecError
from graphshard.cost.deployment import Deployment
from graphshard.cost.facts import LayerFact, LayerKind
from graphshard.models.specs.assemble import ACTIVATION_BYTES
from graphshard.models.specs.cutting import Held, held_by_a_rank
from graphshard.models.specs.order import Placed, layer_segments
from graphshard.models.specs.roles import ATTENTION, is_row

STATE_BYTES = 4
"""float32."""

KEYS_VALUES = frozenset({"k_proj", "v_proj", "kv_proj", "key", "value"})
FUSED = frozenset({"qkv_proj", "c_attn", "query_key_value", "Wqkv", "qkv"})
DECAYS = frozenset({"A_log", "recurrent_param"})
STATE_KEYS = ("linear_key_head_dim", "linear_head_dim", "ssm_state_size", "state_size", "mamba_d_state")
"""Where configs keep the second dimension of a recurrent state; the first is the output projection's in_features."""


def layer_fact(layer: int, ordered: Sequence[Placed], config: object, deployment: Deployment) -> LayerFact:
    """The fact of layer `layer`, whose parts are `ordered`.

    Raises:
        SpecError: the layer is recurrent and the config does not say how large its state is.
    """
    mixer = [one for one in ordered if one.place.has(ATTENTION) and one.part.role in ("attention", "other")]
    matrices = {
        one.place.module: held_by_a_rank(one.part, deployment)
        for one in mixer
        if one.part.is_gemm and not _is_in(one.part.block, _recurrent_blocks(mixer))
    }
    last = [one for one in mixer if one.part.is_gemm and is_row(one.place)]
    wide = held_by_a_rank(last[-1].part, deployment).k if last else 0
    segments = layer_segments(layer, ordered)
    runs = next((s for s in segments if last and last[-1].part.name in s.reads), segments[-1] if segments else None)
    keys_values, pair_flops = _keys_and_values(matrices, wide, config)
    state, tail = _state(layer, mixer, wide, config, deployment)
    window = _window(layer, config) if keys_values else None
    kind: LayerKind = "none"
    if "kv_b_proj" in matrices:
        kind = "mla"
    elif keys_values:
        kind = "attention" if window is None else "window"
    elif state or tail:
        kind = "kda" if hasattr(config, "linear_head_dim") else "ssm"
    return LayerFact(
        layer=layer,
        kind=kind,
        segment=runs.path if runs else f"layers.{layer}",
        kv_bytes_per_token=keys_values * deployment.cache_element_bytes,
        attention_flops=pair_flops,
        window_tokens=window,
        state_bytes_per_request=state * STATE_BYTES + tail * ACTIVATION_BYTES,
        state_flops_per_token=7 * state,
        routed_bytes_per_token=_routed_bytes(ordered),
    )


def _recurrent_blocks(mixer: Sequence[Placed]) -> set[str]:
    """Blocks with a decay: their keys and values go into a state, not into a cache."""
    return {one.part.block for one in mixer if one.place.attribute in DECAYS}


def _is_in(block: str, recurrent: set[str]) -> bool:
    """Whether the decay is of `block`, or of a module inside it."""
    return any(one == block or one.startswith(f"{block}.") for one in recurrent)


def _keys_and_values(matrices: Mapping[str, Held], wide: int, config: object) -> tuple[int, int]:
    """Elements of the cache for a token, and flops for a pair of tokens; `wide` is heads times the values' size."""
    sizes = {name: held.n for name, held in matrices.items()}
    if "kv_b_proj" in sizes:  # absorbed: each head attends over the shared latent, which is key and value
        latent, rope = int(getattr(config, "kv_lora_rank", 0)), int(getattr(config, "qk_rope_head_dim", 0))
        heads = wide // max(int(getattr(config, "v_head_dim", 0) or 1), 1)
        return latent + rope, 2 * heads * (2 * latent + rope)
    own = sum(size for name, size in sizes.items() if name in KEYS_VALUES)
    fused = sum(size - wide for name, size in sizes.items() if name in FUSED)
    elements = own or fused
    return elements, 4 * wide if elements else 0


def _state(layer: int, mixer: Sequence[Placed], wide: int, config: object, deployment: Deployment) -> tuple[int, int]:
    """Elements of a request's recurrent state, and of the tail of its convolution."""
    tail = state = 0
    for one in mixer:
        shape = held_by_a_rank(one.part, deployment).shape
        if "conv" in one.place.module and one.place.attribute == "weight" and len(shape) == 3:
            tail += shape[0] * (shape[-1] - 1)
        elif one.place.attribute == "A_log" and len(shape) == 2 and shape[1] > 1:
            state += shape[0] * shape[1]  # [channels, state]
        elif one.place.attribute == "A_log":
            state += wide * _state_size(layer, config)
        elif one.place.attribute == "recurrent_param":
            state += shape[0]
    return state, tail


def _state_size(layer: int, config: object) -> int:
    for key in STATE_KEYS:
        value = getattr(config, key, None)
        if isinstance(value, int):
            return value
    raise SpecError(
        f"layer {layer} is recurrent, and the config has none of {', '.join(STATE_KEYS)}: the size of its state is "
        "unknown; add the key that fits"
    )


def _window(layer: int, config: object) -> int | None:
    """Tokens of a sliding window or chunk; None where all are attended to."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return window if window and getattr(config, "use_sliding_window", True) else None
    kind = kinds[layer] if layer < len(kinds) else ""
    if kind == "chunked_attention":
        return getattr(config, "attention_chunk_size", None)
    return window if kind == "sliding_attention" else None


def _routed_bytes(ordered: Sequence[Placed]) -> int:
    """A token's copies to its experts: top_k rows of the first expert matrix's in_features, in bfloat16."""
    first = next((one.part for one in ordered if one.part.role == "routed_expert" and one.part.is_gemm), None)
    if first is None or first.in_axis is None:
        return 0
    return first.top_k * first.shape[first.in_axis] * first.packed * ACTIVATION_BYTES
