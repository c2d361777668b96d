"""What a deployment cuts and replicates, on small modules made on the meta device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from graphshard.core.errors import SpecError
from graphshard.cost.deployment import Deployment
from graphshard.cost.facts import PlanningModel
from graphshard.models.specs.meta_module import module_spec_on_meta
from graphshard.models.specs.read import read_model

HIDDEN, HEADS, KV_HEADS, EXPERTS = 512, 8, 2, 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HIDDEN)
        self.k_proj = nn.Linear(HIDDEN, HIDDEN // 4, bias=False)
        self.v_proj = nn.Linear(HIDDEN, HIDDEN // 4, bias=False)
        self.o_proj = nn.Linear(HIDDEN, HIDDEN)


class Mlp(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(HIDDEN, size, bias=False)
        self.down_proj = nn.Linear(size, HIDDEN, bias=False)


class Moe(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Mlp(size) for _ in range(EXPERTS))
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.shared_experts = Mlp(size)


class Layer(nn.Module):
    def __init__(self, size: int, routed: bool) -> None:
        super().__init__()
        self.self_attn = Attention()
        self.mlp = Moe(size) if routed else Mlp(size)
        self.input_layernorm = nn.LayerNorm(HIDDEN)
        self.post_attention_layernorm = nn.LayerNorm(HIDDEN)


class Decoder(nn.Module):
    def __init__(self, routed: bool = False, size: int = 1024) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(1000, HIDDEN)
        self.layers = nn.ModuleList(Layer(size, routed) for _ in range(3))
        self.norm = nn.LayerNorm(HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, 1000, bias=False)
        self.config: Any = SimpleNamespace(
            hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, num_experts_per_tok=2
        )


def on_meta(deployment: Deployment, routed: bool = False, **config: Any) -> PlanningModel:
    with torch.device("meta"):
        decoder = Decoder(routed)
    decoder.config.__dict__.update(config)
    return module_spec_on_meta(decoder, deployment, name="decoder")


def why(model: PlanningModel, name: str) -> str:
    return model.facts.weight(name).reason


def test_attention_dp_replicates_dense_projections() -> None:
    model = on_meta(Deployment(4))
    assert [name.removeprefix("layers.0.") for name in model.facts.replicated if name.startswith("layers.0.")] == [
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
        "self_attn.o_proj.weight",
        "mlp.up_proj.weight",
        "mlp.down_proj.weight",
    ]
    assert why(model, "layers.0.self_attn.q_proj.weight") == "attention is data parallel: all 4 ranks hold it whole"
    assert "a norm is small" in why(model, "layers.0.input_layernorm.weight")
    assert "rows" in why(model, "embed_tokens.weight")
    assert "include it" in why(model, "lm_head.weight")
    assert "no projection" in why(model, "layers.0.self_attn.q_proj.bias")


def test_experts_that_are_modules_are_stacked_and_spread() -> None:
    model = on_meta(Deployment(4), routed=True)
    fact = model.facts.weight("layers.1.mlp.experts.up_proj.weight")
    assert model.spec.weight(fact.weight).shape == (2, 1024, HIDDEN)
    assert (fact.n, fact.k, fact.num_matrices, fact.num_experts, fact.top_k) == (1024, HIDDEN, 2, 8, 2)
    assert fact.reason == "each rank holds 2 of the 8 routed experts (ep 4)"
    assert model.facts.weight("layers.1.mlp.shared_experts.up_proj.weight").is_replicated
    assert "router" in why(model, "layers.1.mlp.gate.weight")
    assert model.facts.layers[1].routed_bytes_per_token == 2 * HIDDEN * 2


def test_experts_on_every_rank_are_replicated() -> None:
    model = on_meta(Deployment(4, ep=1), routed=True)
    fact = model.facts.weight("layers.1.mlp.experts.up_proj.weight")
    assert fact.is_replicated and fact.num_matrices == EXPERTS and "ep 1" in fact.reason


def test_tensor_parallel_ranks_hold_slices() -> None:
    model = on_meta(Deployment(2, tp=2), routed=True)
    shapes = {w.name: w.shape for w in model.spec.weights}
    assert shapes["layers.0.self_attn.q_proj.weight"] == (HIDDEN // 2, HIDDEN)
    assert shapes["layers.0.self_attn.q_proj.bias"] == (HIDDEN // 2,)
    assert shapes["layers.0.self_attn.o_proj.weight"] == (HIDDEN, HIDDEN // 2)
    assert shapes["layers.0.self_attn.o_proj.bias"] == (HIDDEN,)  # added once, after the sum
    assert shapes["layers.0.mlp.experts.up_proj.weight"] == (4, 1024, HIDDEN)  # spread, so not cut
    assert model.facts.replicated == ()
    assert "cut it over 2 ranks already" in why(model, "layers.0.self_attn.q_proj.weight")
    cut = on_meta(Deployment(2, tp=2, ep=1), routed=True)
    assert cut.spec.weight("layers.0.mlp.experts.down_proj.weight").shape == (8, HIDDEN, 512)


def test_fewer_key_heads_than_ranks() -> None:
    """2 key heads over 4 ranks: each rank holds one of them; 8 query heads are cut."""
    model = on_meta(Deployment(4, tp=4))
    assert model.spec.weight("layers.0.self_attn.k_proj.weight").shape == (HIDDEN // 8, HIDDEN)
    assert model.spec.weight("layers.0.self_attn.q_proj.weight").shape == (HIDDEN // 4, HIDDEN)
    assert model.facts.kv_bytes(1) == 3 * 2 * (HIDDEN // 8) * 2


def test_include_and_exclude() -> None:
    mlps = on_meta(Deployment(4, include=("*.mlp.*",)))
    assert all(".mlp." in name for name in mlps.facts.replicated) and len(mlps.facts.replicated) == 6
    assert why(mlps, "layers.0.self_attn.q_proj.weight") == "no include pattern names it"
    head = on_meta(Deployment(4, include=("lm_head.weight",)))
    assert head.facts.replicated == ("lm_head.weight",)
    less = on_meta(Deployment(4, exclude=("layers.0.*",)))
    assert not any(name.startswith("layers.0.") for name in less.facts.replicated)
    assert why(less, "layers.0.mlp.up_proj.weight") == "excluded by layers.0.*"


REFUSED = [
    ({"include": ("*.experts.*",)}, "include pattern .* names layers.0.mlp.experts.up_proj.weight, which ranks do not"),
    ({"include": ("*.nothing",)}, "include pattern '.*nothing' matches no weight of decoder: names look like embed_to"),
    ({"exclude": "*.nothing"}, "exclude pattern '.*nothing' matches no weight"),
    ({"ep": 3}, "ep 3 does not divide the 8 routed experts of layers.0.mlp.experts: use ep 2"),
    ({"ep": 16}, "ep 16 does not divide the 8 routed experts of layers.0.mlp.experts: use ep 8"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_deployments_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        on_meta(Deployment(4, **options), routed=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 0}, "world_size is 0: it is a whole number that starts at 1"),
        ({"world_size": 8, "tp": 3}, "tp 3 does not divide world_size 8: use tp 2"),
        (
            {"world_size": 8, "tp": 2, "attention_dp": 8},
            "attention_dp 8 x tp 2 is not world_size 8: use attention_dp 4",
        ),
        ({"world_size": 8, "weights": "int4"}, "unknown weights 'int4'; known are config, bf16, fp8"),
        ({"world_size": 8, "ep": -1}, "ep is -1"),
    ],
)
def test_deployments_that_contradict_themselves(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Deployment(**options)


def test_one_rank_shards_nothing() -> None:
    model = on_meta(Deployment(1))
    assert model.facts.replicated == ()
    assert {fact.reason for fact in model.facts.weights} == {"one rank: nothing is held twice"}


def test_a_head_that_ranks_cannot_share() -> None:
    with pytest.raises(SpecError, match=r"tp 4 does not divide the 3 key and value heads of .*k_proj.weight: use tp 1"):
        on_meta(Deployment(4, tp=4), num_key_value_heads=3)


def test_more_ranks_than_heads() -> None:
    with pytest.raises(SpecError, match="tp 16 does not divide the 8 attention heads of decoder: use tp 8"):
        on_meta(Deployment(16, tp=16))


def test_a_module_with_bytes_is_refused() -> None:
    with pytest.raises(SpecError, match=r"has bytes on cpu: make the module under torch.device\('meta'\)"):
        module_spec_on_meta(Decoder(), Deployment(4))


def test_routed_experts_need_their_top_k() -> None:
    with pytest.raises(SpecError, match="has routed experts, and its config no number above 0 under any of num_"):
        on_meta(Deployment(4), routed=True, num_experts_per_tok=None)


def test_a_module_without_a_config() -> None:
    """Hidden size, heads and head come from shapes."""
    with torch.device("meta"):
        decoder = Decoder()
    del decoder.config
    model = module_spec_on_meta(decoder, Deployment(4))
    assert (model.facts.hidden_size, model.facts.vocab_size) == (HIDDEN, 1000)
    assert model.facts.kv_bytes(1) == 3 * 2 * (HIDDEN // 4) * 2
    assert model.facts.weight("lm_head.weight").role == "head"


def test_fp8_is_for_large_matrices() -> None:
    model = on_meta(Deployment(4, weights="fp8"), routed=True)
    dtypes = {fact.role: fact.dtype for fact in model.facts.weights}
    assert dtypes["attention"] == dtypes["shared_expert"] == dtypes["routed_expert"] == "float8_e4m3fn"
    assert dtypes["norm"] == dtypes["embedding"] == "bfloat16"
    assert dtypes["router"] == "float32"  # as the module has it


def test_segments_are_in_running_order() -> None:
    model = on_meta(Deployment(4), routed=True)
    names = [segment.name for segment in model.spec.segments if segment.layer == 0]
    assert names == [
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        "mlp.gate",
        "mlp.experts.up_proj",
        "mlp.experts.down_proj",
        "mlp.shared_experts.up_proj",
        "mlp.shared_experts.down_proj",
    ]
    q, gate = model.spec.segments[1], model.spec.segments[5]
    assert q.reads[:2] == ("layers.0.input_layernorm.weight", "layers.0.input_layernorm.bias")
    assert q.reads[-1] == "layers.0.self_attn.q_proj.bias"
    assert gate.reads[0] == "layers.0.post_attention_layernorm.weight"
    assert [segment.path for segment in (model.spec.segments[0], model.spec.segments[-1])] == ["embed", "head"]


def test_activations_are_the_widest_gemms() -> None:
    """Residual and normed row, input and output; two rows a token in the routed experts."""
    assert on_meta(Deployment(4)).facts.activation_bytes_per_token == 2 * (2 * HIDDEN + HIDDEN + 1024)
    routed = on_meta(Deployment(4), routed=True)
    assert routed.facts.activation_bytes_per_token == 2 * (2 * HIDDEN + 2 * (HIDDEN + 1024))


def test_a_draft_has_a_spec_of_its_own() -> None:
    """It borrows an embedding and a head of the target's shape, and keeps its own otherwise."""
    pytest.importorskip("transformers")
    configs = Path(__file__).parent.parent / "data" / "configs"
    model = read_model(configs / "llama-3-8b", Deployment(8), draft=configs / "llama-3-8b")
    assert model.draft is not None
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= {weight.name for weight in model.spec.weights}
    assert not {"model.embed_tokens.weight", "lm_head.weight"} & {weight.name for weight in model.draft.spec.weights}
    assert model.draft.facts.replicated == model.facts.replicated
    assert model.draft.facts.notes == ("lm_head.weight, model.embed_tokens.weight: the target's are used",)
    other = read_model(configs / "llama-3-8b", Deployment(8), draft=configs / "qwen3-0.6b")
    assert other.draft is not None and "model.embed_tokens.weight" in {w.name for w in other.draft.spec.weights}


def test_patterns_are_about_the_target() -> None:
    pytest.importorskip("transformers")
    configs = Path(__file__).parent.parent / "data" / "configs"
    chosen = Deployment(8, include=("*.attn.c_proj.weight",))  # names of GPT-2's, which the draft has none of
    model = read_model(configs / "gpt2", chosen, draft=configs / "qwen3-0.6b")
    assert model.draft is not None
    assert all(name.endswith(".attn.c_proj.weight") for name in model.facts.replicated)
    assert any(name.endswith(".mlp.up_proj.weight") for name in model.draft.facts.replicated)


def test_a_weight_that_layers_share_is_one_weight() -> None:
    with torch.device("meta"):
        decoder = Decoder()
    decoder.layers[2].mlp = decoder.layers[0].mlp
    model = module_spec_on_meta(decoder, Deployment(4))
    readers = [s.path for s in model.spec.segments if "layers.0.mlp.up_proj.weight" in s.reads]
    assert readers == ["layers.0.mlp.up_proj", "layers.2.mlp.up_proj"]
    assert not [weight.name for weight in model.spec.weights if weight.name.startswith("layers.2.mlp")]


def test_facts_and_spec_agree() -> None:
    model = on_meta(Deployment(4))
    with pytest.raises(AssertionError, match="weights and facts differ"):
        PlanningModel(model.spec, replace(model.facts, weights=model.facts.weights[::-1]))
