"""The command line. One module per command; each is registered here."""

from __future__ import annotations

from importlib import import_module

import click

from graphshard.cli.streams import forgive_encoding

COMMANDS = {
    "demo": "Decode a real model with sharded weights on rank processes, beside the replicated model.",
    "generate": "Generate text on ranks that keep a part of the weights each, and that fail alone.",
    "trace": "Show one step of every rank in time, for ui.perfetto.dev and as a picture.",
    "plan": "Say what sharding a model frees and costs on a machine, from its config alone.",
    "calibrate": "Measure this machine into a file that `plan` and `bench step --predict` read.",
    "tune": "Measure blocks gathered and in slices into a file that plans go by.",
    "show": "Print a model, plan, layout, program, bound program or graph.",
    "verify": "Prove op lists free of races, or name every violation.",
    "reshard": "Turn shard files into ones for another number of ranks, or into a checkpoint.",
    "doctor": "Say what this machine can do, and why not.",
    "compare": "Show that a captured step does what an eager one does, on all ranks, and what each costs.",
    "bench": "Measure steps, loads, gathers, dispatch and compile time.",
}
"""Name and help of each command; `graphshard.cli.<name>` holds it as `command`."""


class _Commands(click.Group):
    """Imports a command's module only when it runs: `--help` needs no torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = import_module(f"graphshard.cli.{cmd_name}").command
        assert isinstance(command, click.Command), cmd_name
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="graphshard")
def cli() -> None:
    """Keep replicated weights once over N devices; gather them a layer ahead inside one captured graph.

    Exit codes: 0 yes, 1 the answer is no, 2 bad request, 3 this machine cannot; 70 a fault of ours (--debug shows it),
    130 interrupted, 141 nobody reads the output.
    """


def main() -> None:
    """Entry point of `graphshard` and `python -m graphshard`."""
    forgive_encoding()
    cli(prog_name="graphshard")
