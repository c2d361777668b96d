"""`transformers`' own forward as a step: another implementation of the same model, on whole weights."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphshard.core.errors import SpecError


class TransformersModel:
    """A causal language model in float32, its weights copied to memory that torch aligned."""

    def __init__(self, folder: Path, cache_length: int) -> None:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a folder is all it needs
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        # the name that all versions from 4 on know
        warnings.filterwarnings("ignore", message=".*past_key_values.* is deprecated", category=FutureWarning)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        self.model.train(False)
        for parameter in self.model.parameters():
            parameter.data = parameter.data.clone()  # from a mapped file they lie at odd addresses
        self.cache_length = cache_length

    def step(self, batch_size: int) -> TransformersStep:
        """A step of one token for each of `batch_size` sequences."""
        return TransformersStep(self, batch_size)


class TransformersStep:
    """A step over a static cache, with the surface of a `StepGraph`. All sequences are at the same position."""

    def __init__(self, owner: TransformersModel, batch_size: int) -> None:
        from transformers import StaticCache

        self._model = owner.model
        self._cache: Any = StaticCache(config=owner.model.config, max_cache_len=owner.cache_length)
        self._position = 0
        self.inputs = {name: torch.zeros(batch_size, 1, dtype=torch.int64) for name in ("tokens", "positions")}
        self.outputs: dict[str, Tensor] = {}

    def replay(self) -> None:
        """Run the step on what the inputs hold."""
        position = int(self.inputs["positions"][0, 0])
        if position != self._position:
            self._move_to(position)
        with torch.inference_mode():
            done = self._model(
                input_ids=self.inputs["tokens"],
                position_ids=self.inputs["positions"],
                past_key_values=self._cache,
                use_cache=True,
            )
        self.outputs["logits"] = done.logits
        self._position = position + 1

    def _move_to(self, position: int) -> None:
        """Have the cache write at `position` next; it counts by itself.

        Raises:
            SpecError: this version's cache keeps no count of its own.
        """
        for layer in self._cache.layers:
            if not hasattr(layer, "cumulative_length"):
                raise SpecError(
                    "the static cache of this transformers cannot be moved: use 5.0 or later, or --no-reference"
                )
            layer.cumulative_length.fill_(position)
