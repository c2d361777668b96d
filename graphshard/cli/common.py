"""What every command shares: `--json` and `--debug`, errors in one line, exit codes.

Exit codes: 0 yes, 1 the answer is no, 2 bad request, 3 this machine cannot. 70 is a fault of ours (`--debug` shows it),
130 an interrupt, 141 a reader of the output that went away.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import click
from click.core import ParameterSource
from rich.console import Console

from graphshard.comm.launch import failure_text, raise_first_failure, run_ranks
from graphshard.core.errors import GraphshardError, SpecError
from graphshard.core.sizes import parse_bytes
from graphshard.report.machine import machine_facts

EXIT_NO = 1
EXIT_BAD_REQUEST = 2
EXIT_CANNOT = 3
EXIT_OUR_FAULT = 70
PLAIN_WIDTH = 120
"""Columns of a table that goes to a file or a pipe."""

COUNT = click.IntRange(min=1)
"""Of ranks, samples, tokens: anything that starts at 1."""

Json = Mapping[str, Any]
Command = Callable[..., bool | None]


class Output:
    """Where a command's answers go: text for people, one JSON object for programs.

    With `--json -` standard output carries the JSON object alone; everything else goes to standard error.
    """

    def __init__(self, json_path: str | None, config: Json, json_file: TextIO, text_file: TextIO, debug: bool) -> None:
        self.debug = debug
        self._text_file = text_file
        width = None if text_file.isatty() else PLAIN_WIDTH
        self._console = Console(file=text_file, width=width, soft_wrap=True, highlight=False)
        self.config = dict(config)
        self._json_path, self._json_file = json_path, json_file

    def say(self, text: object = "") -> None:
        """Print for people: text as it is, anything else as rich renders it."""
        if isinstance(text, str):
            print(text, file=self._text_file, flush=True)
        else:
            self._console.print(text)

    def emit(self, rows: Sequence[Json], **keys: Any) -> None:
        """Write the JSON object if it was asked for: rows, machine, config, and the command's own `keys`."""
        if self._json_path is None:
            return
        answer = {**keys, "rows": list(rows), "config": self.config, "machine": machine_facts()}
        text = json.dumps(_without_nan(answer), indent=1, allow_nan=False, default=_json_value) + "\n"
        if self._json_path == "-":
            self._json_file.write(text)
            self._json_file.flush()
            return
        try:
            Path(self._json_path).write_text(text)
        except OSError as error:
            raise SpecError(f"--json {self._json_path} could not be written: {error.strerror}") from error


def answering(function: Command) -> Callable[..., None]:
    """Make `function(out, **options)` a command's body. It returns False for "the answer is no"."""

    @click.option("--json", "json_path", metavar="FILE|-", help="Also write the answer as JSON; - is standard output.")
    @click.option("--debug", is_flag=True, help="Show the traceback of an error.")
    @functools.wraps(function)
    def command(json_path: str | None, debug: bool, **options: Any) -> None:
        if json_path not in (None, "-"):
            check_writable("--json", Path(str(json_path)))
        config = {"command": click.get_current_context().command_path.split()[1:], **options}
        with _streams(only_json=json_path == "-") as (json_file, text_file):
            out = Output(json_path, config, json_file, text_file, debug)
            code = _run(lambda: function(out, **options), debug)
        if code:
            sys.exit(code)

    return command


def check_writable(option: str, path: Path) -> None:
    """A usage error if `path` cannot be written: said before the work, not after it."""
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise click.UsageError(f"{option} {path} cannot be written: give a file in a folder that exists")


def refuse_given(names: Sequence[str], why: str) -> None:
    """A usage error if one of the options `names` was given on the command line: it would have no effect."""
    ctx = click.get_current_context()
    given = [name for name in names if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if given:
        raise click.UsageError(f"{', '.join('--' + name.replace('_', '-') for name in given)}: {why}")


def rank_values(
    out: Output,
    entry: str,
    world_size: int,
    request: Json,
    timeout_s: float,
    after_failure_s: float | None = None,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """What `entry(group, request)` returned in each of `world_size` rank processes, by rank.

    Limits as `RankProcesses.wait` has them; `env` is added to their environment.

    Raises:
        GraphshardError: of the rank that failed first; with --debug its traceback is printed before.
    """
    results = run_ranks(
        entry, world_size, arguments=[request], timeout_s=timeout_s, after_failure_s=after_failure_s, env=env
    )
    if out.debug and (text := failure_text(results)):
        print(text, file=sys.stderr)
    raise_first_failure(results)
    return [result.value for result in results]


class Size(click.ParamType[int]):
    """A size on the command line, of a byte or more: `14MiB`."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The size in bytes; a bad one is a usage error."""
        if not isinstance(value, str):
            return int(value)
        try:
            num_bytes = parse_bytes(value)
        except GraphshardError as error:
            self.fail(str(error), param, ctx)
        if num_bytes < 1:
            self.fail(f"{value!r} is no size to work with: give a byte or more", param, ctx)
        return num_bytes


class Sizes(click.ParamType[list[int]]):
    """A list of sizes on the command line: `1MiB,14MiB,4096`."""

    name = "size,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        """The sizes in bytes; a bad one is a usage error."""
        if not isinstance(value, str):
            return list(value)
        return [Size().convert(text, param, ctx) for text in value.split(",")]


class Names(click.ParamType[list[str]]):
    """A list of names on the command line, each one of `known`: `memcpy,gloo`."""

    name = "name,..."

    def __init__(self, known: Sequence[str]) -> None:
        self.known = tuple(known)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[str]:
        """The names; an unknown one is a usage error that lists the known."""
        names = value.split(",") if isinstance(value, str) else list(value)
        names = [name for name in names if name]
        unknown = [name for name in names if name not in self.known]
        if unknown:
            self.fail(f"unknown: {', '.join(unknown)}; known: {', '.join(self.known)}", param, ctx)
        return names


def _run(body: Callable[[], bool | None], debug: bool) -> int:
    try:
        return EXIT_NO if body() is False else 0
    except (click.ClickException, click.exceptions.Exit, click.Abort):
        raise  # click's own: usage errors are exit code 2
    except KeyboardInterrupt:
        return 130  # as a shell reports SIGINT
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # nobody reads on: keep the interpreter's last flush quiet
        return 141  # as a shell reports SIGPIPE
    except Exception as error:
        if debug:
            traceback.print_exc(file=sys.stderr)
        code = exit_code(error)
        hint = "" if debug or code != EXIT_OUR_FAULT else " (--debug shows where)"
        print(f"{type(error).__name__}: {error}{hint}", file=sys.stderr)
        return code


def exit_code(error: Exception) -> int:
    """The exit code that an error deserves."""
    if isinstance(error, GraphshardError):
        return error.exit_code
    if isinstance(error, MemoryError) or type(error).__name__ == "DriverError":
        return EXIT_CANNOT
    return EXIT_BAD_REQUEST if isinstance(error, OSError) else EXIT_OUR_FAULT


@contextlib.contextmanager
def _streams(only_json: bool) -> Iterator[tuple[TextIO, TextIO]]:
    """(where JSON goes, where text goes). With `only_json`, descriptor 1 is standard error meanwhile.

    Descriptors are exchanged, not only `sys.stdout`: rank processes and C libraries print too.
    """
    if not only_json:
        yield sys.stdout, sys.stdout
        return
    real = sys.stdout
    with contextlib.ExitStack() as stack:
        json_file: TextIO = real
        if (saved := _descriptor(real)) is not None:
            real.flush()
            json_file = stack.enter_context(os.fdopen(os.dup(saved), "w"))
            keep = os.dup(saved)
            stack.callback(os.close, keep)
            stack.callback(os.dup2, keep, saved)
            os.dup2(2, saved)
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield json_file, sys.stderr


def _descriptor(file: TextIO) -> int | None:
    try:
        return file.fileno()
    except (io.UnsupportedOperation, ValueError):
        return None  # a test's or a notebook's stream: sys.stdout is all there is


def _without_nan(value: Any) -> Any:
    """`value` with null for what JSON has no number for: a time that was not taken must not cost all others."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _without_nan(one) for key, one in value.items()}
    return [_without_nan(one) for one in value] if isinstance(value, list | tuple) else value


def _json_value(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{value!r} has no JSON form")
