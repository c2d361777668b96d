"""`graphshard show sequence`, and `verify` of what it prints."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_runner import here
from small_llama import write_small_llama

from graphshard.core.sequence import PrefetchDiscard, PrefetchWait, Replay, StepSequence

STEP = ("show", "sequence", "--layers", 4, "--draft-layers", 3, "--prefetch-depth", 1)
OPS = """\
entry    prefetch_launch graph=draft unit=0 slot=0 stream=prefetch
exit     prefetch_launch graph=draft unit=0 slot=0 stream=prefetch
   0  prefetch_wait graph=draft unit=0 slot=0 stream=compute
   1  replay graph=draft stream=compute
   2  replay graph=target stream=compute
   3  prefetch_launch graph=draft unit=0 slot=0 stream=prefetch
   4  fold graph=target segment=commit_fold units=- stream=compute
"""


def test_the_step_of_a_synthetic_model() -> None:
    answer = here(*STEP)
    assert answer.code == 0
    assert answer.out.startswith("sequence num_ops=5\ngraph    name=draft\n| program num_slots=2 num_units=3 ")
    assert answer.out.endswith(OPS)


def test_what_show_prints_can_be_read_back() -> None:
    told = here(*STEP, "--num-draft-replays", 2, "--sequence", "cold", "--json", "-").json
    sequence = StepSequence.parse(told["text"])
    assert sequence.digest == told["digest"] == told["sequences"]["cold"]
    assert set(told["sequences"]) >= {"cold", "step", "skip", "discard"}
    assert len(told["rows"]) == len(sequence.ops)
    assert told["rows"][0] == {
        "index": 0,
        "kind": "prefetch_launch",
        "graph": "draft",
        "unit": 0,
        "slot": 0,
        "stream": "prefetch",
    }
    assert sum(op == Replay("draft") for op in sequence.ops) == 2


def test_the_first_layers_of_a_folder(tmp_path: Path) -> None:
    folder = write_small_llama(tmp_path / "llama")
    told = here("show", "sequence", "--model", folder, "--draft-layers", 1, "--json", "-")
    assert told.code == 0, told.err
    graphs = StepSequence.parse(told.json["text"]).graphs
    assert 0 < graphs[0].program.num_units < graphs[1].program.num_units
    assert here("verify", "--model", folder, "--draft-layers", 1).code == 0
    refused = here("show", "sequence", "--model", folder, "--draft-layers", 99)
    assert refused.code == 2 and "a draft of 99 layers" in refused.err


def test_without_a_draft_it_is_the_target_alone() -> None:
    told = here("show", "sequence", "--json", "-").json
    assert [row["kind"] for row in told["rows"]] == ["replay", "fold"]
    assert list(told["sequences"]) == ["step"]


@pytest.mark.parametrize("extra", [(), ("--prefetch-stream", "copy"), ("--head", "tail"), ("--num-draft-replays", 3)])
def test_verify_of_a_described_step_says_who_may_follow_whom(extra: tuple[object, ...]) -> None:
    answer = here("verify", *STEP[2:], *extra)
    assert answer.code == 0, answer.err
    assert "  step may follow cold, step, skip, cold_skip" in answer.out


def written(tmp_path: Path) -> list[Path]:
    """Every sequence of the step, in files named after them."""
    files = []
    for name in here(*STEP, "--json", "-").json["sequences"]:
        file = tmp_path / f"{name}.txt"
        file.write_text(here(*STEP, "--sequence", name).out)
        files.append(file)
    return files


def test_verify_of_files_says_yes_to_what_show_prints(tmp_path: Path) -> None:
    answer = here("verify", *written(tmp_path), "--json", "-")
    assert answer.code == 0, answer.err
    assert answer.json["good"] is True and answer.json["num_programs"] == 5
    assert "no violations in 5 sequences of up to 6 ops" in answer.err


def test_verify_of_files_names_every_violation_and_is_code_1(tmp_path: Path) -> None:
    files = written(tmp_path)
    step = tmp_path / "step.txt"
    sequence = StepSequence.parse(step.read_text())
    kept = [op for op in sequence.ops if not isinstance(op, PrefetchWait | PrefetchDiscard)]
    step.write_text(StepSequence(sequence.graphs, tuple(kept), sequence.entry, sequence.exit).text())
    told = here("verify", *files, "--json", "-")
    assert told.code == 1
    assert {(row["rule"], row["op"], row["unit"], row["slot"]) for row in told.json["rows"]} == {(3, 0, 0, 0)}


def test_verify_of_files_that_do_not_go_together_is_code_2(tmp_path: Path) -> None:
    files = written(tmp_path)
    program = tmp_path / "program.txt"
    program.write_text(here("show", "program").out)
    assert here("verify", files[0], program).code == 2
    (tmp_path / "other").mkdir()
    twin = tmp_path / "other" / files[0].name
    twin.write_text(files[0].read_text())
    answer = here("verify", files[0], twin)
    assert answer.code == 2 and "two files have the same name" in answer.err
    files[0].write_text(files[0].read_text().replace("replay graph=draft", "replay of=draft"))
    answer = here("verify", files[0])
    assert answer.code == 2 and answer.err.startswith("ProgramError: cannot read the sequence: line ")
