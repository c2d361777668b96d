"""The program of a rank's process: `python -m graphshard.comm.rank_main`, started by `graphshard.comm.launch`.

Calls one named function, and sends what it returns, or the error it raised, to the launcher as one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphshard.comm.process import die_with_parent
from graphshard.core.errors import GraphshardError, SpecError

if TYPE_CHECKING:
    from graphshard.comm.group import Group


def load_entry(entry: str) -> Callable[..., Any]:
    """The function that `package.module:function` or `path/to/file.py:function` names.

    Raises:
        SpecError: there is no such module or function.
    """
    place, _, name = entry.rpartition(":")
    if not place or not name:
        raise SpecError(f"entry {entry!r} names no function: write package.module:function or file.py:function")
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        if spec is None or spec.loader is None or not Path(place).exists():
            raise SpecError(f"entry {entry!r}: there is no file {place}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        sys.path.insert(0, str(Path(place).resolve().parent))  # as for a script: it may import its neighbours
        spec.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise SpecError(f"entry {entry!r}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise SpecError(f"entry {entry!r}: {place} has no function {name}")
    return function  # type: ignore[no-any-return]


def main(arguments: list[str] | None = None) -> int:
    """Run the entry; the exit code is 0, the error's own (graphshard's errors), or 1."""
    parser = argparse.ArgumentParser(prog="graphshard.comm.rank_main", description=__doc__)
    parser.add_argument("entry", help="package.module:function or file.py:function")
    parser.add_argument("--arguments", default="[]", help="positional arguments of the function, a JSON list")
    parser.add_argument("--group-timeout-s", type=float, help="pass init_group(...) as the first argument")
    parser.add_argument("--rejoin", metavar="JOB", help="pass rejoin_group(JOB, ...) instead: a rank that comes back")
    parser.add_argument("--result-fd", type=int, required=True, help="the pipe that the launcher reads")
    parser.add_argument("--parent-pid", type=int, required=True, help="the launcher; this process dies with it")
    options = parser.parse_args(arguments)
    die_with_parent(options.parent_pid)
    os.set_inheritable(options.result_fd, False)
    code = 0
    try:
        message = json.dumps({"value": _call(options)})
    except SystemExit:
        raise
    except BaseException as error:
        code = error.exit_code if isinstance(error, GraphshardError) else 1
        failure = {"type": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
        message = json.dumps({"error": failure})
    with open(options.result_fd, "w", encoding="utf-8") as pipe, contextlib.suppress(BrokenPipeError):
        pipe.write(message + "\n")
    return code


def _call(options: argparse.Namespace) -> Any:
    function, arguments = load_entry(options.entry), json.loads(options.arguments)
    if options.group_timeout_s is None:
        return function(*arguments)
    with _group(options) as group:
        os.write(options.result_fd, json.dumps({"job": group.job}).encode() + b"\n")
        return function(group, *arguments)


def _group(options: argparse.Namespace) -> Group:
    from graphshard.comm.rejoin import rejoin_group  # here: a rank without a group needs no sockets
    from graphshard.comm.rendezvous import init_group

    if options.rejoin is None:
        return init_group(timeout_s=options.group_timeout_s)
    return rejoin_group(options.rejoin, int(os.environ["RANK"]), timeout_s=options.group_timeout_s)


if __name__ == "__main__":
    sys.exit(main())
