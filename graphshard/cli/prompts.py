"""The demo's prompts, and the tokens that stand for them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from graphshard.bench.ranges import check_tokens
from graphshard.core.errors import SpecError

PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time, in a small village by the sea, there lived",
    "def fibonacci(n):",
    "The three primary colors are",
    "To make pancakes, you need",
    "My favorite season is autumn, because",
    "The largest planet in the solar system is",
)

TOKENIZER = "tokenizer.json"


class Codec:
    """Text to tokens and back, by a model folder's tokenizer.json; without one, tokens stand for themselves."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer: Any = None
        file = folder / TOKENIZER
        if file.exists():
            from tokenizers import Tokenizer

            try:
                self._tokenizer = Tokenizer.from_file(str(file))
            except Exception as error:  # it raises Exception itself
                raise SpecError(
                    f"{file} is no tokenizer ({str(error).splitlines()[0]}): download it again, or remove it to go by "
                    "token numbers"
                ) from None

    def encode(self, prompt: str, vocab_size: int) -> list[int]:
        """The prompt's tokens; without a tokenizer, one below `vocab_size` for each word, made from its letters.

        Raises:
            SpecError: the tokenizer is not the model's: a token is outside the vocabulary.
        """
        if self._tokenizer is None:
            return [sum(ord(letter) * 7**i for i, letter in enumerate(word)) % vocab_size for word in prompt.split()]
        tokens = list(self._tokenizer.encode(prompt, add_special_tokens=False).ids)
        check_tokens(prompt, tokens, vocab_size)
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """The tokens' text; without a tokenizer, the numbers."""
        if self._tokenizer is None:
            return "".join(f" {token}" for token in tokens)
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def is_special(self, token: int) -> bool:
        """Whether `token` stands for no text: the end of one, or of a turn."""
        return self._tokenizer is not None and token in self._special

    @cached_property
    def _special(self) -> frozenset[int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(token for token, what in added.items() if what.special)


class Typewriter:
    """Prints a growing text piece by piece, up to its end; an unfinished character is held back."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._tokens: list[int] = []
        self._shown = ""
        self._is_over = False

    def add(self, token: int) -> None:
        """Print what `token` adds to the text; after its end nothing more, whatever a fixed number of steps gives."""
        self._is_over = self._is_over or self._codec.is_special(token)
        if self._is_over:
            return
        self._tokens.append(token)
        text = self._codec.decode(self._tokens)
        if not text.endswith("\ufffd"):
            print(text[len(self._shown) :].replace("\n", "\n    "), end="", flush=True)
            self._shown = text
