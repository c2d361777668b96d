"""`graphshard verify`: the verifier over printed programs, or over those of a plan."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from graphshard.cli.common import Output, answering, refuse_given
from graphshard.cli.planning import PlanRequest, plan_request, planned
from graphshard.core.errors import ProgramError
from graphshard.core.plan import copies_per_gather
from graphshard.core.program import Program
from graphshard.verify import verify

PLAN_OPTIONS = ("layers", "weights", "model", "units", "prefetch_depth", "num_slots", "head", "capture_sizes")
"""What files make superfluous; copies and their streams are no part of a file."""


JSON_HELP = """JSON keys: `rows` has one row for each violation {rule, name, op, unit, slot, step, where, text,
wrong_bytes}; `good`, `num_programs`, `num_ops`."""


@click.command("verify", epilog=JSON_HELP)
@click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="[FILE]...")
@plan_request
@answering
def command(out: Output, files: tuple[Path, ...], **options: Any) -> bool:
    """Verify programs as `show program` prints them, or, without FILE, the programs of the plan that the options name.

    Several files are the programs of one plan: every ordered pair of them is checked too. A file says nothing about
    bytes, so R7 and R11 are checked for plans only. Exit code 1: not free of races.
    """
    request = PlanRequest(**options)
    if files:
        refuse_given(PLAN_OPTIONS, "a file's program is what it is: leave out the option, or the files")
        programs = [Program.parse(_text(path)) for path in files]
        num_copies = copies_per_gather(request.transport, request.world_size)
        report = verify(programs, num_copies=num_copies, num_copy_streams=request.num_copy_streams)
    else:
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


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ProgramError(
            f"cannot read the program: {path} is not text (byte {error.start} is no UTF-8); give a file that "
            "`graphshard show program` wrote"
        ) from None
