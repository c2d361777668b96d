"""`bench dual` on small blocks: rows, keys and exit codes, never speed."""

from __future__ import annotations

from typing import Any

import pytest
from cli_runner import apart, here

from graphshard.cli import bench_dual

SMALL = ("--hidden-size", 48, "--intermediate-size", 96, "--layers", 2, "--steps", 3, "--launches", 1)
KEYS = {"tokens_per_group", "tokens_per_rank", "mode", "runs", "median_ms", "p10_ms", "p90_ms", "n", "x_better"}
MODES = ["replicated", "gather", "tensor_parallel", "chosen"]


@pytest.mark.parametrize(("world_size", "transport"), [(2, "pull"), pytest.param(3, "nccl", marks=pytest.mark.slow)])
def test_rows_of_every_mode(world_size: int, transport: str) -> None:
    answer = apart("bench", "dual", "--world-size", world_size, "--transport", transport, "--tokens-per-group", "1,7",
                   *SMALL, "--json", "-")  # fmt: skip
    assert answer.code == 0, answer.err
    told = answer.json
    assert [(row["tokens_per_group"], row["mode"]) for row in told["rows"]] == [(n, m) for n in (1, 7) for m in MODES]
    for row in told["rows"]:
        assert row.keys() >= KEYS and row["agrees"] and row["median_ms"] > 0 and row["predicted_ms"] > 0
        assert row["tokens_per_rank"] == {1: 1, 7: -(-7 // world_size)}[row["tokens_per_group"]]
        assert row["n"] >= 3 * world_size and len(row["samples_ms"][0]) == world_size
        ways = {"gather", "tensor_parallel"} if row["mode"] == "chosen" else {row["mode"]}
        assert row["runs"] in ways
        assert row["identical"] or row["runs"] == "tensor_parallel"
    assert set(told["crossover"]) == {"measured", "predicted"}
    assert told["agree"] and isinstance(told["is_well_chosen"], bool) and told["reasons"]


def test_the_cost_model_chooses_where_it_is_asked_to() -> None:
    answer = apart("bench", "dual", "--tokens-per-group", "2", "--choose-by", "model", *SMALL, "--json", "-")
    assert answer.code == 0, answer.err
    chosen = answer.json["rows"][3]
    assert chosen["runs"] in ("gather", "tensor_parallel") and "this run" in " ".join(answer.json["reasons"])


def test_exit_code_1_where_results_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_dual, "rank_values", lambda *arguments: [_told(), _told(difference=0.5, agrees=False)])
    answer = here("bench", "dual", "--tokens-per-group", "2")
    assert answer.code == 1
    assert "results DIFFER from the replicated run's: tensor_parallel at 2 tokens" in answer.out
    assert "NO: what was chosen takes at most 2.000 x the better of gather and tensor_parallel" in answer.out
    assert "gather is no slower than tensor_parallel, measured: from 2 tokens a group on" in answer.out


def _told(**sliced: Any) -> dict[str, Any]:
    times = {"replicated": 1.0, "gather": 2.0, "tensor_parallel": 3.0, "chosen": 4.0}
    runs = {**{mode: mode for mode in times}, "chosen": "gather"}
    modes = {
        mode: {"runs": runs[mode], "samples_ms": [ms] * 3, "difference": 0.0, "agrees": True}
        for mode, ms in times.items()
    }
    modes["tensor_parallel"].update(sliced)
    gemms = [[m, n, k, "float32", 5.0] for m, n, k in ((1, 288, 1024), (1, 1024, 288), (2, 144, 1024), (2, 1024, 144))]
    return {
        "tokens": {"1": modes},
        "figures": {
            "gemm": gemms,
            "gemm_cached": gemms,
            "gather_us": 9.0,
            "exchange_us": 2.0,
            "cache_bytes": 0,
        },
        "reasons": ["because"],
    }


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--world-size", 1), "--world-size 1: one rank has all weights and all tokens"),
        (("--intermediate-size", 289), "--intermediate-size 289 is no multiple of 2 ranks: no slices; give 290"),
        (("--world-size", 3), "--hidden-size 1024 is no multiple of 3 ranks: no slices; give 1026"),
        (("--tokens-per-group", "0"), "0"),
        (("--predict", "/nowhere/host.json"), "/nowhere/host.json"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_ranks_start(options: tuple[object, ...], said: str) -> None:
    answer = here("bench", "dual", *options)
    assert answer.code == 2
    assert said in answer.err
