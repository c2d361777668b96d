"""`graphshard verify`: the verifier over printed programs or sequences, or over those of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from graphshard.cli.common import Output, answering, refuse_given
from graphshard.cli.planning import PlanRequest, plan_request, planned
from graphshard.cli.sequences import DRAFT_OPTIONS, draft_request, planned_step, split_draft
from graphshard.core.errors import ProgramError
from graphshard.core.plan import copies_per_gather
from graphshard.core.program import Program
from graphshard.core.sequence import StepSequence
from graphshard.verify import Report, verify, verify_sequences

PLAN_OPTIONS = (
    "layers",
    "weights",
    "model",
    "units",
    "prefetch_depth",
    "num_slots",
    "head",
    "capture_sizes",
    "dual",
    "tune",
)
"""What files make superfluous; copies and their streams are no part of a file."""


JSON_HELP = """JSON keys: `rows` has one row for each violation {rule, name, op, unit, slot, step, where, text,
wrong_bytes}; `good`, `num_programs`, `num_ops`. Of sequences `num_programs` counts sequences."""


@click.command("verify", epilog=JSON_HELP)
@click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="[FILE]...")
@plan_request
@draft_request
@answering
def command(out: Output, files: tuple[Path, ...], **options: Any) -> bool:
    """Verify programs as `show program` prints them, or, without FILE, the programs of the plan that the options name.

    Several files are the programs of one plan: every ordered pair of them is checked too. With files of
    `show sequence`, or with --draft-layers, the sequences of a speculative step are verified, and every ordered pair
    that may follow each other. A file says nothing about bytes, so R7 and R11 are checked for plans only. Exit code 1:
    not free of races.
    """
    request, draft = split_draft(options)
    report: Report
    if files:
        refuse_given(
            (*PLAN_OPTIONS, *DRAFT_OPTIONS), "a file's program is what it is: leave out the option, or the files"
        )
        report = _files_report({path: _text(path) for path in files}, request)
    elif draft.draft_layers is not None:
        report = planned_step(request, draft).report()
    else:
        refuse_given(DRAFT_OPTIONS, "there is a draft with --draft-layers alone")
        made = planned(request)
        report = verify(
            made.programs,
            made.layout,
            model=made.model,
            num_copies=made.plan.num_copies,
            num_copy_streams=made.plan.num_copy_streams,
        )
    out.say(report.text())
    rows = [{**asdict(violation), "name": violation.name} for violation in report.violations]
    out.emit(rows, good=report.is_good, num_programs=report.num_programs, num_ops=report.num_ops)
    return report.is_good


def _files_report(texts: Mapping[Path, str], request: PlanRequest) -> Report:
    """Programs of one plan, or sequences of one step, named after their files."""
    num_copies = copies_per_gather(request.transport, request.world_size)
    are_sequences = [any(line.split()[:1] == ["sequence"] for line in text.splitlines()) for text in texts.values()]
    if not any(are_sequences):
        programs = [Program.parse(text) for text in texts.values()]
        return verify(programs, num_copies=num_copies, num_copy_streams=request.num_copy_streams)
    if not all(are_sequences):
        raise click.UsageError("some files are sequences and some are programs: verify them by themselves")
    sequences = {path.stem: StepSequence.parse(text) for path, text in texts.items()}
    if len(sequences) < len(texts):
        raise click.UsageError("two files have the same name: sequences are named after their files")
    return verify_sequences(sequences, num_copies=num_copies)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ProgramError(
            f"cannot read the program: {path} is not text (byte {error.start} is no UTF-8); give a file that "
            "`graphshard show program` wrote"
        ) from None
