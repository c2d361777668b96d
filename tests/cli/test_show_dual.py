"""`show plan --dual`: how steps run the blocks of a model, each with its reason, by rule or by a tune file."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_runner import here
from small_llama import write_small_llama

from graphshard.core.program import Program
from graphshard.models.open import open_spec_model
from graphshard.schedule.tune_file import tune_text
from graphshard.schedule.tuned import MODES, Tuned, TunedRow, kinds_of


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_llama(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="module")
def tune_file(small: Path) -> Path:
    """Measured on a GPU, at 4 and 64 tokens a rank."""
    spec = open_spec_model(small, dual=True).spec()
    (kind,) = kinds_of(spec)
    times = {4: (0.8, 0.2), 64: (1.0, 2.0)}
    rows = [TunedRow(kind, n, mode, ms, ms, ms, 5) for n in times for mode, ms in zip(MODES, times[n], strict=True)]
    tuned = Tuned(spec.name, spec.digest, 2, "pull", "cuda", "a card", {}, (kind,), tuple(times), tuple(rows))
    path = small.parent / "tune.json"
    path.write_text(tune_text(tuned))
    return path


def test_the_table_says_mode_and_reason_of_each_step_shape(small: Path, tune_file: Path) -> None:
    options = ["--model", small, "--dual", "auto", "--tune", tune_file, "--capture-sizes", "4,16,99"]
    answer = here("show", "plan", *options)
    assert answer.code == 0, answer.err
    assert "step shape" in answer.out and "layers.0.mlp to layers.2.mlp (3 blocks)" in answer.out
    rows = here("show", "plan", *options, "--json", "-").json["modes"]
    assert [(row["step_shape"], row["mode"], row["why"]) for row in rows] == [
        ("4x1", "tensor_parallel", "measured: 0.2 ms against 0.8 ms at 4 tokens a rank"),
        (
            "16x1",
            "tensor_parallel",
            "between those measured at 4 and 64 tokens a rank: 0.632 ms against 0.894 ms at 16",
        ),
        ("99x1", "gather", "measured: 1 ms against 2 ms at 64 tokens a rank, the nearest to 99"),
    ]
    assert all(row["why"] in answer.out.replace("\n", " ") for row in rows[::2])


def test_a_forced_mode_goes_before_the_file(small: Path, tune_file: Path) -> None:
    options = ["--model", small, "--dual", "gather", "--tune", tune_file, "--capture-sizes", "4", "--json", "-"]
    answer = here("show", "plan", *options)
    assert answer.code == 0, answer.err
    assert {row["mode"] for row in answer.json["modes"]} == {"gather"} and len(answer.json["modes"]) == 4
    assert "gather was asked for, whatever is known: tune file " in answer.json["text"]


def test_without_a_file_there_is_a_rule(small: Path) -> None:
    answer = here("show", "plan", "--model", small, "--dual", "auto", "--capture-sizes", "1,2000", "--json", "-")
    assert [row["mode"] for row in answer.json["modes"]] == ["tensor_parallel", "gather"]


def test_programs_of_a_plan_with_blocks_are_shown_and_free_of_races(small: Path) -> None:
    options = ["--model", small, "--dual", "tensor_parallel"]
    answer = here("show", "program", *options)
    assert answer.code == 0 and answer.out.count("act_gather") == answer.out.count("reduce_scatter") == 3
    assert here("verify", *options, "--capture-sizes", 2).code == 0


def test_programs_differ_by_step_shape(small: Path, tmp_path: Path) -> None:
    options = ["--model", small, "--dual", "auto", "--capture-sizes", "1,2,2000"]
    decode = here("show", "program", *options)
    assert decode.out.startswith(
        "# step shapes 1x1 2x1; other programs: 2000x1\n# layers.0.mlp to layers.2.mlp (3 blocks)"
    )
    assert "tensor_parallel, 2 tokens of all ranks, at most 700" in decode.out and decode.out.count("act_gather") == 3
    prefill = here("show", "program", *options, "--batch-size", 2000, "--json", "-")
    assert prefill.json["step_shapes"] == ["2000x1"] and "act_gather" not in prefill.json["text"]
    assert [row["mode"] for row in prefill.json["modes"]] == ["gather"]
    (tmp_path / "decode").write_text(decode.out)
    assert Program.parse(decode.out).blocks and here("verify", tmp_path / "decode").code == 0
    answer = here("show", "program", *options, "--batch-size", 7)
    assert answer.code == 2 and "--batch-size 7 is none of --capture-sizes: 1x1 2x1 2000x1" in answer.err
    assert here("show", "plan", "--batch-size", 1).code == 2


def test_what_does_not_go_together_is_refused(small: Path, tune_file: Path) -> None:
    for options, code, message in (
        (["--dual", "auto"], 2, "a synthetic model has no blocks; give --model"),
        (["--model", small, "--tune", tune_file], 2, "dual is off, which slices none: say dual auto"),
        (["--model", small, "--dual", "auto", "--tune", small / "none"], 2, "cannot read the tune file"),
        (["--model", small, "--dual", "auto", "--tune", tune_file, "--world-size", 4], 2, "is of world_size 2, and"),
        (["--capture-sizes", "1,x"], 2, "is not a list of whole numbers"),
    ):
        answer = here("show", "plan", *options)
        assert answer.code == code and message in answer.err, answer.err
    answer = here("show", "sequence", "--model", small, "--dual", "auto", "--draft-layers", 1)
    assert answer.code == 2 and "--dual goes without --draft-layers" in answer.err


def test_a_plan_without_blocks_is_printed_as_ever() -> None:
    answer = here("show", "plan", "--json", "-")
    assert "modes" not in answer.json and "dual" not in answer.json["text"]
