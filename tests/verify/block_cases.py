"""Models with blocks, their plans with chosen modes, and programs of several ranks for the exact judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graphshard.core.lowering import Lowered, lower
from graphshard.core.plan import Mode, Plan, Unit
from graphshard.core.program import Program
from graphshard.core.specs import BlockSpec, DeviceSpec, ModelSpec, SegmentSpec, StepShape, WeightSpec
from graphshard.schedule.auto import make_plan
from graphshard.schedule.emit import emit_all
from graphshard.verify.interpreter import Outcome
from graphshard.verify.rank_interpreter import explore_ranks

DEVICE = DeviceSpec("cuda", "any", 1 << 37)
DECODE, PREFILL = StepShape(1), StepShape(16)
HIDDEN, WIDE = 16, 48


def block_model(num_layers: int = 2, *, attention: bool = True, norms: bool = False) -> ModelSpec:
    """Layers of an attention (one weight) and a block of two segments; with `norms` the block's first reads another."""
    weights: list[WeightSpec] = []
    segments: list[SegmentSpec] = []
    blocks: list[BlockSpec] = []
    for layer in range(num_layers):
        at = f"layers.{layer}"
        if attention:
            weights.append(WeightSpec(f"{at}.attn", (HIDDEN, HIDDEN), "float32"))
            segments.append(SegmentSpec("attn", layer, (f"{at}.attn",)))
        norm = (f"{at}.norm",) if norms else ()
        weights += [WeightSpec(name, (HIDDEN,), "float32") for name in norm]
        weights += [WeightSpec(f"{at}.{name}", (WIDE, HIDDEN), "float32") for name in ("gate", "up", "down")]
        begin = len(segments)
        segments += [
            SegmentSpec("gate_up", layer, (*norm, f"{at}.gate", f"{at}.up")),
            SegmentSpec("down", layer, (f"{at}.down",)),
        ]
        sliced = (f"{at}.gate", f"{at}.up", f"{at}.down")
        blocks.append(
            BlockSpec(
                f"{at}.mlp",
                layer,
                begin,
                begin + 2,
                sliced[:2],
                sliced[2:],
                HIDDEN,
                HIDDEN,
                "float32",
                SegmentSpec("mlp.prepare", layer, norm),
                SegmentSpec("mlp.compute", layer, sliced),
                SegmentSpec("mlp.finish", layer, ()),
            )
        )
    return ModelSpec("blocks", tuple(weights), tuple(segments), blocks=tuple(blocks))


def block_plan(model: ModelSpec, modes: dict[StepShape, Sequence[Mode]], **options: object) -> Plan:
    """A plan with a unit for each weight outside the blocks and a sliced one for each block, in these modes."""
    in_blocks = {name: block for block in model.blocks for name in block.weights}
    groups: dict[str, tuple[str, ...]] = {}
    for weight in model.weights:
        block = in_blocks.get(weight.name)
        groups.setdefault(*((weight.name, (weight.name,)) if block is None else (block.name, block.weights)))
    units = [
        Unit(index, name, weights, is_sliced=any(name == block.name for block in model.blocks))
        for index, (name, weights) in enumerate(groups.items())
    ]
    options = {"prefetch_depth": 1, "world_size": 2, **options}
    world_size = options.pop("world_size")
    assert isinstance(world_size, int)
    plan = make_plan(model, world_size, DEVICE, placed=units, step_shapes=list(modes), **options)
    return replace(plan, modes=tuple((shape, tuple(modes[shape])) for shape in sorted(modes)))


def block_program(model: ModelSpec, modes: Sequence[Mode], **options: object) -> Program:
    """The scheduler's program of `model` in these modes."""
    (program,) = emit_all(model, block_plan(model, {DECODE: modes}, **options)).values()
    return program


def judged(
    steps: Sequence[Program],
    num_ranks: int = 2,
    *,
    lists: Sequence[Lowered] | None = None,
    num_copies: int | None = None,
    rank_1: Sequence[Program] = (),
) -> Outcome:
    """What ranks that all do `steps` can come to; with `lists` for `lower`'s own, and rank 1 doing something else."""
    num_copies = num_ranks if num_copies is None else num_copies
    ranks = [list(zip(steps, lists or [lower(program, num_copies) for program in steps], strict=True))] * num_ranks
    if rank_1:
        ranks[1] = [(program, lower(program, num_copies)) for program in rank_1]
    return explore_ranks(ranks, is_collective=num_copies == 1)
