"""`graphshard plan`: published totals, what is recommended and why, errors with the nearest feasible value."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from cli_runner import here

CONFIGS = Path(__file__).parent.parent / "data" / "configs"
GIB = 2**30
MIB = 2**20
LLAMA = [CONFIGS / "llama-3-8b", "--world-size", 4, "--hardware", "h100", "--tokens-per-rank", 256]
K3 = ["kimi-k3", "--weights", "fp8", "--world-size", 8, "--hardware", "b200"]


@cache
def plan(*arguments: Any) -> tuple[int, dict[str, Any], str]:
    answer = here("plan", *arguments, "--json", "-")
    return answer.code, answer.json, answer.err


@pytest.fixture(scope="module")
def k3() -> dict[str, Any]:
    code, found, _ = plan(*K3)
    assert code == 0
    return found


def within(value: float, published: float, share: float = 0.001) -> bool:
    return abs(value - published) <= share * published


def test_published_totals_are_reproduced(k3: dict[str, Any]) -> None:
    parts = {part: size / GIB for part, size in k3["part_bytes"].items()}
    assert within(parts["kda"], 28.50) and within(parts["mla"], 4.57) and within(parts["total"], 48.79)
    assert within(parts["moe_periphery"], 15.7227)
    assert within(k3["periphery_bf16_bytes_per_layer"], 367.0e6) and within(k3["periphery_bf16_bytes"] / GIB, 31.45)
    assert k3["part_layers"] == {"kda": 69, "mla": 24, "moe_periphery": 92}


def test_what_a_full_gather_frees_before_and_after_slots(k3: dict[str, Any]) -> None:
    full = k3["full"]
    assert within(full["freed_before_slots_bytes"] / GIB, 42.7)
    assert full["num_slots"] == 2 and within(full["slots_bytes"] / GIB, 1.17, 0.003)  # three digits were published
    assert within(full["largest_unit_bytes"] / MIB, 598)
    assert full["freed_before_slots_bytes"] - full["slots_bytes"] >= full["freed_bytes"]


def test_what_does_not_fit_is_said_with_the_least_ep_that_does(k3: dict[str, Any]) -> None:
    assert k3["fit"]["fits"] is False and k3["fit"]["least_ep"] == 16
    assert "--ep 16" in plan(*K3)[2]


def test_a_full_gather_hides_from_about_a_thousand_tokens_and_a_part_earlier(k3: dict[str, Any]) -> None:
    advice = k3["recommendation"]
    least, most = advice["hides_between_tokens_per_rank"]
    assert least < advice["hides_from_tokens_per_rank"] < most and least < 1000 <= most * 1.1, (
        "about 1k: within a tenth"
    )
    assert advice["answer"] == "partial" and 0 < advice["freed_bytes"] < k3["full"]["freed_bytes"]
    by_tokens = {row["tokens_per_rank"]: row for row in k3["by_step_shape"]}
    assert by_tokens[1024]["full_is_hidden"] and not by_tokens[256]["full_is_hidden"]
    hidden = [row["hidden_freed_bytes"] for row in k3["by_step_shape"]]
    assert hidden == sorted(hidden)
    assert advice["rejected"] and all(one["reason"] for one in advice["rejected"])


def test_the_frontier_is_monotone_and_starts_with_nothing(k3: dict[str, Any]) -> None:
    rows = k3["rows"]
    assert rows[0]["freed_bytes"] == 0 and rows[0]["exposed_us"] == 0
    assert all(a["freed_bytes"] < b["freed_bytes"] and a["exposed_us"] <= b["exposed_us"] for a, b in pairwise(rows))


def test_eight_tokens_a_rank_are_too_few_for_a_full_gather() -> None:
    """On a laptop that has neither torch nor transformers."""
    refuse = "import sys; sys.modules.update(torch=None, transformers=None)"
    ask = ["graphshard", "plan", *map(str, K3), "--ep", "16", "--tokens-per-rank", "8", "--json", "-"]
    code = f"{refuse}; sys.argv = {ask}; from graphshard.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["recommendation"]["answer"] in ("partial", "none")
    assert "no full gather at 8 tokens a rank" in done.stderr
    assert found["fit"]["fits"] and found["fit"]["least_ep"] == 16


def test_slices_win_with_few_tokens_and_lose_with_many(k3: dict[str, Any]) -> None:
    wide = next(one for one in k3["dual"] if one["block"].endswith("in bfloat16"))
    crossings = {(one["first"], one["second"]): one["tokens_per_group"] for one in wide["crossovers"]}
    assert 300 <= crossings["tensor_parallel", "replicated"] <= 1200
    assert wide["times"][0]["best"] == "tensor_parallel" and wide["times"][-1]["best"] != "tensor_parallel"
    narrow = next(one for one in k3["dual"] if one["role"] == "shared_expert" and one is not wide)
    assert 0 < narrow["crossovers"][0]["tokens_per_group"] < crossings["tensor_parallel", "replicated"]


@pytest.mark.slow
def test_targets_are_met() -> None:
    code, found, _ = plan(*LLAMA, "--free", "5GiB")
    assert code == 0 and found["plan"]["freed_bytes"] >= 5 * GIB - 6 * MIB  # windows are rounded up
    code, found, _ = plan(*LLAMA, "--memory-limit", "12GiB")
    ledger = found["ledger"]["plan"]
    assert code == 0 and ledger["chunks"] + ledger["slots"] + ledger["resident"] <= 12 * GIB
    tokens = found["ledger"]["full"]["kv tokens"] - 20_000  # more than a replica has, fewer than there can be
    code, found, _ = plan(*LLAMA, "--kv-tokens", tokens)
    assert code == 0 and found["ledger"]["plan"]["kv tokens"] >= tokens - 4096  # the last request may be shorter


def test_a_draft_has_slots_of_its_own() -> None:
    _, found, _ = plan(*LLAMA, "--draft", CONFIGS / "qwen3-0.6b")
    assert found["full"]["draft_slots_bytes"] > 0


def test_one_rank_has_nothing_to_shard_and_the_answer_is_no() -> None:
    code, found, text = plan("kimi-k3", "--world-size", 1)
    assert code == 1 and found["recommendation"]["answer"] == "none"
    assert "one rank: nothing is held twice" in text


@pytest.mark.parametrize(
    "options, parts",
    [
        (["--world-size", 0], ["world_size is 0", "nearest is world_size 1"]),
        (["--world-size", 16], ["largest shard group is 8", "the nearest is --world-size 8"]),
        (["--world-size", 4096], ["the nearest is --world-size 8"]),
        (["--tp", 3], ["tp 3 does not divide world_size 4", "use tp 2"]),
        (["--hardware", "b300"], ["unknown hardware 'b300'", "did you mean", "b200"]),
        (["--hardware", "no/such.json"], ["cannot read the hardware file no/such.json"]),
        (["--free", "100GiB"], ["cannot be freed", "the most there is"]),
        (["--memory-limit", "1GiB"], ["the nearest is --memory-limit"]),
        (["--kv-tokens", 50_000_000], ["the nearest is --kv-tokens"]),
        (["--free", "1GiB", "--kv-tokens", 5], ["give one of them"]),
    ],
)
def test_errors_are_one_sentence_with_the_nearest_that_works(options: list[Any], parts: list[str]) -> None:
    answer = here("plan", *LLAMA, *options)
    assert answer.code == 2
    (only,) = answer.err.strip().splitlines()
    assert only.startswith("SpecError: ") and all(part in only for part in parts), only


def test_experts_that_do_not_divide_name_the_nearest_ep() -> None:
    answer = here("plan", "kimi-k3", "--ep", 100)
    assert answer.code == 2 and "use ep 64" in answer.err


def test_more_ranks_than_weights_name_the_most() -> None:
    one = ["--include", "model.layers.3.self_attn.q_proj.weight", "--tokens-per-rank", 8]
    answer = here("plan", CONFIGS / "llama-3-8b", "--world-size", 2, *one)
    assert answer.code == 2 and "use at most 1 ranks" in answer.err


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "plan.png"
    answer = here("plan", *LLAMA, "--plot", path)
    assert answer.code == 0
    assert path.read_bytes().startswith(b"\x89PNG\r\n") and path.stat().st_size > 20_000
