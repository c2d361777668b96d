"""Every config.json in tests/data, through transformers on the meta device: sizes as published, costs, decisions."""

from __future__ import annotations

import json
import math
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from graphshard.core.errors import SpecError
from graphshard.core.layout import build_layout
from graphshard.core.specs import DeviceSpec, StepShape
from graphshard.cost.deployment import Deployment
from graphshard.cost.facts import PlanningModel
from graphshard.cost.kernels import gemm_us
from graphshard.cost.published import hardware
from graphshard.cost.segments import step_times
from graphshard.models.specs.read import read_model
from graphshard.schedule.auto import make_plan

CONFIGS = Path(__file__).parent.parent / "data" / "configs"
GPU = DeviceSpec("cuda", "any", memory_bytes=2**62)

PARAMETERS = {
    "deepseek-v3": 671_026_404_352,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-4b": 3_880_263_168,
    "glm-4.5-air": 106_852_245_504,
    "gpt-oss-120b": 116_829_156_672,
    "gpt-oss-20b": 20_914_757_184,
    "gpt2": 124_439_808,
    "kimi-linear-48b-a3b": 49_122_675_072,
    "llama-3-70b": 70_553_706_496,
    "llama-3-8b": 8_030_261_248,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "olmo-2-7b": 7_298_617_344,
    "phi-3-mini": 3_821_079_552,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "smollm2-135m": 134_515_008,
}
"""As the checkpoints' cards have them, without draft layers and vision towers."""

KV_VALUES = {
    "deepseek-v3": 61 * 576,
    "gemma-2-9b": 42 * 2 * 8 * 256,
    "gemma-3-4b": 34 * 2 * 4 * 256,
    "glm-4.5-air": 46 * 2 * 8 * 128,
    "gpt-oss-20b": 24 * 2 * 8 * 64,
    "gpt2": 12 * 2 * 768,
    "kimi-linear-48b-a3b": 7 * 576,
    "llama-3-70b": 80 * 2 * 8 * 128,
    "mixtral-8x7b": 32 * 2 * 8 * 128,
    "phi-3-mini": 32 * 2 * 3072,
    "qwen3-30b-a3b": 48 * 2 * 4 * 128,
    "qwen3-next-80b-a3b": 12 * 2 * 2 * 256,
    "smollm2-135m": 30 * 2 * 3 * 64,
}
"""Cached values of one token: layers x (keys and values) x heads x size."""


@cache
def read(name: str, **options: Any) -> PlanningModel:
    return read_model(CONFIGS / name, Deployment(options.pop("world_size", 8), **options))


def num_parameters(model: PlanningModel) -> int:
    weights = [w for w in model.spec.weights if w.dtype != "float8_e8m0fnu"]
    return sum(math.prod(w.shape) * (2 if w.dtype == "float4_e2m1fn_x2" else 1) for w in weights)


def test_every_config_has_its_expectation() -> None:
    assert {path.name for path in CONFIGS.iterdir()} == set(PARAMETERS)
    assert len(PARAMETERS) >= 12


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_as_published(name: str) -> None:
    assert num_parameters(read(name, world_size=1)) == PARAMETERS[name]


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_plan_shards_what_the_facts_say(name: str) -> None:
    model = read(name)
    plan = make_plan(model.spec, 8, GPU, include=model.facts.replicated, units="layer", prefetch_depth=1)
    layout = build_layout(model.spec, plan)
    sharded = {view.weight for unit in layout.units for view in unit.views}
    assert sharded == set(model.facts.replicated) != set()
    assert len(layout.units) == model.facts.num_layers
    roles = {model.facts.weight(name).role for name in sharded}
    assert roles <= {"attention", "mlp", "shared_expert", "latent"}


@pytest.mark.parametrize("name", PARAMETERS)
def test_segments_run_in_order_with_one_matrix_each(name: str) -> None:
    model = read(name)
    read_weights = [weight for segment in model.spec.segments for weight in segment.reads]
    assert set(read_weights) == {weight.name for weight in model.spec.weights}
    layers = [s.layer for s in model.spec.segments if s.layer is not None]
    assert layers == sorted(layers)
    for segment in model.spec.segments:
        matrices = [fact for fact in map(model.facts.weight, segment.reads) if fact.rows != "none"]
        assert segment.layer is None or len(matrices) == 1, segment.path
    paths = {segment.path for segment in model.spec.segments}
    assert {layer.segment for layer in model.facts.layers} <= paths


@pytest.mark.parametrize("name", KV_VALUES)
def test_cached_values(name: str) -> None:
    assert read(name).facts.kv_bytes(1) == 2 * KV_VALUES[name]
    assert read(name, kv_cache="fp8").facts.kv_bytes(1) == KV_VALUES[name]


def test_windows_bound_the_cache() -> None:
    gemma = read("gemma-2-9b").facts
    assert [layer.kind for layer in gemma.layers[:2]] == ["window", "attention"]
    a_layer = 2 * 2 * 8 * 256
    assert gemma.kv_bytes(8192) == 21 * a_layer * (4096 + 8192)
    assert read("mistral-7b").facts.kv_bytes(100_000) == 32 * 2 * 2 * 1024 * 4096


def test_recurrent_layers_have_states() -> None:
    kimi = read("kimi-linear-48b-a3b").facts
    assert [layer.kind for layer in kimi.layers[:4]] == ["kda", "kda", "kda", "mla"]
    assert kimi.state_bytes_per_request == 20 * (32 * 128 * 128 * 4 + 3 * 4096 * 3 * 2)
    qwen = read("qwen3-next-80b-a3b").facts
    assert [layer.kind for layer in qwen.layers[:4]] == ["ssm", "ssm", "ssm", "attention"]
    assert qwen.state_bytes_per_request == 36 * (32 * 128 * 128 * 4 + 8192 * 3 * 2)


def test_norms_and_routers_run_before_what_they_feed() -> None:
    layer = [s for s in read("deepseek-v3").spec.segments if s.layer == 3]
    assert [s.name for s in layer] == [
        "self_attn.q_a_proj",
        "self_attn.q_b_proj",
        "self_attn.kv_a_proj_with_mqa",
        "self_attn.kv_b_proj",
        "self_attn.o_proj",
        "mlp.gate",
        "mlp.experts.gate_up_proj",
        "mlp.experts.down_proj",
        "mlp.shared_experts.gate_proj",
        "mlp.shared_experts.up_proj",
        "mlp.shared_experts.down_proj",
    ]
    assert layer[0].reads[0].endswith("input_layernorm.weight")
    assert layer[5].reads[0].endswith("post_attention_layernorm.weight")
    phi = [s.name for s in read("phi-3-mini").spec.segments if s.layer == 0]  # its o_proj is registered first
    assert phi == ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"]
    gemma = [s for s in read("gemma-2-9b").spec.segments if s.layer == 0]
    assert gemma[-1].reads[-1] == "model.layers.0.post_feedforward_layernorm.weight"
    assert gemma[4].reads[:2] == tuple(
        f"model.layers.0.{norm}_layernorm.weight" for norm in ("post_attention", "pre_feedforward")
    )


def test_gemms_are_out_by_in() -> None:
    gpt2 = read("gpt2").facts  # Conv1D keeps [in, out]
    fact = gpt2.weight("transformer.h.0.mlp.c_fc.weight")
    assert (fact.n, fact.k, fact.split) == (3072, 768, "column")
    fact = gpt2.weight("transformer.h.0.mlp.c_proj.weight")
    assert (fact.n, fact.k, fact.split) == (768, 3072, "row")
    oss = read("gpt-oss-20b").facts  # [experts, in, out] in the module, packed [experts, out, in / 2] in the file
    fact = oss.weight("model.layers.0.mlp.experts.gate_up_proj_blocks")
    assert (fact.n, fact.k, fact.num_matrices, fact.dtype) == (5760, 2880, 4, "float4_e2m1fn_x2")


def test_weight_formats() -> None:
    """DeepSeek-V3 is FP8 as stored; MXFP4 experts stay so under FP8 and are widened by bf16."""
    deepseek = read("deepseek-v3").facts
    assert deepseek.weight("model.layers.0.self_attn.o_proj.weight").dtype == "float8_e4m3fn"
    assert deepseek.weight("model.layers.0.self_attn.kv_b_proj.weight").dtype == "bfloat16"
    assert deepseek.weight("model.layers.3.mlp.gate.weight").dtype == "float32"
    assert deepseek.weight("lm_head.weight").dtype == "bfloat16"
    bf16 = read("deepseek-v3", weights="bf16").facts
    assert bf16.weight("model.layers.0.self_attn.o_proj.weight").dtype == "bfloat16"
    oss = read("gpt-oss-20b", weights="fp8").facts
    assert oss.weight("model.layers.0.self_attn.q_proj.weight").dtype == "float8_e4m3fn"
    assert oss.weight("model.layers.0.mlp.experts.down_proj_blocks").dtype == "float4_e2m1fn_x2"
    wide = read("gpt-oss-20b", weights="bf16").facts
    assert wide.weight("model.layers.0.mlp.experts.down_proj").dtype == "bfloat16"
    assert read("gpt2").facts.weight("transformer.h.0.attn.c_attn.weight").dtype == "float32"
    assert read("gpt2", weights="bf16").facts.weight("transformer.h.0.attn.c_attn.weight").dtype == "bfloat16"


def test_a_tied_weight_is_one_weight_read_twice() -> None:
    spec = read("smollm2-135m").spec
    readers = [s.name for s in spec.segments if "model.embed_tokens.weight" in s.reads]
    assert readers == ["embed", "head"]
    assert "lm_head.weight" not in {weight.name for weight in spec.weights}
    assert read("smollm2-135m").facts.vocab_size == 49152


def peak_kib() -> int:
    """The process's highest memory since `reset_peak`."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def test_no_weight_is_allocated() -> None:
    """671 billion parameters in some hundred MB and seconds of computing (not of waiting: machines are shared)."""
    read("qwen3-0.6b")  # imports
    reset_peak()
    before, begin = peak_kib(), time.process_time()
    model = read_model(CONFIGS / "deepseek-v3", Deployment(16))
    assert sum(weight.num_bytes for weight in model.spec.weights) > 50e9
    assert peak_kib() - before < 1.5 * 2**20  # 1.5 GiB
    assert time.process_time() - begin < 30


def test_a_config_json_beside_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "small.json"
    file.write_text((CONFIGS / "qwen3-0.6b" / "config.json").read_text())
    assert read_model(file, Deployment(8)).spec.name == "small"


def changed(tmp_path: Path, name: str, **keys: Any) -> Path:
    values = json.loads((CONFIGS / name / "config.json").read_text())
    values.update(keys)
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    return tmp_path


REFUSED = [
    ({"model_type": "llama9"}, r"model_type is 'llama9', which transformers .* does not know \(near it: llama"),
    ({"model_type": None}, "model_type is None: add the name"),
    ({"num_hidden_layers": None}, "num_hidden_layers is missing: add it"),
    ({"hidden_size": None}, "hidden_size is missing: add it"),
    ({"num_hidden_layers": -2}, "num_hidden_layers is -2: it is a whole number that starts at 1"),
    ({"vocab_size": "many"}, "vocab_size is 'many', which is refused by transformers .*expected int.*correct it"),
    ({"num_key_value_heads": 0}, "num_key_value_heads is 0: it is a whole number that starts at 1"),
    ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000, more than the 1000 of any model"),
    ({"num_attention_heads": 7}, "this llama config is refused by transformers .*hidden size .*heads .7.*: correct it"),
    ({"hidden_act": "swoosh"}, "hidden_act is 'swoosh', which is refused by transformers .*: correct it"),
    ({"model_type": "t5"}, "model_type is 't5', which transformers .* has no causal language model for: make the mod"),
    ({"torch_dtype": "int4"}, "torch_dtype is 'int4': known are float32, float16, bfloat16"),
    (
        {"quantization_config": {"quant_method": "awq"}},
        "quantization_config.quant_method is 'awq', known are fp8, mxfp4: .*--weights fp8 or --weights bf16",
    ),
]


@pytest.mark.parametrize(("keys", "message"), REFUSED, ids=[",".join(keys) for keys, _ in REFUSED])
def test_what_cannot_be_read_names_the_key(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        read_model(changed(tmp_path, "llama-3-8b", **keys), Deployment(8))
    assert "\n" not in str(caught.value)


def test_a_token_is_sent_to_experts_that_exist(tmp_path: Path) -> None:
    path = changed(tmp_path, "mixtral-8x7b", num_experts_per_tok=9)
    with pytest.raises(SpecError, match=r"sends a token to 9 of the 8 routed experts of .*: there are at most 8"):
        read_model(path, Deployment(8))


def test_an_unknown_quantisation_may_be_replaced(tmp_path: Path) -> None:
    path = changed(tmp_path, "qwen3-0.6b", quantization_config={"quant_method": "awq"})
    model = read_model(path, Deployment(8, weights="fp8"))
    assert model.facts.weight("model.layers.0.mlp.up_proj.weight").dtype == "float8_e4m3fn"


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not JSON"), ("[1]", "holds a list, not an object"), ("{}", "model_type is None")],
)
def test_files_that_are_no_config(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SpecError, match=message):
        read_model(tmp_path, Deployment(8))


def test_no_such_model(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"no model '.*gone': give a folder, a config.json, or one of kimi-k3"):
        read_model(tmp_path / "gone", Deployment(8))
    with pytest.raises(SpecError, match="cannot be read"):
        read_model(tmp_path, Deployment(8))


def test_the_text_decoder_of_a_model_with_vision() -> None:
    assert read("gemma-3-4b").facts.notes == ("the text decoder alone: encoders of other inputs are left out",)


def test_only_the_head_pays_for_multiplying_by_a_tied_weight() -> None:
    model = read("smollm2-135m")
    machine = hardware("b200")
    times = step_times(model.spec, model.facts, StepShape(1), machine).segments
    embed, head = times[0].alone_us, times[-1].alone_us
    gemm = gemm_us(1, 49152, 576, model.spec.weight("model.embed_tokens.weight").dtype, machine)
    assert head >= gemm > 2 * embed > 0
