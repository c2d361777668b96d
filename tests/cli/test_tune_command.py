"""`graphshard tune` on tiny models: a file that grows, that `show plan` reads, and that an interrupt does not cost."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cli_runner import Answer, apart, here
from small_llama import write_small_llama

from graphshard.bench.threads import run_threads
from graphshard.cli.tune_rank import measure
from graphshard.schedule.tune_file import load_tuned

FEW = ["--steps", 2, "--layers", 2]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_llama(tmp_path_factory.mktemp("models") / "small")


def on_threads(*options: object) -> Answer:
    """`tune` with ranks that are threads of this process: the imports of three processes take longer than it."""

    def rank_values(out: object, entry: str, world_size: int, job: dict[str, Any], *limits: float) -> list[Any]:
        return run_threads(lambda group: measure(group, dict(job)), world_size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("graphshard.cli.tune.rank_values", rank_values)
        return here("tune", *options)


@pytest.fixture(scope="module")
def measured(small: Path) -> tuple[Answer, Path]:
    path = small.parent / "tune.json"
    answer = on_threads("--out", path, "--model", small, "--tokens", "1,4", *FEW, "--json", "-")
    assert answer.code == 0, answer.err
    return answer, path


def test_the_answer_is_what_the_file_holds(measured: tuple[Answer, Path]) -> None:
    answer, path = measured
    told, tuned = answer.json, load_tuned(path)
    assert (told["num_measured"], told["num_before"], told["digest"]) == (2, 0, tuned.digest)
    assert [(row["tokens_per_rank"], row["mode"], row["n"]) for row in told["rows"]] == [
        (n, mode, 2) for n in (1, 4) for mode in ("gather", "tensor_parallel")
    ]
    assert sum(row["is_faster"] for row in told["rows"]) == 2
    assert tuned.settings["num_layers"] == 2 and tuned.device_kind == "host" and not tuned.missing
    assert "tokens a rank" in answer.err and f'tune="{path}"' in answer.err
    pairs = zip(told["rows"][::2], told["rows"][1::2], strict=True)
    unclear = sum(max(a["p10_ms"], b["p10_ms"]) <= min(a["p90_ms"], b["p90_ms"]) for a, b in pairs)
    assert (f"overlap in {unclear} of 2 measurements" in answer.err) == (unclear > 0)


def test_what_is_not_merged_is_said(measured: tuple[Answer, Path]) -> None:
    answer, _ = measured
    merged = answer.json["merged"]
    assert merged["pairs"] == [] and merged["why_none"] in answer.err
    assert merged["why_none"].startswith("no such pair in this model: even between layers.0.mlp and layers.1.mlp run")
    assert [one["tokens_per_rank"] for one in merged["predicted"]] == [1, 4]
    assert all(one["separate_us"] > 0 and one["merged_us"] > 0 for one in merged["predicted"])


def test_plans_go_by_the_file(measured: tuple[Answer, Path], small: Path) -> None:
    answer, path = measured
    options = ["--model", small, "--dual", "auto", "--tune", path, "--capture-sizes", "1,4", "--json", "-"]
    shown = here("show", "plan", *options)
    faster = [row["mode"] for row in answer.json["rows"] if row["is_faster"]]
    assert [row["mode"] for row in shown.json["modes"]] == faster
    assert all(row["why"].startswith("measured: ") for row in shown.json["modes"])


def test_a_second_run_has_nothing_left_to_measure(measured: tuple[Answer, Path], small: Path) -> None:
    _, path = measured
    before = path.read_bytes()
    answer = on_threads("--out", path, "--model", small, "--tokens", "4", *FEW, "--json", "-")
    assert answer.code == 0 and path.read_bytes() == before
    assert (answer.json["num_measured"], answer.json["num_before"]) == (2, 2)
    assert f"{path} has 2 measurements: going on with it" in answer.err


def test_what_cannot_be_is_refused_before_ranks_are_started(tmp_path: Path) -> None:
    damaged = tmp_path / "tune.json"
    damaged.write_text(json.dumps({"format": "graphshard-tune-0"}))
    for options, message in (
        (["--out", damaged], "format is 'graphshard-tune-0'; this version reads"),
        (["--out", tmp_path / "no" / "tune.json"], "--out"),
        (["--out", tmp_path / "new.json", "--model", tmp_path], "config.json"),
        (["--tokens", "0"], "is not a list of whole numbers"),
    ):
        answer = here("tune", *options)
        assert answer.code == 2 and message in answer.err, answer.err


@pytest.mark.slow
def test_an_interrupted_run_says_what_stays_and_the_next_goes_on(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "tune.json"
    options = ["--out", path, "--model", small, "--tokens", "1,2,4,8", "--layers", 2]
    command = [sys.executable, "-m", "graphshard", "tune", *options, "--steps", 500]
    with subprocess.Popen([str(one) for one in command], stdout=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 100
        while not path.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    kept = load_tuned(path)
    assert process.returncode == 130 and 1 <= kept.num_measured < 4
    assert f"interrupted: {path} has {kept.num_measured} of 4 measurements, and the same command goes on" in out
    answer = apart("tune", *options, "--steps", 2, "--json", "-")
    assert answer.code == 0 and answer.json["num_before"] == kept.num_measured and answer.json["num_measured"] == 4
    assert load_tuned(path).rows[: len(kept.rows)] == kept.rows
