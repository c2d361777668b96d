"""Kimi K3's published totals, from its config through spec, plan and layout."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from graphshard.core.errors import SpecError
from graphshard.core.layout import Layout, build_layout
from graphshard.core.specs import DeviceSpec
from graphshard.cost.deployment import Deployment
from graphshard.cost.facts import PlanningModel
from graphshard.cost.ledger import shardable_by_part
from graphshard.models.specs.kimi_k3 import CONFIG, WITHOUT_LAYER_0, kimi_k3
from graphshard.models.specs.read import read_model
from graphshard.schedule.auto import make_plan

GIB = 2**30
GPU = DeviceSpec("cuda", "any", memory_bytes=2**62)


def within(value: float, published: float) -> bool:
    """Within 0.1 %, or half of the last digit that was published."""
    return math.isclose(value, published, rel_tol=1e-3)


def planned(model: PlanningModel, world_size: int = 8) -> Layout:
    plan = make_plan(model.spec, world_size, GPU, include=model.facts.replicated, units="layer", prefetch_depth=1)
    return build_layout(model.spec, plan)


def gib_by_part(model: PlanningModel) -> dict[str, tuple[int, float]]:
    return {part: (layers, size / GIB) for part, layers, size in shardable_by_part(model)}


@pytest.fixture(scope="module")
def fp8() -> PlanningModel:
    return kimi_k3(Deployment(8, weights="fp8"))


def test_fp8_totals_by_part(fp8: PlanningModel) -> None:
    parts = gib_by_part(fp8)
    assert {part: layers for part, (layers, _) in parts.items()} == {"kda": 69, "mla": 24, "moe_periphery": 92}
    assert within(parts["kda"][1], 28.503)
    assert within(parts["mla"][1], 4.5703)
    assert within(parts["moe_periphery"][1], 15.7227)
    assert within(sum(size for _, size in parts.values()), 48.79)


def test_fp8_layout(fp8: PlanningModel) -> None:
    layout = planned(fp8)
    assert within(layout.shardable_bytes / GIB, 48.79)
    assert within((layout.shardable_bytes - layout.shard_bytes) / GIB, 42.7)  # freed before slots at N = 8
    assert len(layout.slots) == 2
    assert within(layout.slot_bytes / GIB, 1.168)  # published 1.17
    assert layout.largest_unit_bytes == 598 * 2**20
    assert layout.shard_bytes * 8 == layout.shardable_bytes  # no padding: all layers divide


@pytest.mark.parametrize("world_size", [2, 4, 8, 16])
def test_layers_divide_without_padding(fp8: PlanningModel, world_size: int) -> None:
    layer_bytes: dict[str, int] = {}
    for name in fp8.facts.replicated:
        layer = name.split(".")[2]
        layer_bytes[layer] = layer_bytes.get(layer, 0) + fp8.spec.weight(name).num_bytes
    assert all(size % (16 * world_size) == 0 for size in layer_bytes.values())


def test_bf16_periphery() -> None:
    model = kimi_k3(Deployment(8, weights="bf16"))
    layers, size = gib_by_part(model)["moe_periphery"]
    assert layers == 92
    assert size * GIB / layers == 367_001_600  # "367 MB a layer"
    assert within(size, 31.4453)
    shared = [f.weight for f in model.facts.weights if f.role == "shared_expert"]
    assert within(sum(model.spec.weight(name).num_bytes for name in shared) / GIB, 22.64)


def test_published_range_leaves_out_layer_0() -> None:
    """Range 1-92 shards 68 KDA layers; the published KDA total is of all 69."""
    model = kimi_k3(Deployment(8, weights="fp8", exclude=WITHOUT_LAYER_0))
    parts = gib_by_part(model)
    assert parts["kda"][0] == 68
    assert within(parts["kda"][1], 28.503 * 68 / 69)
    assert parts["moe_periphery"] == (92, pytest.approx(15.7227, rel=1e-3))
    assert not [name for name in model.facts.replicated if name.startswith("model.layers.0.")]


@pytest.mark.parametrize(
    ("layer", "sharded"),
    [
        (0, ["self_attn.qkv_proj", "self_attn.f_b_proj", "self_attn.g_proj", "self_attn.o_proj"]),
        (
            3,
            [
                "self_attn.q_b_proj",
                "self_attn.g_proj",
                "self_attn.o_proj",
                "block_sparse_moe.routed_expert_down_proj",
                "block_sparse_moe.routed_expert_up_proj",
                "block_sparse_moe.shared_experts.gate_up_proj",
                "block_sparse_moe.shared_experts.down_proj",
            ],
        ),
    ],
)
def test_target_rules(fp8: PlanningModel, layer: int, sharded: list[str]) -> None:
    prefix = f"model.layers.{layer}."
    names = [name.removeprefix(prefix) for name in fp8.facts.replicated if name.startswith(prefix)]
    assert names == [f"{name}.weight" for name in sharded]


def test_f_b_stays_bf16_and_each_weight_has_a_reason(fp8: PlanningModel) -> None:
    for fact in fp8.facts.weights:
        assert fact.reason and "\n" not in fact.reason
        if fact.is_replicated:
            assert fact.dtype == ("bfloat16" if "f_b_proj" in fact.weight else "float8_e4m3fn")
    fused = fp8.facts.weight("model.layers.3.self_attn.fused_qkv_a_proj.weight")
    assert not fused.is_replicated and "weight loader" in fused.reason
    routed = fp8.facts.weight("model.layers.1.block_sparse_moe.experts.w13_weight")
    assert routed.reason == "each rank holds 112 of the 896 routed experts (ep 8)"


def test_routed_experts_keep_four_bits(fp8: PlanningModel) -> None:
    """2.72e12 routed values at 4 bits, a scale of 8 bits for 32 of them, over 8 ranks."""
    routed = [f for f in fp8.facts.weights if f.role == "routed_expert"]
    values = 92 * 896 * 3 * 3072 * 3584
    assert sum(fp8.spec.weight(f.weight).num_bytes for f in routed) == values // 2 // 8 + values // 32 // 8
    first = fp8.facts.weight("model.layers.1.block_sparse_moe.experts.w13_weight")
    assert (first.n, first.k, first.num_matrices, first.top_k) == (6144, 3584, 112, 16)
    assert first.num_rows(tokens_per_rank=10) == 160
    assert first.matrices_read(1, num_ranks=1) == pytest.approx(112 * 16 / 896)
    assert first.matrices_read(4096, num_ranks=8) == pytest.approx(112)


def test_caches_and_states(fp8: PlanningModel) -> None:
    """24 MLA layers cache 576 values a token; 69 KDA layers keep 96 x 128 x 128 float32 and 3 taps of q, k and v."""
    kinds = [layer.kind for layer in fp8.facts.layers]
    assert (kinds.count("kda"), kinds.count("mla")) == (69, 24)
    assert [layer + 1 for layer, kind in enumerate(kinds) if kind == "mla"][-3:] == [88, 92, 93]
    assert fp8.facts.kv_bytes(1000) == 24 * 576 * 2 * 1000
    assert fp8.facts.state_bytes_per_request == 69 * (96 * 128 * 128 * 4 + 3 * 12288 * 3 * 2)
    paths = {segment.path for segment in fp8.spec.segments}
    assert {layer.segment for layer in fp8.facts.layers} <= paths


def test_more_expert_ranks_than_the_group() -> None:
    wide = kimi_k3(Deployment(8, ep=16, weights="fp8"))
    assert wide.facts.weight("model.layers.1.block_sparse_moe.experts.w2_weight").num_matrices == 56
    with pytest.raises(SpecError, match=r"ep 10 does not divide the 896 routed experts .* use ep 8"):
        kimi_k3(Deployment(8, ep=10))


def test_another_config_of_the_family(tmp_path: Path) -> None:
    values = json.loads(CONFIG.read_text())
    values["text_config"]["num_hidden_layers"] = 8
    file = tmp_path / "config.json"
    file.write_text(json.dumps(values))
    model = read_model(tmp_path, Deployment(8))
    assert model.facts.num_layers == 8 and model.spec.name == tmp_path.name
    del values["text_config"]["linear_attn_config"]["num_heads"]
    file.write_text(json.dumps(values))
    with pytest.raises(SpecError, match="linear_attn_config: num_heads is missing: add it"):
        read_model(tmp_path, Deployment(8))


def test_the_name_is_the_config() -> None:
    assert read_model("kimi-k3", Deployment(8)) == kimi_k3(Deployment(8))
