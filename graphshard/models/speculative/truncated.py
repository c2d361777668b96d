"""The first layers of a llama as its own draft, with the target's embedding, last norm and head."""

from __future__ import annotations

from dataclasses import replace

from graphshard.core.errors import SpecError
from graphshard.core.specs import ModelSpec
from graphshard.models.caches import DEFAULT_CACHE_LENGTH
from graphshard.models.config import LlamaConfig
from graphshard.models.llama import Llama


class TruncatedLlama(Llama):
    """A SegmentedModel, loaded from the target's own folder: it needs no training, and foresees what is easy."""

    def __init__(
        self, config: LlamaConfig, num_layers: int, max_batch_size: int, cache_length: int = DEFAULT_CACHE_LENGTH
    ) -> None:
        """The first `num_layers` layers of the target, whose config is `config`.

        Raises:
            SpecError: the target has not so many layers; and as `Llama`.
        """
        if not 1 <= num_layers <= config.num_layers:
            raise SpecError(
                f"a draft of {num_layers} layers of a llama that has {config.num_layers}: take 1 to as many"
            )
        self._num_target_layers = config.num_layers
        super().__init__(replace(config, num_layers=num_layers), max_batch_size, cache_length)

    def spec(self) -> ModelSpec:
        """The layers' weights are its own, those outside the layers the target's."""
        spec = super().spec()
        outside = {name for segment in spec.segments if segment.layer is None for name in segment.reads}
        return replace(spec, borrowed=tuple(weight.name for weight in spec.weights if weight.name in outside))

    @property
    def redundant_tensors(self) -> tuple[str, ...]:
        """Patterns of the tensors in the target's checkpoint that no weight of its own is made of."""
        deeper = (f"model.layers.{layer}.*" for layer in range(self.config.num_layers, self._num_target_layers))
        return (*super().redundant_tensors, *self.spec().borrowed, *deeper)
