"""Small random models of many architectures of `transformers`, with inputs: what `attach` must not change by a bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

VOCAB, HIDDEN, HEADS = 96, 64, 4
_DECODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ENCODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GPT2: dict[str, Any] = {"vocab_size": VOCAB, "n_embd": HIDDEN, "n_layer": 3, "n_head": HEADS, "n_positions": 64}


@dataclass(frozen=True)
class Architecture:
    """One row: a transformers config class and what its small random model is made of."""

    name: str
    config: str
    model: str
    options: Mapping[str, Any]
    attach: Mapping[str, Any] = field(default_factory=dict)
    """What `attach` is told: layers or order."""
    inputs: str = "tokens"
    """`tokens`, `pixels`, or `both sides` of an encoder-decoder."""
    note: str = ""

    def build(self) -> nn.Module:
        """The same random model each time."""
        import transformers

        torch.manual_seed(20)
        config = getattr(transformers, self.config)(**self.options)
        model = getattr(transformers, self.model)(config)
        with torch.no_grad():
            for parameter in model.parameters():  # zeros and ones at the start would hide what is swapped
                parameter.add_(torch.randn_like(parameter) * 0.02)
        return model.eval()

    def steps(self) -> list[dict[str, Tensor]]:
        """Inputs of three forwards, of unlike shapes."""
        generator = torch.Generator().manual_seed(21)

        def tokens(batch: int, length: int) -> Tensor:
            return torch.randint(3, VOCAB, (batch, length), generator=generator)

        if self.inputs == "pixels":
            return [{"pixel_values": torch.randn(batch, 3, 16, 16, generator=generator)} for batch in (1, 2, 1)]
        steps = [{"input_ids": tokens(2, 7)}, {"input_ids": tokens(1, 1)}, {"input_ids": tokens(1, 12)}]
        if self.inputs == "both sides":
            return [step | {"decoder_input_ids": tokens(step["input_ids"].shape[0], 5)} for step in steps]
        return steps

    @property
    def generates(self) -> bool:
        """Whether it is a decoder that generates with a cache."""
        return "CausalLM" in self.model or "LMHead" in self.model or self.inputs == "both sides"


def decoder(name: str, family: str, model: str = "", **options: Any) -> Architecture:
    """A decoder with llama's names for its sizes."""
    keywords = {key: options.pop(key) for key in ("attach", "note") if key in options}
    return Architecture(name, f"{family}Config", model or f"{family}ForCausalLM", _DECODER | options, **keywords)


def encoder(name: str, family: str, **options: Any) -> Architecture:
    """An encoder with BERT's names for its sizes."""
    keywords = {key: options.pop(key) for key in ("attach", "note") if key in options}
    return Architecture(name, f"{family}Config", f"{family}Model", _ENCODER | options, **keywords)


ARCHITECTURES: tuple[Architecture, ...] = (
    decoder("llama", "Llama"),
    decoder("llama, tied", "Llama", tie_word_embeddings=True),
    decoder("mistral", "Mistral", sliding_window=4),
    decoder("qwen2", "Qwen2"),
    decoder("qwen3", "Qwen3", head_dim=16),
    decoder("qwen3_moe", "Qwen3Moe", head_dim=16, num_experts=4, **_MOE),
    decoder("qwen2_moe", "Qwen2Moe", num_experts=4, shared_expert_intermediate_size=32, **_MOE),
    decoder("mixtral", "Mixtral", num_local_experts=4, num_experts_per_tok=2),
    decoder("olmoe", "Olmoe", num_experts=4, num_experts_per_tok=2),
    decoder(
        "deepseek_v3",
        "DeepseekV3",
        num_key_value_heads=HEADS,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
        first_k_dense_replace=1,
        **_MOE,
    ),
    decoder("phi", "Phi"),
    decoder("phi3", "Phi3"),
    decoder("gemma", "Gemma", head_dim=16),
    decoder("gemma2", "Gemma2", head_dim=16, sliding_window=4),
    decoder("gemma3", "Gemma3Text", "Gemma3ForCausalLM", head_dim=16, sliding_window=4),
    decoder("olmo2", "Olmo2"),
    decoder("starcoder2", "Starcoder2"),
    decoder("stablelm", "StableLm"),
    decoder("cohere", "Cohere"),
    decoder("granite", "Granite"),
    decoder("glm4", "Glm4", head_dim=16),
    decoder("smollm3", "SmolLM3"),
    decoder("gpt_neox", "GPTNeoX"),
    decoder("falcon", "Falcon", num_kv_heads=HEADS, new_decoder_architecture=False),
    Architecture("gpt2", "GPT2Config", "GPT2LMHeadModel", _GPT2, note="Conv1D"),
    Architecture("gptj", "GPTJConfig", "GPTJForCausalLM", _GPT2 | {"rotary_dim": 8}),
    Architecture("gpt_bigcode", "GPTBigCodeConfig", "GPTBigCodeForCausalLM", _GPT2),
    Architecture(
        "gpt_neo",
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        {
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "num_layers": 2,
            "num_heads": HEADS,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 64,
        },
    ),
    Architecture(
        "opt",
        "OPTConfig",
        "OPTForCausalLM",
        {
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "ffn_dim": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": HEADS,
            "max_position_embeddings": 64,
            "word_embed_proj_dim": HIDDEN,
        },
    ),
    Architecture(
        "bloom",
        "BloomConfig",
        "BloomForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": HIDDEN, "n_layer": 3, "n_head": HEADS},
    ),
    Architecture(
        "mamba",
        "MambaConfig",
        "MambaForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 8},
        note="state space",
    ),
    Architecture(
        "mamba2",
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "state_size": 8,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 2,
            "chunk_size": 8,
        },
        note="state space",
    ),
    decoder(
        "jamba",
        "Jamba",
        num_hidden_layers=4,
        num_experts=2,
        num_experts_per_tok=1,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=8,
        note="hybrid",
    ),
    decoder(
        "bamba",
        "Bamba",
        mamba_d_state=8,
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_n_groups=1,
        mamba_chunk_size=8,
        attn_layer_indices=[1],
        note="hybrid",
    ),
    decoder(
        "zamba2",
        "Zamba2",
        num_hidden_layers=4,
        num_key_value_heads=HEADS,
        layers_block_type=["linear_attention", "hybrid", "linear_attention", "hybrid"],
        mamba_d_state=8,
        n_mamba_heads=8,
        mamba_headdim=16,
        mamba_ngroups=1,
        chunk_size=8,
        num_mem_blocks=1,
        adapter_rank=8,
        note="hybrid, one block shared by layers",
    ),
    decoder(
        "qwen3_next",
        "Qwen3Next",
        head_dim=16,
        num_experts=4,
        shared_expert_intermediate_size=32,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        note="hybrid, linear attention",
        **_MOE,
    ),
    decoder(
        "lfm2",
        "Lfm2",
        layer_types=["conv", "full_attention", "conv"],
        block_multiple_of=32,
        note="hybrid, convolutions",
    ),
    decoder(
        "recurrent_gemma",
        "RecurrentGemma",
        lru_width=HIDDEN,
        block_types=["recurrent", "attention"],
        attention_window_size=8,
        note="hybrid, recurrent",
    ),
    Architecture(
        "falcon_mamba",
        "FalconMambaConfig",
        "FalconMambaForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 8},
        note="state space",
    ),
    Architecture(
        "xlnet",
        "XLNetConfig",
        "XLNetModel",
        {"vocab_size": VOCAB, "d_model": HIDDEN, "n_layer": 3, "n_head": HEADS, "d_inner": 96},
    ),
    encoder("bert", "Bert"),
    encoder("roberta", "Roberta"),
    encoder("electra", "Electra", embedding_size=32),
    encoder("deberta_v2", "DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    encoder("xlm_roberta", "XLMRoberta"),
    encoder("modernbert", "ModernBert"),
    encoder("albert", "Albert", embedding_size=32, attach={"order": [0, 0, 0]}, note="one layer called three times"),
    Architecture(
        "distilbert",
        "DistilBertConfig",
        "DistilBertModel",
        {"vocab_size": VOCAB, "dim": HIDDEN, "hidden_dim": 96, "n_layers": 3, "n_heads": HEADS},
    ),
    Architecture(
        "t5, encoder",
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCAB,
            "d_model": HIDDEN,
            "d_kv": 16,
            "d_ff": 96,
            "num_layers": 3,
            "num_heads": HEADS,
            "decoder_start_token_id": 0,
        },
        attach={"layers": "encoder.block"},
        inputs="both sides",
    ),
    Architecture(
        "t5, decoder",
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCAB,
            "d_model": HIDDEN,
            "d_kv": 16,
            "d_ff": 96,
            "num_layers": 3,
            "num_heads": HEADS,
            "decoder_start_token_id": 0,
        },
        attach={"layers": "decoder.block"},
        inputs="both sides",
    ),
    Architecture(
        "bart, decoder",
        "BartConfig",
        "BartForConditionalGeneration",
        {
            "vocab_size": VOCAB,
            "d_model": HIDDEN,
            "encoder_layers": 3,
            "decoder_layers": 3,
            "encoder_attention_heads": HEADS,
            "decoder_attention_heads": HEADS,
            "encoder_ffn_dim": 96,
            "decoder_ffn_dim": 96,
            "max_position_embeddings": 64,
        },
        attach={"layers": "model.decoder.layers"},
        inputs="both sides",
    ),
    Architecture(
        "clip, vision",
        "CLIPVisionConfig",
        "CLIPVisionModel",
        {
            "hidden_size": HIDDEN,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": HEADS,
            "image_size": 16,
            "patch_size": 4,
        },
        inputs="pixels",
    ),
    Architecture(
        "swin",
        "SwinConfig",
        "SwinModel",
        {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4},
        inputs="pixels",
        note="a layer is a stage",
    ),
    Architecture(
        "vit",
        "ViTConfig",
        "ViTModel",
        {
            "hidden_size": HIDDEN,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": HEADS,
            "image_size": 16,
            "patch_size": 4,
        },
        inputs="pixels",
    ),
)


def outputs_of(model: Callable[..., Any], step: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors at the top of what one forward returns (logits, hidden states)."""
    with torch.no_grad():
        result = model(**step)
    return {name: value for name, value in result.items() if isinstance(value, Tensor)}
