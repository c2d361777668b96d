"""A Llama-family GGUF file as Hugging Face would name and lay out its parts: config, tokenizer, float32 weights.

Needs the packages `gguf` and `tokenizers` (extra `demo`). Both are imported where they are used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from graphshard.core.errors import LoadError
from graphshard.core.specs import WeightSpec

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3  # GGUF's token type of <|im_start|> and the like


class GgufLlama:
    """An open GGUF file whose architecture is llama."""

    def __init__(self, path: Path) -> None:
        """Read the file's fields; tensors are dequantised one by one, when asked for.

        Raises:
            LoadError: the file is unreadable, of another architecture, or the package `gguf` is missing.
        """
        try:
            import gguf
        except ImportError as error:
            raise LoadError(
                f"reading {path} needs the package gguf ({error}): pip install 'graphshard[demo]'"
            ) from None
        try:
            self._reader = gguf.GGUFReader(path)
        except (OSError, ValueError) as error:
            raise LoadError(f"{path} is not a readable GGUF file: {error}") from None
        self.path = path
        self._dequantize: Callable[..., Any] = gguf.dequantize
        architecture = self._field("general.architecture")
        if architecture != "llama":
            raise LoadError(f"{path} holds a model of architecture {architecture!r}; only llama is supported")

    def config(self) -> dict[str, Any]:
        """What Hugging Face's config.json would say."""
        heads, hidden = self._field("llama.attention.head_count"), self._field("llama.embedding_length")
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": len(self._reader.fields["tokenizer.ggml.tokens"].data),
            "hidden_size": hidden,
            "intermediate_size": self._field("llama.feed_forward_length"),
            "num_hidden_layers": self._field("llama.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._field("llama.attention.head_count_kv"),
            "head_dim": hidden // heads,
            "hidden_act": "silu",
            "rms_norm_eps": float(f"{self._field('llama.attention.layer_norm_rms_epsilon'):.6g}"),  # kept as a float32
            "rope_theta": self._field("llama.rope.freq_base"),
            "max_position_embeddings": self._field("llama.context_length"),
            "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in self._reader.tensors),
            "bos_token_id": self._field("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._field("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self._field("tokenizer.ggml.padding_token_id"),
            "dtype": "float32",
            "torch_dtype": "float32",
        }

    def weights(self) -> tuple[WeightSpec, ...]:
        """All weights, in the file's order, as float32."""
        return tuple(
            WeightSpec(self._name(tensor.name), tuple(int(n) for n in reversed(tensor.shape)), "float32")
            for tensor in self._reader.tensors
        )

    def data(self) -> Iterator[memoryview]:
        """Each weight's bytes, in the order of `weights`."""
        for tensor in self._reader.tensors:
            values = self._dequantize(tensor.data, tensor.tensor_type)
            if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
                values = _unpermute(values, self._field(_HEADS["attn_q" if ".attn_q." in tensor.name else "attn_k"]))
            yield memoryview(values.astype("float32", order="C", copy=False)).cast("B")

    def tokenizer(self) -> tuple[str, dict[str, Any]]:
        """The texts of tokenizer.json and, as an object, tokenizer_config.json.

        Raises:
            LoadError: a tokenizer of another kind than SmolLM's byte-level BPE, or no package `tokenizers`.
        """
        kind = (self._field("tokenizer.ggml.model"), self._field("tokenizer.ggml.pre"))
        if kind != ("gpt2", "smollm"):
            raise LoadError(f"{self.path} has a tokenizer of kind {kind}; only ('gpt2', 'smollm') is supported")
        try:
            import tokenizers
        except ImportError as error:
            raise LoadError(f"{self.path}: {error}; pip install 'graphshard[demo]'") from None
        tokens, types = self._field("tokenizer.ggml.tokens"), self._field("tokenizer.ggml.token_type")
        merges = [tuple(merge.split(" ")) for merge in self._field("tokenizer.ggml.merges")]
        vocabulary = {token: i for i, token in enumerate(tokens)}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
        byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([digits, byte_level])
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
        tokenizer.add_special_tokens(
            [tokenizers.AddedToken(token, special=True, normalized=False) for token in control]
        )
        return tokenizer.to_str(), self._tokenizer_config(tokens)

    def _tokenizer_config(self, tokens: list[str]) -> dict[str, Any]:
        named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": self._field("tokenizer.chat_template"),
            "model_max_length": self._field("llama.context_length"),
            "clean_up_tokenization_spaces": False,
            **{key: tokens[self._field(f"tokenizer.ggml.{name}_token_id")] for key, name in named.items()},
        }

    def _field(self, name: str) -> Any:
        field = self._reader.fields.get(name)
        if field is None:
            raise LoadError(f"{self.path} has no field {name}")
        return field.contents()

    def _name(self, name: str) -> str:
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
        if match and match[2] in _LAYER_NAMES:
            return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
        if name in _NAMES:
            return _NAMES[name]
        raise LoadError(f"{self.path}: tensor {name} is none of a llama's")


_HEADS = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}


def _unpermute(values: Any, num_heads: int) -> Any:
    """Rows back from GGUF's order (rotary pairs side by side) to Hugging Face's (halves apart)."""
    pairs = values.shape[0] // num_heads // 2
    return values.reshape(num_heads, pairs, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
