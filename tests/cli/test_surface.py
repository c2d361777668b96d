"""What holds for every command: help, exit codes, JSON alone on standard output, errors in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_runner import apart, here

from graphshard.cli import COMMANDS, cli
from graphshard.cli.common import EXIT_OUR_FAULT, exit_code
from graphshard.core.errors import CommError, DeviceError, LoadError, ProgramError, SpecError

COMMAND_LINES = [
    ["demo"],
    ["generate"],
    ["show"],
    ["verify"],
    ["trace"],
    ["doctor"],
    *(["bench", name] for name in ("gather", "dispatch", "compile", "step")),
]


@pytest.mark.parametrize("line", COMMAND_LINES, ids=" ".join)
def test_help_explains_the_command_and_the_shared_options(line: list[str]) -> None:
    answer = here(*line, "--help")
    assert answer.code == 0
    assert "Usage: " in answer.out and "--json FILE|-" in answer.out and "--debug" in answer.out


def test_help_of_the_whole_names_every_command_and_the_exit_codes() -> None:
    answer = here("--help")
    assert answer.code == 0
    assert all(f"  {name} " in answer.out for name in COMMANDS)
    assert "1 the answer is no" in answer.out


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
        ["verify", "no-such-file.txt"],
    ],
    ids=" ".join,
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
        (["show", "plan", "--world-size", "0"], "SpecError", "world_size"),
        (["show", "program", "--layers", "0"], "SpecError", "--layers 0"),
        (["show", "program", "--units", "molecule"], "SpecError", "molecule"),
        (["show", "model", "--model", "no/such/folder"], "SpecError", "no/such/folder"),
        (["show", "program", "--prefetch-depth", "2", "--num-slots", "1"], "SpecError", "slots"),
        (["demo", "--tokens", "0", "--model", "no/such/folder"], "SpecError", "--tokens"),
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
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["x"] == 1
    assert {"raw", "child", "text", "table"} <= set(done.stderr.split())


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    import subprocess
    import sys

    command = [sys.executable, "-m", "graphshard", "show", "program", "--layers", "5000", "--units", "layer"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()
    assert process.returncode == 141
