"""The yardstick that shares no code with ours: `transformers`' own greedy generation."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def greedy_tokens(folder: Path, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """`num_tokens` greedy tokens for each prompt, one prompt at a time, in float32, beyond any end-of-text token."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a folder is all it needs
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    model.train(False)
    model.generation_config.eos_token_id = None  # ours does not stop either: all runs are equally long
    model.generation_config.pad_token_id = 0
    generated = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens)
        generated.append(out[0, len(prompt) :].tolist())
    return generated
