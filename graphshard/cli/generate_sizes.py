"""What a request of `generate` comes to before ranks are started: prompts as tokens, and the sizes that follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from graphshard.cli.prompts import PROMPTS, Codec
from graphshard.core.errors import SpecError
from graphshard.models.open import load_config
from graphshard.models.speculative.acceptance import needed_positions

CACHE_STEP = 16
"""Cache lengths are multiples of this."""


def texts_of(prompts: tuple[str, ...], file: Path | None) -> list[str]:
    """The prompts that were asked for, or the built-in ones.

    Raises:
        SpecError: both options were given, or the file holds no text, or none of use.
    """
    if prompts and file is not None:
        raise SpecError("--prompt and --prompts were both given: put all prompts in the file, or none")
    texts = list(prompts)
    if file is not None:
        try:
            texts = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        except UnicodeDecodeError as error:
            raise SpecError(
                f"--prompts {file} is not text: byte {error.start} is no UTF-8; write one prompt a line, in UTF-8"
            ) from None
        if not texts:
            raise SpecError(f"--prompts {file} holds no prompt: write one a line")
    return texts or list(PROMPTS)


def sizes_of(
    folder: Path, texts: list[str], num_tokens: int, world_size: int, batch_size: int, block: int = 0
) -> dict[str, Any]:
    """Prompts as tokens, and the sizes that follow from them; the same for all ranks.

    `block` places of a speculative step are written from the last token on.

    Raises:
        SpecError: a prompt has no token, or the model too few positions.
    """
    config = load_config(folder)
    codec = Codec(folder)
    prompts = [codec.encode(text, config.vocab_size) for text in texts]
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise SpecError(f"prompt {index} ({texts[index]!r}) has no token: write something")
    needed = needed_positions(prompts, num_tokens, block)
    if needed > config.max_positions:
        blocks, smaller = (f", by blocks of {block},", " or a smaller --block") if block else ("", "")
        raise SpecError(
            f"a prompt of {max(map(len, prompts))} tokens and {num_tokens} more{blocks} need {needed} positions, the "
            f"model has {config.max_positions}: use fewer --tokens{smaller}"
        )
    length = min(config.max_positions, -(-needed // CACHE_STEP) * CACHE_STEP)
    most = -(-len(prompts) // world_size)
    return {"prompts": prompts, "cache_length": length, "batch_size": min(batch_size, most)}


def dealt(num_prompts: int, rank: int, world_size: int, batch_size: int) -> list[list[int]]:
    """The prompts of a rank, by number: dealt in turn and cut into batches, of which the last may be short."""
    mine = list(range(rank, num_prompts, world_size))
    return [mine[i : i + batch_size] for i in range(0, len(mine), batch_size)]
