"""`graphshard verify`: the verifier over printed programs, or over those of a plan."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from graphshard.cli.common import Output, answering
from graphshard.cli.planning import PlanRequest, plan_request, planned
from graphshard.core.program import Program
from graphshard.verify import verify


@click.command("verify")
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
        programs = [Program.parse(path.read_text()) for path in files]
        report = verify(programs, num_copies=request.world_size, num_copy_streams=request.num_copy_streams)
    else:
        made = planned(request)
        report = verify(made.programs, made.layout, model=made.model, num_copy_streams=request.num_copy_streams)
    out.say(report.text())
    rows = [{**asdict(violation), "name": violation.name} for violation in report.violations]
    out.emit(rows, good=report.is_good, num_programs=report.num_programs, num_ops=report.num_ops)
    return report.is_good
