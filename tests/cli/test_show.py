"""`graphshard show` and `graphshard verify`: golden texts, and the verifier's answer as an exit code."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_runner import here

from graphshard.core.program import Program

PROGRAM = """\
program num_slots=2 num_units=2 num_segments=2 num_ops=8
entry    0=- 1=-
exit     0=0 1=1
   0  ag_launch unit=0 slot=0 stream=copy
   1  ag_launch unit=1 slot=1 stream=copy
   2  wait_once unit=0 slot=0 stream=compute
   3  gemm layer=0 segment=proj units=0 stream=compute begin=0 end=1
   4  record_gate unit=0 slot=0 stream=compute
   5  wait_once unit=1 slot=1 stream=compute
   6  gemm layer=1 segment=proj units=1 stream=compute begin=1 end=2
   7  record_gate unit=1 slot=1 stream=compute
"""


def test_show_program_without_a_model() -> None:
    answer = here("show", "program", "--layers", 2, "--num-slots", 2, "--prefetch-depth", 1)
    assert answer.code == 0
    assert answer.out == PROGRAM


def test_what_show_prints_can_be_read_back() -> None:
    answer = here("show", "program", "--layers", 7, "--prefetch-depth", 2, "--head", "tail", "--json", "-")
    program = Program.parse(answer.json["text"])
    assert program.digest == answer.json["digest"]
    assert len(answer.json["rows"]) == len(program.ops)
    assert answer.json["rows"][0]["kind"] == str(program.ops[0]).split()[0]


def test_lowered_program_starts_with_forks_and_ends_joined() -> None:
    answer = here("show", "program", "--prefetch-depth", 1, "--lowered")
    lines = answer.out.splitlines()
    assert lines[0].startswith("lowered streams=compute,copy ")
    assert lines[1].split()[1:4] == ["compute", "record", "op=-"]
    assert lines[2].split()[1:4] == ["copy", "wait", "op=-"]
    assert here("show", "program", "--lowered", "--world-size", 3).out.count("end=3") == 2  # three copies a gather


def test_a_collective_gather_is_one_copy_in_lists_and_graphs() -> None:
    lowered = here("show", "program", "--lowered", "--world-size", 3, "--transport", "nccl")
    runs = [line for line in lowered.out.splitlines() if "copyrun" in line]
    assert len(runs) == 2 and all(line.endswith("begin=0 end=1") for line in runs)
    assert here("verify", "--world-size", 3, "--transport", "nccl", "--layers", 4).code == 0
    bound = here("show", "bound", "--world-size", 3, "--transport", "nccl")
    assert bound.code == 0 and "2 all_gather" in bound.out
    graph = here("show", "graph", "--world-size", 3, "--transport", "nccl", "--json", "-")
    assert graph.code == 0, graph.err
    nodes = {row["kind"]: row["num_nodes"] for row in graph.json["rows"]}
    assert nodes["memcpy"] == 2 * 3 and "kernel" not in nodes


@pytest.mark.parametrize("noun", ["model", "plan", "layout"])
def test_other_nouns_are_stable_text_with_a_digest(noun: str) -> None:
    first, second = (here("show", noun, "--weights", "llama", "--json", "-") for _ in range(2))
    assert first.code == 0
    assert first.json["digest"] == second.json["digest"] and first.json["text"] == second.json["text"]
    assert first.json["rows"] and first.json["text"].startswith(noun.capitalize()[:4])


def test_plan_says_why() -> None:
    out = here("show", "plan", "--weights", "llama").out
    assert "reason=" in out and "input_norm" in out


def test_bound_text_has_copies_of_each_rank_and_no_addresses() -> None:
    answer = here("show", "bound", "--layers", 2, "--prefetch-depth", 0, "--world-size", 3)
    assert answer.code == 0, answer.err
    copies = [line for line in answer.out.splitlines() if " copy " in line and "from=" in line]
    assert [line.rsplit("=", 1)[1] for line in copies] == ["rank1", "rank2", "rank0"] * 2
    assert "0x" not in answer.out


def test_graph_nodes_by_kind() -> None:
    answer = here("show", "graph", "--layers", 3, "--prefetch-depth", 1, "--world-size", 2, "--json", "-")
    nodes = {row["kind"]: row["num_nodes"] for row in answer.json["rows"]}
    assert nodes["memcpy"] == 3 * 2  # a gather of each layer, a copy from each rank
    assert nodes["host"] == 3  # a gemm each
    assert nodes.get("kernel", 0) == 0


def test_verify_says_yes_to_what_show_prints(tmp_path: Path) -> None:
    file = tmp_path / "good.txt"
    file.write_text(PROGRAM)
    answer = here("verify", file, "--json", "-")
    assert answer.code == 0
    assert answer.json["good"] is True and answer.json["rows"] == []
    assert "no violations in a program of 8 ops" in answer.err


def test_verify_names_every_violation_and_is_code_1(tmp_path: Path) -> None:
    file = tmp_path / "bad.txt"
    lines = PROGRAM.replace(" num_ops=8", "").splitlines(keepends=True)
    file.write_text("".join(line for line in lines if "wait_once unit=1" not in line))
    answer = here("verify", file)
    assert answer.code == 1
    assert "R3 wait-before-read" in answer.out and "unit 1" in answer.out
    told = here("verify", file, "--json", "-").json
    assert told["good"] is False
    assert {(row["rule"], row["name"], row["unit"]) for row in told["rows"]} >= {(3, "wait-before-read", 1)}


def test_verify_of_a_text_that_is_no_program_is_code_2(tmp_path: Path) -> None:
    file = tmp_path / "nonsense.txt"
    file.write_text(PROGRAM.replace("gemm layer=0", "gamma layer=0"))
    answer = here("verify", file)
    assert answer.code == 2
    assert answer.err.startswith("ProgramError: cannot read the program: line 7")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"\x7fELF\x02\x01\xff\xfe", "is not text (byte 6 is no UTF-8)"),
        (b"program num_slots=99999999999 num_units=1 num_segments=1\n", "num_slots is at most 16384"),
        (b"program num_slots=1 num_units=99999999999 num_segments=1\n", "num_units is at most 1048576"),
        (b"program num_slots=1 num_units=1 num_segments=" + b"9" * 5000 + b"\n", "is not a whole number"),
    ],
    ids=["binary", "slots", "units", "digits"],
)
def test_verify_of_absurd_files_is_code_2(tmp_path: Path, text: bytes, says: str) -> None:
    file = tmp_path / "absurd.txt"
    file.write_bytes(text)
    answer = here("verify", file)
    assert answer.code == 2 and answer.out == ""
    assert answer.err.startswith("ProgramError: ") and says in answer.err and answer.err.count("\n") == 1


def test_verify_of_the_most_slots_and_units_is_quick(tmp_path: Path) -> None:
    file = tmp_path / "large.txt"
    file.write_text("program num_slots=16384 num_units=1048576 num_segments=1048576\nrecord_outputs stream=compute\n")
    assert here("verify", file).code == 1


def test_verify_of_several_files_counts_distinct_programs(tmp_path: Path) -> None:
    first, second = tmp_path / "first.txt", tmp_path / "second.txt"
    first.write_text(here("show", "program", "--layers", 3, "--prefetch-depth", 1, "--head", "tail").out)
    second.write_text(here("show", "program", "--layers", 3, "--prefetch-depth", 1).out)
    assert here("verify", first).code == here("verify", second).code == 0
    answer = here("verify", first, second, first, "--json", "-")
    assert answer.code == 0 and answer.json["num_programs"] == 2


@pytest.mark.parametrize("head", ["inside", "outside", "tail"])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_verify_of_a_plan(head: str, depth: int) -> None:
    answer = here("verify", "--layers", 5, "--head", head, "--prefetch-depth", depth, "--capture-sizes", 4)
    assert answer.code == 0, answer.out
    assert "no violations" in answer.out


def test_help_has_a_line_a_noun() -> None:
    lines = here("show", "--help").out.splitlines()
    assert "  model    weights and segments" in lines and "  plan     what was chosen, and why" in lines
