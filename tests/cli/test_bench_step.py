"""`bench step` on a tiny model: rows, keys and exit codes, never speed; and the arithmetic from samples to rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runner import apart, here
from small_llama import write_small_llama
from torch import Tensor

from graphshard.bench.step import Contender, compare_logits
from graphshard.bench.step_rows import chosen_rows, core_share, label_of, samples_of, step_rows
from graphshard.cli import bench_step

KEYS = {"batch_size", "run", "unit", "prefetch_depth", "executor", "chosen", "median_ms", "p99_ms", "n", "launches"}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_llama(tmp_path_factory.mktemp("models") / "small")


def bench(model: Path, *options: object) -> Any:
    return apart("bench", "step", "--model", model, *options, "--json", "-")


def test_rows_beside_all_peers(small: Path) -> None:
    png = small.parent / "step.png"
    answer = bench(small, "--batch-sizes", "1,3", "--launches", 1, "--steps", 2, "--plans", "layer/1/threaded",
                   "--peers", "replicated,fsdp2", "--png", png)  # fmt: skip
    assert answer.code == 0, answer.err
    told = answer.json
    expected = [
        ("replicated", None, None, "cooperative"),
        ("graph", "weight", 0, "cooperative"),
        ("eager", "weight", 0, None),
        ("graph", "layer", 1, "threaded"),
        ("fsdp2", "layer", 0, None),
        ("transformers", None, None, None),
    ]
    keys = ("batch_size", "run", "unit", "prefetch_depth", "executor")
    assert [tuple(row[key] for key in keys) for row in told["rows"]] == [(b, *e) for b in (1, 3) for e in expected]
    for row in told["rows"]:
        assert row.keys() >= KEYS
        assert row["chosen"] == (row["run"] == "graph" and row["unit"] == "weight")
        assert row["agrees"] and (row["run"] == "transformers" or row["identical"])
        assert 0 < row["p10_ms"] <= row["p90_ms"] <= row["p99_ms"]
        assert (row["n"], row["launches"]) == (4, 1)
    assert [one["batch_size"] for one in told["chosen"]] == [1, 3]
    assert all(one["fsdp2_x"] > 0 and one["transformers_x"] > 0 for one in told["chosen"])
    assert [len(rank) for one in told["samples"] for launch in one["samples_ms"] for rank in launch] == [2] * 24
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_launches_are_fresh_and_peers_are_a_choice(small: Path) -> None:
    answer = bench(small, "--world-size", 3, "--batch-sizes", 2, "--launches", 2, "--steps", 6, "--plans", "",
                   "--peers", "", "--no-reference", "--cache-length", 16)  # fmt: skip
    assert answer.code == 0, answer.err
    rows = answer.json["rows"]
    assert [row["run"] for row in rows] == ["graph", "eager"]
    for row in rows:
        assert row["identical"], "checked against a replicated run, though none was timed"
        assert (row["n"], row["launches"], len(row["launch_medians_ms"])) == (2 * 3 * 6, 2, 2)
        assert row["x_replicated"] is None


def test_exit_code_1_where_logits_differ(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = [launch(ours=2.0), launch(ours=2.0)]
    measured[1][1]["contenders"][1]["batches"][0].update(max_abs_diff=0.5, agrees=False)
    given = iter(measured)
    monkeypatch.setattr(bench_step, "rank_values", lambda *arguments: next(given))
    answer = here("bench", "step", "--model", small, "--launches", 2, "--batch-sizes", 4)
    assert answer.code == 1
    assert "logits DIFFER from the replicated run's: graph weight/0/cooperative at batch 4" in answer.out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--batch-sizes", "1,x"], "not a list of whole numbers"),
        (["--batch-sizes", "0"], "not a list of whole numbers"),
        (["--peers", "deepspeed"], "known: replicated, fsdp2"),
        (["--plans", "weight/0"], "is no plan"),
        (["--plans", "weight/0/quick"], "is no plan"),
        (["--plans", "heap/0/cooperative"], "unknown unit policy 'heap'; known are layer"),
        (["--launches", 0], "0 is not in the range x>=1"),
        (["--model", "/nonexistent"], "/nonexistent"),
        (["--png", "/nonexistent/a.png"], "cannot be written"),
    ],
)
def test_bad_requests(options: list[object], said: str) -> None:
    answer = here("bench", "step", *options)
    assert answer.code == 2
    assert said in answer.err


def test_medians_of_launches_and_pooled_quantiles() -> None:
    """Three launches on a machine that is ever slower: the ratio is taken within each, so it does not move."""
    launches = [launch(ours=2.0, machine=1.0), launch(ours=2.5, machine=2.0), launch(ours=3.0, machine=5.0)]
    replicated, ours = rows = step_rows(launches)
    assert ours["launch_medians_ms"] == [2.0, 5.0, 15.0] and ours["median_ms"] == 5.0
    assert replicated["launch_medians_ms"] == [1.0, 2.0, 5.0]
    assert ours["x_replicated"] == 2.5 and replicated["x_replicated"] == 1.0
    assert (ours["n"], ours["p10_ms"] < 2.0, ours["p99_ms"] > 15.0) == (18, True, True)
    assert chosen_rows(rows) == [{"batch_size": 4, "x_replicated": 2.5, "x_replicated_cpu": 2.5}]
    assert label_of(ours) == "graph weight/0/cooperative"
    assert samples_of(launches)[1]["samples_ms"][2][1] == pytest.approx([13.5, 15.0, 16.5])


def test_a_busy_machine_is_told_by_processor_time() -> None:
    rows = step_rows([launch(ours=20.0, core_share=0.25)])
    assert core_share(rows) == pytest.approx(0.25)


class OneStep:
    """A step whose logits are what it is given."""

    def __init__(self, logits: Tensor) -> None:
        self.inputs = {name: torch.zeros(1, 1, dtype=torch.int64) for name in ("tokens", "positions")}
        self.outputs = {"logits": torch.zeros_like(logits)}
        self._logits = logits

    def replay(self) -> None:
        self.outputs["logits"].copy_(self._logits)


@pytest.mark.parametrize(("error", "identical_wanted", "agrees"), [
    (0.0, True, True), (1e-5, True, False), (1e-5, False, True), (0.1, False, False), (float("nan"), False, False)
])  # fmt: skip
def test_ours_must_agree_in_every_bit_and_peers_within_rounding(
    error: float, identical_wanted: bool, agrees: bool
) -> None:
    logits = torch.linspace(-8, 8, 32).view(1, 1, 32)
    one = Contender("graph", {1: OneStep(logits + error)}, lambda size: None, must_be_identical=identical_wanted)
    tokens = torch.zeros(2, 1, 1, dtype=torch.int64)
    found = compare_logits(one, 1, tokens, torch.stack([logits, logits]))
    assert found["agrees"] == agrees
    assert (found["max_abs_diff"] == 0) == (error == 0)


def launch(ours: float, machine: float = 1.0, core_share: float = 1.0) -> list[dict[str, Any]]:
    """What two ranks would tell of one launch: replicated takes `machine` ms, ours `ours` times as long."""

    def batches(median: float) -> list[dict[str, Any]]:
        samples = [0.9 * median, median, 1.1 * median]
        cpu = [core_share * sample for sample in samples]
        return [{"max_abs_diff": 0.0, "agrees": True, "samples_ms": samples, "cpu_ms": cpu}]

    none = {"unit": None, "prefetch_depth": None, "chosen": False, "executor": "cooperative"}
    graph = {"run": "graph", "unit": "weight", "prefetch_depth": 0, "executor": "cooperative", "chosen": True}
    return [
        {
            "batch_sizes": [4],
            "reasons": ["because"],
            "contenders": [
                {"run": "replicated", **none, "batches": batches(machine)},
                {**graph, "batches": batches(ours * machine)},
            ],
        }
        for _ in range(2)
    ]
