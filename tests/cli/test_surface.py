"""What holds for every command: help, exit codes, JSON alone on standard output, errors in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from cli_runner import apart, here

from graphshard.cli import COMMANDS, cli
from graphshard.cli.bench import command as bench
from graphshard.cli.common import EXIT_OUR_FAULT, Output, exit_code
from graphshard.core.errors import CommError, DeviceError, LoadError, ProgramError, SpecError

COMMAND_LINES = [
    ["demo"],
    ["generate"],
    ["show"],
    ["verify"],
    ["trace"],
    ["plan"],
    ["calibrate"],
    ["tune"],
    ["reshard"],
    ["doctor"],
    ["compare"],
    *(["bench", name] for name in ("gather", "dispatch", "compile", "step", "load", "speculative", "dual")),
]


@pytest.mark.parametrize("line", COMMAND_LINES, ids=" ".join)
def test_help_explains_the_command_and_the_shared_options(line: list[str]) -> None:
    answer = here(*line, "--help")
    assert answer.code == 0
    assert "Usage: " in answer.out and "--json FILE|-" in answer.out and "--debug" in answer.out


def test_every_command_is_in_this_list() -> None:
    assert sorted({line[0] for line in COMMAND_LINES}) == sorted(COMMANDS)
    assert sorted(line[1] for line in COMMAND_LINES if len(line) > 1) == sorted(bench.commands)


@pytest.mark.parametrize("line", COMMAND_LINES, ids=" ".join)
def test_help_says_what_each_option_and_each_json_key_is(line: list[str]) -> None:
    command = bench.commands[line[1]] if len(line) > 1 else cli.get_command(click.Context(cli), line[0])
    assert command is not None
    bare = [option.name for option in command.params if isinstance(option, click.Option) and not option.help]
    assert bare == []
    assert (command.epilog or "").startswith("JSON keys") and "`rows`" in (command.epilog or "")


def test_help_of_the_whole_names_every_command_and_the_exit_codes() -> None:
    answer = here("--help")
    assert answer.code == 0
    assert all(f"  {name} " in answer.out for name in COMMANDS)
    assert "1 the answer is no" in answer.out
    assert all(f"{code} " in answer.out for code in (EXIT_OUR_FAULT, 130, 141))


def test_every_registered_command_exists() -> None:
    for name in COMMANDS:
        assert cli.get_command(None, name) is not None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "line",
    [
        ["frobnicate"],
        ["show", "tensor"],
        ["show", "program", "--layers", "many"],
        ["show", "plan", "--lowered"],
        ["show", "program", "--prefetch-depth", "-1"],
        ["bench", "gather", "--sizes", "14 parsecs"],
        ["bench", "gather", "--peers", "memcpy,nvlink"],
        ["bench", "gather", "--sizes", "0"],
        ["bench", "gather", "--sizes", "1MiB,0"],
        ["bench", "gather", "--cold-size", "0"],
        ["bench", "gather", "--repeats", "0"],
        ["bench", "gather", "--world-size", "0"],
        ["bench", "dispatch", "--units", "0"],
        ["bench", "dispatch", "--unit-size", "0B"],
        ["bench", "dispatch", "--prefetch-depth", "-1"],
        ["bench", "dispatch", "--repeats", "-1"],
        ["bench", "compile", "--layers", "0"],
        ["bench", "compile", "--capture-sizes", "0"],
        ["bench", "compile", "--units", "molecule"],
        ["bench", "step", "--steps", "0"],
        ["bench", "step", "--cache-length", "0"],
        ["doctor", "--world-size", "0"],
        ["trace", "--batch-size", "0"],
        ["plan"],
        ["plan", "kimi-k3", "--tokens-per-rank", "0"],
        ["plan", "kimi-k3", "--capture-sizes", "1,x"],
        ["plan", "kimi-k3", "--weights", "fp4"],
        ["calibrate", "--repeats", "0"],
        ["calibrate", "--batch-sizes", "none"],
        ["demo", "--tokens", "0"],
        ["demo", "--run", ","],
        ["demo", "--units", "molecule"],
        ["generate", "--world-size", "0"],
        ["generate", "--memory", "0"],
        ["generate", "--memory", "1GiB"],
        ["generate", "--units", "bytes:many"],
        ["generate", "--fault", "nonsense"],
        ["generate", "--fault", "SIGSOME:1@2"],
        ["generate", "--fault", "SIGKILL:one@2"],
        ["show", "plan", "--world-size", "0"],
        ["show", "program", "--layers", "0"],
        ["show", "program", "--layers", "10001"],
        ["show", "program", "--units", "molecule"],
        ["show", "plan", "--capture-sizes", "0"],
        ["show", "plan", "--num-copy-streams", "0"],
        ["verify", __file__, "--num-copy-streams", "65"],
        ["verify", __file__, "--world-size", "4097"],
        ["show", "bound", "--weights", "llama"],
        ["show", "graph", "--capture-sizes", "2"],
        ["show", "graph", "--model", "folder", "--layers", "3"],
        ["show", "plan", "--model", "folder", "--weights", "one"],
        ["verify", "--model", "folder", "--layers", "3"],
        ["verify", __file__, "--layers", "3"],
        ["verify", __file__, "--head", "tail"],
        ["show", "plan", "--draft-layers", "2"],
        ["show", "program", "--sequence", "cold"],
        ["show", "sequence", "--draft-layers", "0"],
        ["show", "sequence", "--sequence", "warm"],
        ["show", "sequence", "--num-draft-replays", "0"],
        ["verify", "--num-draft-replays", "2"],
        ["verify", __file__, "--draft-layers", "2"],
        ["verify", "no-such-file.txt"],
    ],
    ids=lambda line: " ".join(line).replace(__file__, "FILE"),
)
def test_usage_errors_are_code_2(line: list[str]) -> None:
    answer = here(*line)
    assert answer.code == 2
    assert answer.out == "" and "Error: " in answer.err and "Traceback" not in answer.err


def test_unknown_names_list_the_known_ones() -> None:
    assert "known: memcpy, gloo" in here("bench", "gather", "--peers", "nvlink").err
    assert "14 parsecs" in here("bench", "gather", "--sizes", "14 parsecs").err


@pytest.mark.parametrize(
    ("line", "error", "says"),
    [
        (["show", "model", "--model", "no/such/folder"], "SpecError", "no/such/folder"),
        (["show", "program", "--prefetch-depth", "2", "--num-slots", "1"], "SpecError", "slots"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_requests_are_one_sentence_and_code_2(line: list[str], error: str, says: str) -> None:
    answer = here(*line)
    assert answer.code == 2
    assert answer.err.startswith(f"{error}: ") and says in answer.err
    assert answer.err.count("\n") == 1 and answer.out == ""


def test_exit_codes_of_errors() -> None:
    assert [exit_code(kind("x")) for kind in (SpecError, ProgramError, LoadError)] == [2, 2, 2]
    assert [exit_code(kind("x")) for kind in (DeviceError, CommError, MemoryError)] == [3, 3, 3]
    assert exit_code(FileNotFoundError("x")) == 2
    assert exit_code(KeyError("x")) == EXIT_OUR_FAULT


def test_no_traceback_without_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*values: object, **options: object) -> None:
        raise KeyError("ours")

    monkeypatch.setattr("graphshard.cli.show.planned", broken)
    quiet, loud = here("show", "plan"), here("show", "plan", "--debug")
    assert quiet.code == loud.code == EXIT_OUR_FAULT
    assert quiet.err == "KeyError: 'ours' (--debug shows where)\n"
    assert "Traceback (most recent call last)" in loud.err and "in broken" in loud.err


def test_json_to_a_file_beside_the_text(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    answer = here("show", "plan", "--layers", 3, "--json", path)
    assert answer.code == 0 and "WeightDecision" in answer.out
    told = json.loads(path.read_text())
    assert told["config"]["command"] == ["show"] and told["config"]["layers"] == 3
    assert told["machine"]["cores"] >= 1 and told["machine"]["versions"]["torch"]


def test_a_json_file_that_cannot_be_written_is_code_2(tmp_path: Path) -> None:
    """Said before the work is done, not after it."""
    for path in (tmp_path / "nowhere" / "plan.json", tmp_path):
        answer = here("show", "plan", "--json", path)
        assert answer.code == 2 and str(path) in answer.err and answer.out == ""


def test_a_number_that_is_none_is_null(tmp_path: Path) -> None:
    """Not an error after all the work is done."""
    path = tmp_path / "a.json"
    out = Output(str(path), {}, sys.stdout, sys.stdout, debug=False)
    out.emit([{"us": float("nan"), "all": (1.5, float("inf"))}], nested={"a": [float("-inf"), True, "nan"]})
    told = json.loads(path.read_text())
    assert told["rows"] == [{"us": None, "all": [1.5, None]}] and told["nested"] == {"a": [None, True, "nan"]}


def test_a_locale_without_a_letter_shows_another(tmp_path: Path) -> None:
    file = tmp_path / "program.txt"
    file.write_text("prógram num_slots=1\n", encoding="utf-8")
    command = [sys.executable, "-m", "graphshard", "verify", str(file)]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, timeout=60, env=environment, check=False)
    assert done.returncode == 2 and b"found 'pr?gram num_slots=1'" in done.stderr
    program = "from graphshard.cli.streams import forgive_encoding\nforgive_encoding()\nprint('caf\\u00e9')\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, env=environment, check=True)
    assert done.stdout == b"caf?\n"


def test_json_alone_on_standard_output() -> None:
    answer = apart("bench", "compile", "--layers", 4, "--capture-sizes", 2, "--repeats", 1, "--json", "-")
    assert answer.code == 0
    assert answer.json["total_s"] > 0 and len(answer.json["rows"]) == 1
    assert "compile" in answer.err  # the table went there


def test_what_children_print_stays_out_of_the_json() -> None:
    """Descriptor 1 itself is standard error meanwhile: rank processes and C libraries write to it directly."""
    program = (
        "import os, sys, click\n"
        "from graphshard.cli.common import answering\n"
        "@click.command()\n"
        "@answering\n"
        "def command(out):\n"
        "    os.write(1, b'raw\\n'); os.system('echo child'); print('text'); out.say('table'); out.emit([], x=1)\n"
        "command(['--json', '-'])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["x"] == 1
    assert {"raw", "child", "text", "table"} <= set(done.stderr.split())


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    command = [sys.executable, "-m", "graphshard", "show", "program", "--layers", "5000", "--units", "layer"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()
    assert process.returncode == 141
