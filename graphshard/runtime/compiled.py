"""A compiled plan: all that follows from model and plan alone, verified, before a byte is reserved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graphshard.core.layout import Layout, build_layout
from graphshard.core.plan import Plan
from graphshard.core.program import Program
from graphshard.core.specs import ModelSpec, StepShape
from graphshard.schedule.emit import emit_all
from graphshard.verify import verify


@dataclass(frozen=True)
class Compiled:
    """A plan with its layout and one verified program per step shape; no device, no memory."""

    model: ModelSpec
    plan: Plan
    layout: Layout
    programs: Mapping[StepShape, Program]


def compile_plan(model: ModelSpec, plan: Plan) -> Compiled:
    """Layout and programs of `plan`.

    Raises:
        ProgramError: the verifier found a race; no byte has been reserved.
    """
    programs = emit_all(model, plan)
    layout = build_layout(model, plan)
    verify(
        programs, layout, model=model, num_copies=plan.num_copies, num_copy_streams=plan.num_copy_streams
    ).raise_if_bad()
    return Compiled(model, plan, layout, programs)
