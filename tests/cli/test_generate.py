"""`graphshard generate` on a small random llama over processes: right tokens, whoever dies, stops or comes back.

Faults are deterministic: a rank sends the signal to itself before a step that the test names.
"""

from __future__ import annotations

import re
import shutil
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cli_runner import Answer, apart, here
from small_llama import CONFIG, write_small_llama

from graphshard.bench.decode import decode
from graphshard.bench.threads import run_threads
from graphshard.cli.common import Output
from graphshard.cli.generate_rank import GenerateRequest, decode_batches, maker
from graphshard.cli.generate_screen import Screen
from graphshard.cli.prompts import PROMPTS, Codec
from graphshard.comm.group import Group
from graphshard.core.errors import SpecError

NUM_TOKENS = 5
WORLD_SIZE = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_llama(tmp_path_factory.mktemp("models") / "small")


@cache
def replicated_tokens(folder: Path, world_size: int) -> list[list[int]]:
    """Tokens of the replicated model, by prompt; ranks are threads. Batches are as large as the command makes them."""
    codec = Codec(folder)
    prompts = [codec.encode(prompt, CONFIG.vocab_size) for prompt in PROMPTS]
    batch_size = -(-len(prompts) // world_size)
    request = GenerateRequest(str(folder), prompts, NUM_TOKENS, batch_size, 32, "graph", {}, False, "", None)

    def decoded(group: Group) -> list[dict[str, Any]]:
        with maker(group, request)("replicated") as runtime:
            return decode_batches(runtime, group, request, None)

    batches = [batch for rank in run_threads(decoded, world_size) for batch in rank]
    tokens = {index: one for batch in batches for index, one in zip(batch["prompts"], batch["tokens"], strict=True)}
    return [tokens[index] for index in range(len(PROMPTS))]


def generate(folder: Path, *options: object, world_size: int = WORLD_SIZE) -> Answer:
    plan = ["--units", "layer", "--prefetch-depth", 1]
    line = ["generate", "--model", folder, "--world-size", world_size, "--tokens", NUM_TOKENS, *plan]
    return apart(*line, *options, "--json", "-")


def test_tokens_equal_the_replicated_models_and_the_report_adds_up(folder: Path) -> None:
    truth = replicated_tokens(folder, 2)
    # one slot: with two, half of three layers and two whole ones would be more than three
    answer = generate(folder, "--prefetch-depth", 0, "--report", "--memory", "1GiB", world_size=2)
    assert answer.code == 0, answer.err
    told = answer.json
    assert told["tokens"] == truth and told["lost"] == [] and told["restarts"] == []
    assert len({tuple(tokens) for tokens in truth}) > 1  # it is no constant
    assert [row["rank"] for row in told["rows"]] == [index % 2 for index in range(len(PROMPTS))]
    assert all(row["state"] == "done" and row["ttft_ms"] > 0 for row in told["rows"])
    assert sorted(told["order"]) == [0, 1]
    for row in told["rows"]:
        assert f"[rank {row['rank']}] {row['prompt']}{row['text']}" in answer.err
    _check_report(told["report"])
    gained = told["report"]["kv_tokens"]["gained"]
    assert f"replicated ones: {gained:+,};" in answer.err


def _check_report(report: dict[str, Any]) -> None:
    assert report["identical"] and report["memory_bytes"] == 2**30
    assert [unit["name"] for unit in report["units"]] == ["layers.0", "layers.1", "layers.2"]
    assert all(unit["gather_us"] > 0 and unit["compute_us"] > 0 for unit in report["units"])
    # two caches a layer; the longest prompt has 13 tokens: 13 + 5 - 1 positions, in steps of 16
    kv_bytes = 2 * CONFIG.num_layers * CONFIG.num_kv_heads * 32 * CONFIG.head_dim * 4
    for way in ("sharded", "replicated"):
        assert len(report[way]) == 2
        for rank in report[way]:
            assert rank["kv_bytes_per_sequence"] == kv_bytes
            left = 2**30 - rank["weight_bytes"] - rank["other_bytes"]
            assert rank["concurrency"] == left // kv_bytes
            assert rank["kv_tokens"] == left // (kv_bytes // 32)  # a cache has 32 positions
            assert rank["staged_bytes"] == rank["chunk_bytes"] + rank["resident_bytes"]
            assert rank["kv_tokens_updating"] == (left - rank["staged_bytes"]) // (kv_bytes // 32)
            assert rank["startup_peak_pss_bytes"] > 0 and rank["startup_peak_rss_bytes"] > rank["weight_bytes"]
    sharded, replicated = report["sharded"][0], report["replicated"][0]
    assert sharded["chunk_bytes"] > 0 and replicated["chunk_bytes"] == replicated["slot_bytes"] == 0
    tokens = report["kv_tokens"]
    assert tokens["sharded"] == sharded["kv_tokens"] > tokens["replicated"] == replicated["kv_tokens"]
    assert tokens["gained"] == tokens["sharded"] - tokens["replicated"]
    saved = replicated["weight_bytes"] - sharded["weight_bytes"]
    assert abs(tokens["gained"] * kv_bytes // 32 - saved) <= kv_bytes // 32  # the same memory otherwise
    saved += replicated["staged_bytes"] - sharded["staged_bytes"]
    assert abs(tokens["gained_updating"] * kv_bytes // 32 - saved) <= kv_bytes // 32


def test_a_killed_rank_takes_only_its_own_prompts(folder: Path) -> None:
    answer = generate(folder, "--run", "eager", "--fault", "SIGKILL:1@3")
    assert answer.code == 1, answer.err
    told, lost = answer.json, [1, 4, 7]
    truth = replicated_tokens(folder, WORLD_SIZE)
    assert told["tokens"] == [None if index in lost else tokens for index, tokens in enumerate(truth)]
    assert told["lost"] == [{"rank": 1, "prompt_indices": lost, "reason": "was killed by SIGKILL"}]
    assert {row["reason"] for row in told["rows"] if row["state"] == "lost"} == {"rank 1 was killed by SIGKILL"}
    assert "[rank 1] was killed by SIGKILL: prompts 1 4 7 are LOST" in answer.err


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_killed_rank_comes_back_and_its_tokens_are_right(victim: int, folder: Path) -> None:
    answer = generate(folder, "--restart", "--report", "--fault", f"SIGKILL:{victim}@4")
    assert answer.code == 0, answer.err
    told = answer.json
    assert told["tokens"] == replicated_tokens(folder, WORLD_SIZE) and told["lost"] == []
    assert told["restarts"] == [{"rank": victim, "reason": "was killed by SIGKILL"}]
    assert f"[rank {victim}] is back" in answer.err
    assert told["report"] is None
    assert told["no_report"] == f"rank {victim} died: the report needs all ranks that were started"


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_stopped_rank_delays_nobody(victim: int, folder: Path) -> None:
    """It is let go on only after all others were done: that they were done at all shows that they did not wait."""
    answer = generate(folder, "--fault", f"SIGSTOP:{victim}@3", world_size=2)
    assert answer.code == 0, answer.err
    assert answer.json["tokens"] == replicated_tokens(folder, 2)
    assert answer.json["order"] == [1 - victim, victim]


def test_ranks_that_gather_together_step_on_until_all_are_done(folder: Path) -> None:
    """Prompts of unlike length, ranks with unlike numbers of prompts; the report's traced steps too."""
    answer = generate(folder, "--transport", "nccl", "--report")
    assert answer.code == 0, answer.err
    assert answer.json["tokens"] == replicated_tokens(folder, WORLD_SIZE)
    assert answer.json["report"]["identical"]


def test_a_killed_rank_ends_those_that_gather_with_it_by_name(folder: Path) -> None:
    answer = generate(folder, "--transport", "nccl", "--fault", "SIGKILL:1@3")
    assert answer.code != 0
    assert re.search(r"rank 1 \(pid \d+\) died while rank [02] waited for step 4", answer.err)


@pytest.mark.slow
def test_several_batches_a_file_and_a_rank_without_prompts(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("a b c\n\nd e\n")
    alone = generate(folder, "--prompts", file, "--batch-size", 1, world_size=1)
    assert alone.code == 0, alone.err
    assert [row["prompt"] for row in alone.json["rows"]] == ["a b c", "d e"] and alone.json["batch_size"] == 1
    two = generate(folder, "--prompt", "a b c", world_size=2)
    assert two.code == 0 and two.json["tokens"] == alone.json["tokens"][:1]
    assert sorted(two.json["order"]) == [0, 1]  # rank 1 has none, and is done at once


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--world-size", "1", "--restart"], "--restart needs another rank"),
        (["--transport", "nccl", "--restart"], "--restart needs transport pull"),
        (["--prompt", ""], "prompt 0 ('') has no token"),
        (["--tokens", "999999"], "positions, the model has"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_requests_are_said_before_ranks_are_started(options: list[str], says: str, folder: Path) -> None:
    answer = here("generate", "--model", folder, *options)
    assert answer.code == 2 and says in answer.err and answer.err.startswith("SpecError: ")


def test_files_that_are_not_what_they_should_be_are_said_before_ranks_are_started(folder: Path, tmp_path: Path) -> None:
    latin = tmp_path / "latin.txt"
    latin.write_bytes("caf\u00e9".encode("latin-1"))
    answer = here("generate", "--model", folder, "--prompts", latin)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err == (
        f"SpecError: --prompts {latin} is not text: byte 3 is no UTF-8; write one prompt a line, in UTF-8\n"
    )
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    answer = here("generate", "--model", tmp_path / "model")
    assert (answer.code, answer.out) == (2, "") and answer.err.count("\n") == 1
    assert "tokenizer.json is no tokenizer (" in answer.err and answer.err.startswith("SpecError: ")


def test_a_tokenizer_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    shutil.copytree(folder, tmp_path / "model")
    words = tokenizers.models.WordLevel({"a": 1, "b": CONFIG.vocab_size}, unk_token="a")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    answer = here("generate", "--model", tmp_path / "model", "--prompt", "a b")
    assert answer.code == 2
    assert answer.err.startswith("SpecError: prompt 'a b' has token 320, outside the vocabulary of 320: ")


class FakeStep:
    """A step of two sequences and five tokens, whose logits prefer token 3."""

    def __init__(self) -> None:
        self.inputs = {name: torch.zeros(2, 1, dtype=torch.int64) for name in ("tokens", "positions")}
        self.outputs = {"logits": torch.eye(5)[[3, 3]].view(2, 1, 5)}
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1


@pytest.mark.parametrize(
    ("prompts", "num_tokens", "num_positions", "says"),
    [
        ([[1], [5]], 2, 4, "prompt 1 has token 5, outside the vocabulary of 5"),
        ([[-1], [4]], 2, 4, "prompt 0 has token -1, outside the vocabulary of 5"),
        ([[1, 2, 3], [4]], 3, 4, "decoding needs 5 positions and the caches have 4"),
        ([[1], [4]], 0, 4, "num_tokens is 0: generate at least one"),
        ([[1], []], 2, 4, "each needs one, of >= 1 token"),
    ],
)
def test_what_a_step_cannot_refuse_is_refused_before_it_runs(
    prompts: list[list[int]], num_tokens: int, num_positions: int, says: str
) -> None:
    step = FakeStep()
    with pytest.raises(SpecError, match=says):
        decode(step, prompts, num_tokens, num_positions=num_positions)
    assert step.num_replays == 0
    assert decode(step, [[1, 2, 0], [4]], 2, num_positions=4).tokens == [[3, 3], [3, 3]]


def test_a_lost_rank_without_prompts_loses_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job: Any = FakeJob()
    screen = Screen(Output(None, {}, sys.stdout, sys.stdout, False), Codec(tmp_path), ["A"], 2)
    screen.follow(job)
    job.stories[1].lost = "was killed by SIGKILL"
    job.on_change(job.stories[1])
    assert capsys.readouterr().out == "[rank 1] was killed by SIGKILL: it had no prompts\n"


def test_ranks_that_all_fail_are_one_error(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((folder / "config.json").read_text())
    (broken / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-64])
    answer = generate(broken, world_size=2)
    assert answer.code == 2, answer.err
    assert "LoadError: [rank" in answer.err and "Traceback" not in answer.err


class FakeJob:
    """As much of a job as the screen looks at."""

    def __init__(self) -> None:
        self.state = "running"
        process = SimpleNamespace(state=lambda: self.state)
        self.stories = [SimpleNamespace(rank=rank, process=process, lost="", ended=[]) for rank in range(2)]
        self.on_message = self.on_change = self.on_turn = None


def test_one_prompt_grows_while_others_wait_but_not_for_a_stopped_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown() -> str:
        return capsys.readouterr().out

    job: Any = FakeJob()
    screen = Screen(Output(None, {}, sys.stdout, sys.stdout, False), Codec(tmp_path), ["A", "B", "C"], 2)
    screen.follow(job)
    job.on_message(0, {"what": "token", "token": 7})
    assert shown() == "\n[rank 0] A 7"
    done = {"what": "done", "batches": [{"prompts": [1], "tokens": [[8, 9]]}]}
    job.on_message(1, done)
    job.on_turn()
    assert shown() == ""
    job.on_message(0, {"what": "token", "token": 5})
    assert shown() == " 5"
    job.state = "stopped"
    job.on_turn()
    assert shown() == " ... (rank 0 is stopped)\n[rank 1] B 8 9\n"
    job.state = "running"
    job.on_message(0, {"what": "token", "token": 6})
    assert shown() == "[rank 0] ... 6"
    job.on_message(0, {"what": "done", "batches": [{"prompts": [0, 2], "tokens": [[7, 5, 6], [1, 2, 3]]}]})
    assert shown() == "\n[rank 0] C 1 2 3\n"


def test_help_documents_the_json_and_hides_what_is_for_tests() -> None:
    text = here("generate", "--help").out
    assert "ttft_ms" in text and "`tokens` (by prompt" in text and "concurrency" in text and "--fault" not in text


@pytest.mark.slow
def test_the_real_model_survives_a_killed_and_restarted_rank() -> None:
    plan = ["--units", "layer", "--prefetch-depth", 0]
    line = ["generate", "--world-size", 2, "--tokens", 8, *plan]
    whole = apart(*line, "--report", "--json", "-", timeout_s=600)
    assert whole.code == 0, whole.err
    assert whole.json["report"]["identical"] and "Paris" in whole.json["rows"][0]["text"]
    again = apart(*line, "--restart", "--fault", "SIGKILL:1@5", "--json", "-", timeout_s=600)
    assert again.code == 0, again.err
    assert again.json["tokens"] == whole.json["tokens"] and again.json["restarts"]
