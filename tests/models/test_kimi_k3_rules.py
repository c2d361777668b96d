"""What of Kimi K3 is sharded and why not the rest; names and shapes, held to those of planning."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kimi_k3_reference import SIZES, SMALL

from graphshard.core.errors import SpecError
from graphshard.core.plan import Plan
from graphshard.core.specs import DeviceSpec, ModelSpec
from graphshard.cost.deployment import Deployment
from graphshard.cost.facts import PlanningModel
from graphshard.models.kimi_k3.config import KimiK3ModelConfig, kimi_k3_model_config, load_kimi_k3_config
from graphshard.models.kimi_k3.model import KimiK3
from graphshard.models.specs.config_file import ConfigFile
from graphshard.models.specs.kimi_k3 import CONFIG, kimi_k3
from graphshard.schedule.auto import make_plan

HOST = DeviceSpec("host", "any", memory_bytes=2**62)

KDA = {"qkv_proj", "f_b_proj", "g_proj", "o_proj"}
MLA = {"q_b_proj", "g_proj", "o_proj"}
MOE = {"routed_expert_down_proj", "routed_expert_up_proj", "gate_up_proj", "down_proj"}
UNFUSED = {"qkv_proj": {"q_proj", "k_proj", "v_proj"}, "gate_up_proj": {"gate_proj", "up_proj"}}


def _sharded(plan: Plan, layer: int) -> list[str]:
    """Projections of a layer that are sharded."""
    begin = f"model.layers.{layer}."
    names = [d.weight for d in plan.decisions if d.unit is not None and d.weight.startswith(begin)]
    return sorted(name.split(".")[-2] for name in names)


def _plan(config: KimiK3ModelConfig, fused: bool) -> Plan:
    return make_plan(KimiK3(config, 1, fused=fused).spec(), 4, HOST, units="layer", prefetch_depth=1)


@pytest.mark.parametrize("fused", [True, False])
def test_the_default_plan_shards_the_targets_alone_however_small(fused: bool) -> None:
    """Fused, 8 weights of a layer with KDA and experts; unfused 11: q, k, v, gate and up are weights of their own."""
    plan = _plan(SMALL, fused)

    def targets(*names: str) -> list[str]:
        return sorted(one for name in names for one in ({name} if fused else UNFUSED.get(name, {name})))

    assert _sharded(plan, 0) == targets(*KDA)
    assert _sharded(plan, 1) == targets(*KDA, *MOE)
    assert len(_sharded(plan, 1)) == (8 if fused else 11)
    assert _sharded(plan, 2) == targets(*MLA, *MOE)
    assert {d.weight for d in plan.decisions if d.unit is not None and ".layers." not in d.weight} == set()


@pytest.mark.parametrize("fused", [True, False])
def test_every_resident_weight_has_a_reason_of_its_own(fused: bool) -> None:
    plan = _plan(SMALL, fused)
    reasons = {d.weight: d.reason for d in plan.decisions if d.unit is None}
    assert not [reason for reason in reasons.values() if "min_shard_bytes" in reason or not reason]
    attention, moe = "model.layers.1.self_attn.", "model.layers.1.block_sparse_moe."
    mla, dense = "model.layers.2.self_attn.", "model.layers.0.mlp."
    merged = ["f_a_b_proj"] if fused else ["f_a_proj", "b_proj"]
    latent = ["fused_qkv_a_proj"] if fused else ["q_a_proj", "kv_a_proj_with_mqa"]
    up = ["gate_up_proj"] if fused else ["gate_proj", "up_proj"]
    says = {
        **{f"{attention}{name}.weight": "servers merge f_a and b" for name in merged},
        **{f"{mla}{name}.weight": "servers fuse q_a and kv_a" for name in latent},
        **{f"{dense}{name}.weight": "dense MLP is not among the published targets" for name in (*up, "down_proj")},
        **{f"{attention}{name}_conv1d.weight": "no projection" for name in ("q", "k", "v")},
        f"{attention}A_log": "no projection",
        f"{attention}dt_bias": "no projection",
        f"{attention}o_norm.weight": "a norm is small",
        f"{mla}kv_b_proj.weight": "absorbed into two batched weights",
        f"{moe}gate.weight": "a router is small",
        f"{moe}gate.e_score_correction_bias": "a router is small",
        f"{moe}experts.w13_weight": "expert parallelism",
        f"{moe}experts.w2_weight": "expert parallelism",
        f"{moe}routed_expert_norm.weight": "a norm is small",
        "model.embed_tokens.weight": "outside the layers",
        "model.norm.weight": "outside the layers",
        "lm_head.weight": "outside the layers",
    }
    for name, reason in says.items():
        assert reason in reasons[name], f"{name}: {reasons[name]}"


def test_a_user_decides_otherwise() -> None:
    spec = KimiK3(SMALL, 1).spec()
    plan = make_plan(spec, 2, HOST, units="layer", include=["*kv_b_proj*", "*experts.w13*"])
    sharded = {d.weight for d in plan.decisions if d.unit is not None}
    assert {name.split(".")[-1] if "w13" in name else name.split(".")[-2] for name in sharded} == {
        "kv_b_proj", "w13_weight"
    }  # fmt: skip
    plan = make_plan(spec, 2, HOST, units="layer", exclude=["model.layers.0.*"])
    assert _sharded(plan, 0) == [] and len(_sharded(plan, 1)) == 8


def _published() -> tuple[ModelSpec, PlanningModel]:
    """The whole Kimi K3, as this model declares it and as planning does; data alone."""
    config = load_kimi_k3_config(CONFIG)
    return KimiK3(config, 1).spec(), kimi_k3(Deployment(8, weights="bf16"))


def test_names_shapes_and_segments_are_those_that_planning_reads() -> None:
    """All but the routed experts' form: planning has them in 4 bits with scales, and those of one rank alone."""
    spec, planning = _published()
    theirs = [weight for weight in planning.spec.weights if not weight.name.endswith("_weight_scale")]
    assert [weight.name for weight in spec.weights] == [weight.name for weight in theirs]
    for mine, other in zip(spec.weights, theirs, strict=True):
        if ".experts.w" in mine.name:
            assert (mine.shape[1], mine.shape[2] // 2) == other.shape[1:]
            assert mine.shape[0] == planning.facts.weight(mine.name).num_experts
        else:
            assert mine == other
    reads = [
        replace(segment, reads=tuple(name for name in segment.reads if not name.endswith("_weight_scale")))
        for segment in planning.spec.segments
    ]
    assert list(spec.segments) == reads


def test_targets_are_those_of_planning() -> None:
    spec, planning = _published()
    plan = make_plan(spec, 8, HOST, units="layer", prefetch_depth=1)
    assert tuple(d.weight for d in plan.decisions if d.unit is not None) == planning.facts.replicated
    assert sum(spec.weight(name).num_bytes for name in planning.facts.replicated) == sum(
        planning.spec.weight(name).num_bytes for name in planning.facts.replicated
    )


def test_a_config_reads_as_it_was_written() -> None:
    config = replace(
        SMALL, norm_eps=1e-3, gate_lower_bound=-2.5, situ_beta=3.0, situ_linear_beta=9.0, routed_scale=1.5,
        max_positions=77, eos_token_ids=(4, 5), sizes=replace(SIZES, dense_layers=2),
    )  # fmt: skip
    assert kimi_k3_model_config(ConfigFile("there", config.values())) == config
    flat = config.values()["text_config"]
    assert kimi_k3_model_config(ConfigFile("there", {**flat, "eos_token_id": 4})) == replace(config, eos_token_ids=(4,))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_act", "silu", "there: text_config: hidden_act is 'silu'; only 'situ' is supported"),
        ("mla_use_nope", False, "mla_use_nope is False; only True is supported"),
        ("num_expert_group", 2, "num_expert_group is 2; only 1 is supported"),
        ("attn_res_block_size", 12, "attn_res_block_size is 12: .* residuals are plain sums here; leave it out"),
        ("quantization_config", {"a": 1}, "quantization_config is .*: only unquantised checkpoints are supported"),
        ("rms_norm_eps", "small", "rms_norm_eps is 'small': it is a number"),
        ("rms_norm_eps", -1.0, "norm_eps is -1.0, must be above 0"),
        ("dtype", 4, "dtype is 4: it is a text"),
        ("dtype", "int8", "dtype is int8, a Kimi K3 computes in one of"),
        ("num_experts_per_token", 9, "top_k is 9, and there are 6 experts"),
        ("eos_token_id", "end", "eos_token_id is 'end': it is a number"),
        ("eos_token_id", 1.5, "eos_token_id is 1.5: it is a token, or a list of tokens"),
        ("num_attention_heads", 0, "num_attention_heads is 0: it is a whole number that starts at 1"),
    ],
)
def test_what_would_change_the_maths_is_refused(key: str, value: object, message: str) -> None:
    values = SMALL.values()
    values["text_config"][key] = value
    with pytest.raises(SpecError, match=message):
        kimi_k3_model_config(ConfigFile("there", values))


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(SpecError, match=r"MLA layers \[4\] are not among the 4 layers"):
        replace(SMALL, sizes=replace(SIZES, mla_layers=frozenset({1, 4})))
    with pytest.raises(SpecError, match="shared is 48, no whole number of experts that are 32 wide"):
        replace(SMALL, sizes=replace(SIZES, shared=48))
    with pytest.raises(SpecError, match="conv_taps is 1"):
        replace(SMALL, sizes=replace(SIZES, conv_taps=1))
    with pytest.raises(SpecError, match=r"gate_lower_bound is 0\.0, must be below 0"):
        replace(SMALL, gate_lower_bound=0.0)
    with pytest.raises(SpecError, match="model_type is 'llama'; it is kimi_k3 in this family"):
        kimi_k3_model_config(ConfigFile("there", {"model_type": "llama"}))
