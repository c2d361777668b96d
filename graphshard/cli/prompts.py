"""The demo's prompts, and the tokens that stand for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

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


class Codec:
    """Text to tokens and back, by a model folder's tokenizer.json; without one, tokens stand for themselves."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer: Any = None
        file = folder / "tokenizer.json"
        if file.exists():
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(file))

    def encode(self, prompt: str, vocab_size: int) -> list[int]:
        """The prompt's tokens; without a tokenizer, one below `vocab_size` for each word, made from its letters."""
        if self._tokenizer is None:
            return [sum(ord(letter) * 7**i for i, letter in enumerate(word)) % vocab_size for word in prompt.split()]
        return list(self._tokenizer.encode(prompt, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The tokens' text; without a tokenizer, the numbers."""
        if self._tokenizer is None:
            return "".join(f" {token}" for token in tokens)
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


class Typewriter:
    """Prints a growing text piece by piece; an unfinished character is held back."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._tokens: list[int] = []
        self._shown = ""

    def add(self, token: int) -> None:
        """Print what `token` adds to the text."""
        self._tokens.append(token)
        text = self._codec.decode(self._tokens)
        if not text.endswith("\ufffd"):
            print(text[len(self._shown) :].replace("\n", "\n    "), end="", flush=True)
            self._shown = text
