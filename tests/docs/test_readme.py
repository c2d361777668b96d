"""The README's first program is run as it stands, on a small random checkpoint in place of the demo's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ranks import run_on_ranks
from small_llama import write_small_llama

import graphshard
from graphshard.comm.group import Group

README = Path(__file__).parents[2] / "README.md"


def program() -> str:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    return next(block for block in blocks if "init_group" in block)


def test_the_first_program_runs_as_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_small_llama(tmp_path / "small")
    text, count = re.subn(r"PATH = .*", f"PATH = {str(folder)!r}", program())
    assert count == 1
    text, count = re.subn(r"graphshard\.init_group\(\)", "GROUP", text)
    assert count == 1
    text = text.replace("3575", "75").replace("4649", "49").replace("504", "4").replace("282", "28")

    def rank(group: Group) -> None:
        exec(compile(text, str(README), "exec"), {"GROUP": group, "graphshard": graphshard})

    run_on_ranks(rank, 2)
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line.split("]")[0] for line in lines) == ["[rank 0/2", "[rank 1/2"]
    assert len({line.split("] ")[1] for line in lines}) == 1, "both ranks decode the same"
