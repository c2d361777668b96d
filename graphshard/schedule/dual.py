"""Modes: which blocks a step of each shape gathers and which it computes in slices, and why, in words.

off              no block is sliced: nothing here is asked
gather           blocks are sliced where they can be, and always gathered
tensor_parallel  every block that may be is computed in slices, at every step shape
auto             by step shape: as somebody who knows the machine says (`ModeChooser`: a tune file, the cost model),
                 else slices up to `RULE_TOKENS` tokens of the group
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from graphshard.core.errors import SpecError
from graphshard.core.plan import Mode, Plan, Unit, WeightDecision
from graphshard.core.specs import BlockSpec, ModelSpec, StepShape
from graphshard.schedule.gating import why_block_is_gathered
from graphshard.schedule.units import explain_blocks

Dual = Literal["off", "gather", "tensor_parallel", "auto"]
RULE_TOKENS = 700
"""Tokens of all ranks up to which slices are taken where nothing is known of the machine: the published estimate of
where replicas become faster, over 8 ranks (vLLM #50656)."""
MODES_BY = "modes: "
"""How the reason begins that says by what modes were chosen; ranks compare it."""

Modes = tuple[tuple[StepShape, tuple[Mode, ...]], ...]


class ModeChoice(Protocol):
    """How a block runs at a step shape, and why, without a full stop."""

    @property
    def mode(self) -> Mode:
        """Which."""

    @property
    def reason(self) -> str:
        """Why."""


class ModeChooser(Protocol):
    """Somebody who knows how long a block takes either way."""

    @property
    def headline(self) -> str:
        """Who says so; printed with the plan."""

    def choose(self, model: ModelSpec, block: BlockSpec, tokens_per_rank: int) -> ModeChoice:
        """The faster mode of `block` in a step of so many tokens of each rank."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A mode and its reason."""

    mode: Mode
    reason: str


@dataclass(frozen=True)
class RuleOfThumb:
    """What is chosen where nothing is known of the machine."""

    world_size: int

    @property
    def headline(self) -> str:
        """The rule."""
        return f"no figures of this machine: blocks are tensor-parallel up to {RULE_TOKENS} tokens of all ranks"

    def choose(self, model: ModelSpec, block: BlockSpec, tokens_per_rank: int) -> Chosen:
        """By tokens alone."""
        tokens = tokens_per_rank * self.world_size
        if tokens <= RULE_TOKENS:
            return Chosen("tensor_parallel", f"{tokens} tokens of all ranks, at most {RULE_TOKENS}")
        return Chosen("gather", f"{tokens} tokens of all ranks, more than {RULE_TOKENS}")


@dataclass(frozen=True)
class DualRequest:
    """A plan's blocks, and what was asked for."""

    model: ModelSpec
    world_size: int
    dual: Dual
    step_shapes: tuple[StepShape, ...]
    units: tuple[Unit, ...]
    decisions: tuple[WeightDecision, ...]
    chooser: ModeChooser | None = None


def choose_modes(request: DualRequest) -> tuple[Modes, tuple[str, ...]]:
    """`Plan.modes` and `Plan.block_reasons`; both empty where dual is off.

    Raises:
        SpecError: the model has no blocks.
    """
    model, dual = request.model, request.dual
    if dual == "off":
        return (), ()
    if not model.blocks:
        raise SpecError(
            f"dual is {dual}, and {model.name} declares no blocks: nothing of it can be computed in slices. Leave dual "
            "off, or give a model with blocks (Llama and KimiK3 have them with dual=True)"
        )
    is_sliced = {unit.weights for unit in request.units if unit.is_sliced}
    explained = explain_blocks(model, request.decisions, request.units, request.world_size)
    refused = {block.name: why for block in model.blocks if (why := _why_never(request, block, is_sliced))}
    sentences = [(block, _sentence(block, text)) for block, text in zip(model.blocks, explained, strict=True)]
    reasons = [f"{names}: {text}" for names, text in _grouped(sentences)]
    reasons += [f"{names}: always gathered: {why}" for names, why in _grouped(_refusals(model, refused, is_sliced))]
    chooser = request.chooser or RuleOfThumb(request.world_size)
    if dual == "auto" and len(refused) < len(model.blocks):
        reasons.append(MODES_BY + chooser.headline)
    elif dual != "auto" and request.chooser is not None:
        reasons.append(f"{MODES_BY}{dual} was asked for, whatever is known: {chooser.headline}")
    modes: list[tuple[StepShape, tuple[Mode, ...]]] = []
    for shape in request.step_shapes:
        chosen = [_choice(request, block, shape, chooser, refused) for block in model.blocks]
        modes.append((shape, tuple(choice.mode for choice in chosen)))
        reasons += _reasons_of(shape, model.blocks, chosen)
    return tuple(modes), tuple(reasons)


def _why_never(request: DualRequest, block: BlockSpec, is_sliced: set[tuple[str, ...]]) -> str:
    """Why `block` is gathered at every step shape; empty if nothing speaks against slices."""
    is_asked = request.dual != "gather"
    why = why_block_is_gathered(request.model, block, request.world_size, is_asked=is_asked)
    if why and request.dual == "gather":
        return "dual is gather"
    if why or block.weights in is_sliced:
        return why
    return "its weights are not sliced"


def _refusals(
    model: ModelSpec, refused: Mapping[str, str], is_sliced: set[tuple[str, ...]]
) -> Iterator[tuple[BlockSpec, str]]:
    """Refusals that the sentence on slices has not said already."""
    for block in model.blocks:
        if block.name in refused and block.weights in is_sliced:
            yield block, refused[block.name]


def _choice(
    request: DualRequest, block: BlockSpec, shape: StepShape, chooser: ModeChooser, refused: Mapping[str, str]
) -> ModeChoice:
    if block.name in refused:
        return Chosen("gather", refused[block.name])
    if request.dual == "tensor_parallel":
        return Chosen("tensor_parallel", "asked for at every step shape")
    return chooser.choose(request.model, block, shape.batch_size * shape.tokens_per_sequence)


def _sentence(block: BlockSpec, explained: str) -> str:
    """What `explain_blocks` says, without the block's name in front and its layer in names: alike for all layers."""
    text = explained.removeprefix(f"{block.name}: ")
    return text if block.layer is None else text.replace(f"layers.{block.layer}.", "")


def _grouped(said: Iterable[tuple[BlockSpec, str]]) -> list[tuple[str, str]]:
    """(names of blocks, what is said of all of them), in the order of the first of each."""
    groups: dict[str, list[str]] = {}
    for block, text in said:
        groups.setdefault(text, []).append(block.name)
    return [(_names(names), text) for text, names in groups.items()]


def _names(names: Sequence[str]) -> str:
    """`layers.0.mlp`, or `layers.1.mlp to layers.92.mlp (92 blocks)`."""
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)} blocks)"


def _reasons_of(shape: StepShape, blocks: Sequence[BlockSpec], chosen: Sequence[ModeChoice]) -> list[str]:
    texts = [(block, f"{choice.mode}, {choice.reason}") for block, choice in zip(blocks, chosen, strict=True)]
    return [f"{_prefix(shape)}{names}: {text}" for names, text in _grouped(texts)]


def _prefix(shape: StepShape) -> str:
    return f"step shape {shape}: "


def mode_rows(plan: Plan) -> list[dict[str, Any]]:
    """The table of modes: a row for each step shape and group of blocks that share mode and reason."""
    rows = []
    for shape, _ in plan.modes:
        for reason in plan.block_reasons:
            if reason.startswith(_prefix(shape)):
                names, _, text = reason.removeprefix(_prefix(shape)).partition(": ")
                mode, _, why = text.partition(", ")
                rows.append({"step_shape": str(shape), "blocks": names, "mode": mode, "why": why})
    return rows
