"""`graphshard show`: any of the seven nouns as text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import click

from graphshard.cli.common import Output, answering, refuse_given
from graphshard.cli.planning import SHAPES, Planned, PlanRequest, plan_request, planned
from graphshard.cli.sequences import DRAFT_OPTIONS, PlannedStep, draft_request, planned_step, split_draft
from graphshard.core.lowering import Lowered, lower
from graphshard.core.specs import StepShape
from graphshard.report.tables import table_of
from graphshard.schedule.dual import mode_rows

NOUNS = ("model", "plan", "layout", "program", "sequence", "bound", "graph")
MODE_COLUMNS = {"step_shape": "step shape", "blocks": "blocks", "mode": "mode", "why": "why"}
Rows = list[dict[str, Any]]


JSON_HELP = """JSON keys: `noun`, `text`, `digest` (not of bound and graph), `step_shapes` (of program, bound and
graph); `rows` has one row for each op, or for each part of a model, plan or layout, with the noun's own fields;
`modes` (of plan and program, for a model with blocks) {step_shape, blocks, mode, why};
`sequences` (of sequence): the names that --sequence knows, each with its digest."""


@click.command("show", epilog=JSON_HELP)
@click.argument("noun", type=click.Choice(NOUNS))
@plan_request
@draft_request
@click.option("--sequence", default="step", show_default=True, help="With `sequence`: which, as cold, step or skip.")
@click.option("--batch-size", type=SHAPES, help="With `program`: whose, of --capture-sizes; else the smallest's.")
@click.option("--lowered", is_flag=True, help="With `program`: the list over streams and events that it stands for.")
@answering
def command(out: Output, noun: str, sequence: str, batch_size: int | None, lowered: bool, **options: Any) -> None:
    """Print NOUN as stable text.

    \b
    model    weights and segments
    plan     what was chosen, and why
    layout   where each byte lives
    program  the op list of a step
    sequence what the host issues in a speculative step, with the programs of target and draft
    bound    the op list over this machine's streams (small runtimes are built on the host device)
    graph    the captured graph's nodes, by kind
    """  # noqa: D301  # click's own mark, the character: these lines are not wrapped
    request, draft = split_draft(options)
    if noun != "sequence":
        refuse_given((*DRAFT_OPTIONS, "sequence"), f"a draft goes with sequence, not with {noun}")
    for name, is_given in (("--lowered", lowered), ("--batch-size", batch_size is not None)):
        if is_given and noun != "program":
            raise click.UsageError(f"{name} goes with program, not with {noun}")
    if noun in ("bound", "graph"):
        refuse_given(
            ("weights", "capture_sizes"), f"{noun} is shown of batch size 1, and of small layers or of --model"
        )
        _show_on_device(out, noun, request)
        return
    if noun == "sequence":
        _show_sequence(out, planned_step(request, draft), sequence)
        return
    made = planned(request)
    if noun == "program":
        _show_program(out, made, lowered, batch_size)
        return
    value: Any = getattr(made, noun)
    out.say(value.text().rstrip())
    modes = mode_rows(made.plan) if noun == "plan" else []
    if modes:
        out.say(table_of(modes, MODE_COLUMNS, "how steps run blocks, and why"))
    facts = {"modes": modes} if modes else {}
    out.emit(rows_of(value), noun=noun, text=value.text(), digest=value.digest, **facts)


def rows_of(value: Any) -> Rows:
    """The parts of a noun as flat rows: each tuple of dataclasses in it, one row an item."""
    rows: Rows = []
    for field in fields(value):
        content = getattr(value, field.name)
        if isinstance(content, tuple):
            rows += [{"part": field.name, **flat(item)} for item in content if is_dataclass(item)]
    return rows


def flat(item: Any) -> dict[str, Any]:
    """A dataclass's plain fields; nested dataclasses are counted."""
    row: dict[str, Any] = {}
    for field in fields(item):
        content = getattr(item, field.name)
        nested = isinstance(content, tuple) and content and is_dataclass(content[0])
        row["num_" + field.name if nested else field.name] = len(content) if nested else content
    return row


def _show_sequence(out: Output, made: PlannedStep, name: str) -> None:
    if name not in made.sequences:
        raise click.UsageError(f"--sequence {name} is none of this step's: {', '.join(made.sequences)}")
    sequence = made.sequences[name]
    out.say(sequence.text().rstrip())
    rows = [{"index": i, "kind": str(op).split()[0], **flat(op)} for i, op in enumerate(sequence.ops)]
    digests = {known: other.digest for known, other in made.sequences.items()}
    out.emit(rows, noun="sequence", text=sequence.text(), digest=sequence.digest, sequences=digests)


def _show_program(out: Output, made: Planned, lowered: bool, batch_size: int | None) -> None:
    shape = min(made.programs) if batch_size is None else StepShape(batch_size)
    if shape not in made.programs:
        raise click.UsageError(
            f"--batch-size {batch_size} is none of --capture-sizes: {' '.join(map(str, made.programs))}"
        )
    program = made.programs[shape]
    shapes = [str(shape) for shape, other in made.programs.items() if other is program]
    modes = [row for row in mode_rows(made.plan) if row["step_shape"] == str(shape)]
    facts: dict[str, Any] = {"modes": modes} if modes else {}
    if modes:  # as comments, so that the text is a program's still
        others = [str(shape) for shape, other in made.programs.items() if other is not program]
        out.say(f"# step shapes {' '.join(shapes)}" + (f"; other programs: {' '.join(others)}" if others else ""))
        for row in modes:
            out.say(f"# {row['blocks']}: {row['mode']}, {row['why']}")
    if lowered:
        low = lower(program, num_copies=made.plan.num_copies, num_copy_streams=made.plan.num_copy_streams)
        out.say(lowered_text(low).rstrip())
        rows = [{"index": i, "kind": type(op).__name__, **flat(op)} for i, op in enumerate(low.ops)]
        out.emit(rows, noun="lowered", text=low.text(), digest=low.digest, step_shapes=shapes, **facts)
        return
    out.say(program.text().rstrip())
    rows = [{"index": i, "kind": str(op).split()[0], **flat(op)} for i, op in enumerate(program.ops)]
    out.emit(rows, noun="program", text=program.text(), digest=program.digest, step_shapes=shapes, **facts)


def lowered_text(low: Lowered) -> str:
    """One lowered op a line, with its stream first: easier to read than the digest's text."""
    lines = [f"lowered streams={','.join(low.streams)} num_events={low.num_events} num_ops={len(low.ops)}"]
    for i, op in enumerate(low.ops):
        rest = " ".join(f"{name}={_short(value)}" for name, value in flat(op).items() if name not in ("stream", "op"))
        source = "-" if op.op < 0 else str(op.op)
        lines.append(f"{i:4d}  {op.stream:<8} {type(op).__name__.lower():<8} op={source:<4} {rest}")
    return "\n".join(lines) + "\n"


def _short(value: object) -> str:
    return ",".join(f"{unit}@{slot}" for unit, slot in value) or "-" if isinstance(value, tuple) else str(value)


def _show_on_device(out: Output, noun: str, request: PlanRequest) -> None:
    if request.model is not None:
        refuse_given(("layers",), "a model's folder says what its layers are: leave it out, or --model")
    from graphshard.bench.threads import run_threads  # from here on torch is imported
    from graphshard.cli.tiny import TinyRuntimes

    tiny = TinyRuntimes(request)
    look: Callable[..., dict[str, Any]] = tiny.bound if noun == "bound" else tiny.graph
    found = run_threads(look, request.world_size)[0]
    out.say(found["text"].rstrip())
    out.emit(found["rows"], noun=noun, text=found["text"], step_shapes=[str(StepShape(1))])
