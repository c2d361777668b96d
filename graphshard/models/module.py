"""A segmented model as an `nn.Module`: a submodule per layer, whose parameters are the layer's weights.

The segments are the very same; only where they find weights differs: each looks its weights up in its module when it
runs. So whoever exchanges a module's parameters around its forward (FSDP, for one) shards the same compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from graphshard.core.errors import SpecError
from graphshard.core.specs import StepShape, WeightSpec
from graphshard.runtime.memory import torch_dtype
from graphshard.runtime.model import Segment, SegmentedModel, StepState


class SegmentsModule(nn.Module):
    """Consecutive segments of one layer. Its forward runs them on a state; it returns nothing."""

    def __init__(self, segments: Sequence[Segment], weights: Mapping[str, Tensor]) -> None:
        """`weights` by name; they become parameters that need no gradient."""
        super().__init__()
        self.segments = tuple(segments)
        self.names = {weight: weight.replace(".", "_") for weight in weights}
        """The parameter that holds each weight: modules allow no dots."""
        assert len(set(self.names.values())) == len(weights), f"weights that differ in dots alone: {list(weights)}"
        for weight, tensor in weights.items():
            self.register_parameter(self.names[weight], nn.Parameter(tensor, requires_grad=False))

    def forward(self, state: StepState) -> None:
        """Run the segments; their results are in the state's buffers."""
        state.run(self.segments)


class SegmentedModule(nn.Module):
    """All of a model: `layers` in order; weights that several layers or none read are the module's own parameters."""

    layers: nn.ModuleList

    def __init__(self, model: SegmentedModel, read: Callable[[WeightSpec], Tensor]) -> None:
        """`read` gives each weight as a tensor, which the module keeps.

        Raises:
            SpecError: a layer's segments are not consecutive.
        """
        super().__init__()
        self.model = model
        runs = _layer_runs(model.segments)
        homes: dict[str, set[int | None]] = {}
        for segment in model.segments:
            for name in segment.spec.reads:
                homes.setdefault(name, set()).add(segment.spec.layer)
        own: dict[str, Tensor] = {}
        inside: dict[int, dict[str, Tensor]] = {layer: {} for layer, _ in runs if layer is not None}
        for spec in model.spec().weights:
            layers = homes.get(spec.name, set())
            layer = next(iter(layers)) if len(layers) == 1 else None
            (own if layer is None else inside[layer])[spec.name] = read(spec)
        self.outside = SegmentsModule((), own)
        self.layers = nn.ModuleList(
            SegmentsModule(segments, inside[layer]) for layer, segments in runs if layer is not None
        )
        self._runs = runs

    def state(self, shape: StepShape, buffers: Mapping[str, Tensor]) -> StepState:
        """A state whose weights are whatever this module's parameters are at the moment they are asked for."""
        weights: dict[str, Mapping[str, Tensor]] = {}
        layers = iter(self.layers)
        for layer, segments in self._runs:
            modules = [self.outside] if layer is None else [next(layers), self.outside]
            weights |= {segment.spec.path: _CurrentWeights(modules, segment.spec.reads) for segment in segments}
        return StepState(shape, weights, buffers)

    def forward(self, state: StepState) -> None:
        """Run one step on what the state's inputs hold."""
        layers = iter(self.layers)
        for layer, segments in self._runs:
            if layer is None:
                state.run(segments)
            else:
                next(layers)(state)


def new_buffers(model: SegmentedModel, shapes: Sequence[StepShape]) -> dict[StepShape, dict[str, Tensor]]:
    """Zeroed buffers for steps of `shapes`; caches are shared between them, as in a runtime."""
    caches: dict[str, Tensor] = {}
    buffers: dict[StepShape, dict[str, Tensor]] = {}
    for shape in shapes:
        here = buffers[shape] = {}
        for spec in model.buffers(shape):
            if spec.role == "cache":
                if spec.name not in caches:
                    caches[spec.name] = torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype))
                here[spec.name] = caches[spec.name][: shape.batch_size]
            else:
                here[spec.name] = torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype))
    return buffers


class _CurrentWeights(Mapping[str, Tensor]):
    """What a segment's declared weights are now."""

    def __init__(self, modules: Sequence[nn.Module], reads: Sequence[str]) -> None:
        self._homes = {}
        for name in reads:
            module = next(m for m in modules if isinstance(m, SegmentsModule) and name in m.names)
            self._homes[name] = (module, module.names[name])

    def __getitem__(self, name: str) -> Tensor:
        module, attribute = self._homes[name]
        return getattr(module, attribute)  # type: ignore[no-any-return]  # modules are untyped

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)


def _layer_runs(segments: Sequence[Segment]) -> list[tuple[int | None, tuple[Segment, ...]]]:
    """Segments by layer, in order; those outside all layers have None."""
    runs: list[tuple[int | None, list[Segment]]] = []
    for segment in segments:
        layer = segment.spec.layer
        if not runs or runs[-1][0] != layer:
            if layer is not None and any(layer == other for other, _ in runs):
                raise SpecError(
                    f"segment {segment.spec.path}: layer {layer} began before another layer and goes on after it"
                )
            runs.append((layer, []))
        runs[-1][1].append(segment)
    return [(layer, tuple(run)) for layer, run in runs]
