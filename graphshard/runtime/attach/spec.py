"""What of a module can be sharded: its parameters as a ModelSpec, and the reason for each one that is left alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from graphshard.core.errors import ProgramError, SpecError
from graphshard.core.sizes import DTYPE_BITS
from graphshard.core.specs import BufferSpec, ModelSpec, SegmentSpec, StepShape, WeightSpec
from graphshard.runtime.attach.layers import LayerStack
from graphshard.runtime.model import Segment, StepState

ATTACHED = "_graphshard_attached"
"""Set on each layer of an attached module."""

PREPARED = "_graphshard_prepared"
"""Set on each layer of a module between `prepare` and `finalize`."""


@dataclass(frozen=True)
class Holder:
    """`module` has the weight as its own parameter `attribute`."""

    module: nn.Module
    attribute: str
    weight: str
    parameter: nn.Parameter

    @property
    def holds(self) -> bool:
        """Whether it still does: users may put another parameter in its place."""
        return self.module._parameters.get(self.attribute) is self.parameter


@dataclass(frozen=True)
class ModuleSpec:
    """A module as the runtime sees it."""

    model: ModelSpec
    parameters: Mapping[str, nn.Parameter]
    """Of the model's weights, by name."""
    holders: tuple[Holder, ...]
    kept: Mapping[str, str]
    """Parameters inside the layers that stay as they are, with the reason."""


def module_spec(
    module: nn.Module,
    stack: LayerStack,
    *,
    whole_shapes: Mapping[str, tuple[int, ...]] | None = None,
    meta_allowed: bool = False,
) -> ModuleSpec:
    """Weights inside the layers, one segment for each call of a layer, and one before and after all of them.

    Args:
        module: what runs.
        stack: its layers.
        whole_shapes: of a prepared module that is finalized: the shapes of weights of which each rank has only rows.
        meta_allowed: whether weights may be on the meta device: then the spec says what they will be.

    Raises:
        SpecError: the module is compiled or attached already, or a weight inside its layers has no bytes here.
    """
    _refuse_module(module, stack, is_finalized=whole_shapes is not None)
    found = _Parameters(module, stack)
    kept = {}
    weights = {}
    holders = []
    reads: list[list[str]] = [[] for _ in stack.layers]
    for name, parameter in found.first_names.items():
        layer = found.layer_of(name)
        if layer is None:
            continue
        reason = _why_kept(name, parameter, meta_allowed) or found.why_shared(parameter)
        if reason:
            kept[name] = reason
            continue
        weights[name] = parameter
        reads[layer].append(name)
        for alias in found.names_of[id(parameter)]:
            path, _, attribute = alias.rpartition(".")
            holders.append(Holder(module.get_submodule(path), attribute, name, parameter))
    shapes = whole_shapes or {}
    specs = tuple(_weight_spec(name, parameter, shapes.get(name)) for name, parameter in weights.items())
    model = ModelSpec(type(module).__name__, specs, _segments(stack, reads))
    return ModuleSpec(model, weights, tuple(holders), kept)


class ModuleSegments:
    """The segments of an attached module: its own forward runs them, never the runtime."""

    def __init__(self, model: ModelSpec) -> None:
        self._model = model
        self.segments = tuple(Segment(spec, _refuse_run) for spec in model.segments)

    def spec(self) -> ModelSpec:
        """See SegmentedModel."""
        return self._model

    def buffers(self, shape: StepShape) -> tuple[BufferSpec, ...]:
        """None: the module allocates its own activations."""
        return ()


class _Parameters:
    """All names of all parameters: two names may mean one tensor, inside a layer, between layers, or outside."""

    def __init__(self, module: nn.Module, stack: LayerStack) -> None:
        self._prefixes = [
            (f"{name}." if name else "", layer) for layer, names in enumerate(stack.names) for name in names
        ]
        self.first_names: dict[str, nn.Parameter] = {}
        self.names_of: dict[int, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names = self.names_of.setdefault(id(parameter), [])
            names.append(name)
            if len(names) == 1:
                self.first_names[name] = parameter
        self._sharing = _sharing({**self.first_names, **dict(module.named_buffers())})

    def layer_of(self, name: str) -> int | None:
        return next((layer for prefix, layer in self._prefixes if name.startswith(prefix)), None)

    def why_shared(self, parameter: nn.Parameter) -> str:
        """The reason for which a parameter with several names, or with another one's bytes, is kept whole."""
        names = self.names_of[id(parameter)]
        other = self._sharing.get(names[0])
        names = names if other is None else [*names, other]
        layers = {self.layer_of(name) for name in names}
        if None in layers:
            return f"tied to {next(n for n in names if self.layer_of(n) is None)}, outside the layers"
        if len(layers) > 1:
            return f"shared by layers {' '.join(map(str, sorted(layer for layer in layers if layer is not None)))}"
        return "" if other is None else f"shares its bytes with {other}"


def _sharing(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """For each tensor whose memory overlaps another one's (views, tied ones) the name of one such."""
    places = sorted((*place, name) for name, tensor in tensors.items() if (place := _place(tensor)) is not None)
    found: dict[str, str] = {}
    last_end, last = 0, ""
    for begin, end, name in places:
        if begin < last_end:
            found[name] = last
            found.setdefault(last, name)
        if end > last_end:
            last_end, last = end, name
    return found


def _place(tensor: Tensor) -> tuple[int, int] | None:
    """The addresses between which a plain tensor's bytes lie; None if it has none."""
    if type(tensor) not in (nn.Parameter, Tensor) or tensor.device.type == "meta":
        return None
    if tensor.layout is not torch.strided or not tensor.numel():
        return None
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _refuse_module(module: nn.Module, stack: LayerStack, is_finalized: bool) -> None:
    for path, inner in module.named_modules():
        where = path or type(module).__name__
        if isinstance(inner, torch.jit.ScriptModule):
            raise SpecError(
                f"{where} is a ScriptModule: its compiled code keeps weights of its own; attach before scripting"
            )
        if inner._compiled_call_impl is not None or type(inner).__name__ == "OptimizedModule":
            raise SpecError(
                f"{where} is compiled by torch.compile, which does not run the hooks that gather its weights; "
                "attach the module itself, not compiled"
            )
    for layer, names in zip(stack.layers, stack.names, strict=True):
        if ATTACHED in layer.__dict__:
            raise SpecError(f"{names[0]} is attached already: detach() it first, or load it anew if it was closed")
        if PREPARED in layer.__dict__ and not is_finalized:
            raise SpecError(
                f"{names[0]} was prepared before, and shows placeholders or rows: finalize() that, or make the "
                "module anew"
            )


def _why_kept(name: str, parameter: nn.Parameter, meta_allowed: bool) -> str:
    """The reason for which the bytes of `parameter` are not sharded; SpecError where it has none to compute with."""
    kind = type(parameter)
    if isinstance(parameter, (nn.UninitializedParameter, nn.UninitializedBuffer)):
        raise SpecError(f"weight {name} is uninitialised: run the module once before attaching it")
    if kind.__name__ == "DTensor":
        raise SpecError(
            f"weight {name} is a DTensor, which is split over ranks already: only replicated weights are "
            "sharded; attach the module before it is parallelised"
        )
    if parameter.device.type == "meta" and not meta_allowed:
        raise SpecError(f"weight {name} is on the meta device and has no bytes: load the module before attaching it")
    if parameter.device.type not in ("cpu", "meta"):
        raise SpecError(f"weight {name} is on {parameter.device}: this version attaches modules on the CPU")
    if kind is not nn.Parameter:
        return f"is a {kind.__name__}: only plain parameters are sharded"
    if parameter.is_quantized:
        return f"is quantised ({parameter.dtype}): only plain bytes are sharded"
    if parameter.layout is not torch.strided:
        return f"has layout {parameter.layout}: only plain bytes are sharded"
    if parameter.is_inference() and parameter.device.type != "meta":
        return "was made in inference mode: its memory cannot be exchanged"
    if dtype_name(parameter) not in DTYPE_BITS:
        return f"has dtype {parameter.dtype}, which has no known size"
    return ""


def _weight_spec(name: str, parameter: nn.Parameter, whole_shape: tuple[int, ...] | None) -> WeightSpec:
    strides = None if parameter.is_contiguous() or whole_shape is not None else tuple(parameter.stride())
    return WeightSpec(
        name, tuple(parameter.shape) if whole_shape is None else whole_shape, dtype_name(parameter), strides
    )


def dtype_name(tensor: Tensor) -> str:
    """Torch's name of a tensor's dtype, without `torch.`."""
    return str(tensor.dtype).removeprefix("torch.")


def _segments(stack: LayerStack, reads: Sequence[Sequence[str]]) -> tuple[SegmentSpec, ...]:
    """A layer's first call is the segment `forward`, its k-th `forward#k`."""
    segments = [SegmentSpec("before_layers", None, ())]
    calls = [0] * len(stack.layers)
    for layer in stack.order:
        calls[layer] += 1
        name = "forward" if calls[layer] == 1 else f"forward#{calls[layer]}"
        segments.append(SegmentSpec(name, layer, tuple(reads[layer])))
    return (*segments, SegmentSpec("after_layers", None, ()))


def _refuse_run(state: StepState) -> None:
    raise ProgramError(
        "this runtime drives a module: call the module, or begin_step for a loop of one's own; run and capture need a "
        "model made of segments"
    )
