"""`graphshard generate --speculative`: its tokens are the reference's and plain decoding's, however ranks are run."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cli_runner import Answer, apart, here
from ranks import run_on_ranks
from small_llama import CONFIG, write_small_llama
from test_generate_kimi_k3 import CONFIG as K3

from graphshard.bench.decode import decode
from graphshard.cli.speculative_draft import default_layers, random_draft_config
from graphshard.cli.speculative_rank import SpeculativeRequest, built, decoded
from graphshard.cli.speculative_report import answer_of, is_right, rows_of
from graphshard.comm.group import Group, LocalGroup
from graphshard.models.dflash.folder import random_dflash, save_dflash
from graphshard.models.kimi_k3.folder import random_pieces, save_kimi_k3
from graphshard.models.open import open_model
from graphshard.models.speculative.compare import differences
from graphshard.models.speculative.plain import follow

NUM_TOKENS = 6
PROMPTS = [[5, 3, 8, 2, 9, 1, 4, 4, 6, 7], [11], [20, 21, 22]]
"""Rank 0 of two has the first and the last; the first is longer than a block."""
PLANS = {
    kind: {"units": "layer", "prefetch_depth": depth, "min_shard_bytes": 0}
    for kind, depth in (("llama", 0), ("twice", 0), ("k3", 1))
}
"""A llama's draft has two layers, which would both stay in two slots."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("models")
    save_kimi_k3(place / "k3", K3, random_pieces(K3, seed=4))
    config = random_draft_config(K3, 4)
    save_dflash(place / "draft", config, random_dflash(config)[1])
    llama = write_small_llama(place / "llama")
    return {"llama": llama, "twice": llama, "k3": place / "k3", "draft": place / "draft"}


@cache
def plain_tokens(folder: Path, *prompts: tuple[int, ...]) -> list[list[int]]:
    """Of the replicated model, a sequence and a token at a time: nothing of what is tested."""
    import graphshard

    model, recipes, ignore = open_model(folder, 1, 32)
    options: dict[str, Any] = {"recipes": recipes, "ignore": ignore, "plan": "replicated"}
    with graphshard.compile(model, LocalGroup(1)[0], checkpoint=folder, **options) as runtime:
        return [decode(runtime.graph(1), [prompt], NUM_TOKENS, num_positions=32).tokens[0] for prompt in prompts]


def request_of(folders: dict[str, Path], kind: str, prompts: list[list[int]], **more: Any) -> dict[str, Any]:
    of_kind: dict[str, Any] = {"draft": None, "draft_layers": 2}
    if kind != "llama":
        of_kind = {"draft": str(folders["draft" if kind == "k3" else kind]), "draft_layers": None}
    sizes = {"block": 4, "num_tokens": NUM_TOKENS, "batch_size": 2, "cache_length": 32}
    return {"model": str(folders[kind]), "prompts": prompts, "address": "", **sizes, **of_kind, **more}


def rank(group: Group, values: dict[str, Any]) -> dict[str, Any]:
    request = SpeculativeRequest(**values)
    torch.set_num_threads(1)
    with built(group, request) as made:
        batches, facts = decoded(made, group, request)
        return {"batches": batches, **facts}


def run_ranks(
    folders: dict[str, Path], kind: str, world_size: int, run: str, transport: str, prompts: list[list[int]]
) -> list[dict[str, Any]]:
    """What each rank made; checked against plain decoding and the reference."""
    choices = {**PLANS[kind], "transport": transport}
    found = run_on_ranks(rank, world_size, request_of(folders, kind, prompts, run=run, choices=choices))
    truth = plain_tokens(folders[kind], *map(tuple, prompts))
    told = {n: row for one in found for batch in one["batches"] for n, row in _by_prompt(batch).items()}
    for number, expected in enumerate(truth):
        assert told[number] == {"tokens": expected, "tokens_reference": expected, "tokens_plain": expected}
    assert len({tuple(tokens) for tokens in truth}) == len(truth)  # it is no constant
    assert not any(batch["differences"] for one in found for batch in one["batches"])
    return found


def _by_prompt(batch: dict[str, Any]) -> dict[int, dict[str, Any]]:
    keys = ("tokens", "tokens_reference", "tokens_plain")
    return {number: {key: batch[key][i] for key in keys} for i, number in enumerate(batch["prompts"])}


@pytest.mark.parametrize(
    ("kind", "world_size", "run", "transport"),
    [
        ("llama", 1, "graph", "pull"),
        ("llama", 2, "eager", "pull"),
        ("llama", 2, "graph", "nccl"),
        ("twice", 2, "graph", "pull"),
        ("k3", 1, "eager", "nccl"),
        ("k3", 2, "graph", "pull"),
        ("k3", 2, "eager", "nccl"),
        *(
            pytest.param(kind, 4, run, transport, marks=pytest.mark.slow)
            for kind in ("llama", "k3")
            for run in ("eager", "graph")
            for transport in ("pull", "nccl")
        ),
    ],
)
def test_tokens_are_the_references_and_plain_decodings(
    kind: str, world_size: int, run: str, transport: str, folders: dict[str, Path]
) -> None:
    """Ranks have prompts of unlike number and length; of four ranks one has none."""
    found = run_ranks(folders, kind, world_size, run, transport, PROMPTS)
    assert [[batch["prompts"] for batch in one["batches"]] for one in found] == {
        1: [[[0, 1], [2]]],
        2: [[[0, 2]], [[1]]],
        4: [[[0]], [[1]], [[2]], []],
    }[world_size]
    replays = {"draft": 3, "target": 1, "fold": 0} if kind != "k3" else {"draft": 1, "target": 1, "fold": 1}
    assert all(one["replays"] == replays for one in found)
    steps = [sum(batch["num_steps"] for batch in one["batches"]) for one in found]
    again = [sum(batch["num_steps_reference"] for batch in one["batches"]) for one in found]
    if kind == "llama":
        assert sum(steps) < sum(again)  # guesses counted
    elif kind == "twice":  # a draft that is the model itself: all of them do
        gained = [row for one in found for batch in one["batches"] for row in batch["gained"]]
        assert gained == [[4, 1], [4, 1], [4, 2]]  # the text of one token is decoding from its first step on
    if transport == "nccl":
        assert [one["num_idle"] for one in found] == [max(steps) - mine for mine in steps]
        assert len({one["prefetches"] for one in found}) == 1
        assert all(len(one["exchange_s"]) == max(steps) + max(again) + 2 for one in found)
    else:
        assert all(one["num_idle"] == 0 and one["exchange_s"] == [] for one in found)
    for one, count in zip(found, steps, strict=True):
        made = count + one["num_idle"]
        assert one["prefetches"] == (made * replays["draft"] + 1 if made else 0)


@pytest.mark.parametrize("transport", ["pull", "nccl"])
def test_a_rank_without_a_prompt_waits_for_nothing_or_steps_along(transport: str, folders: dict[str, Path]) -> None:
    first, second = run_ranks(folders, "k3", 2, "graph", transport, PROMPTS[2:])
    assert second["batches"] == []
    assert second["num_idle"] == (first["batches"][0]["num_steps"] if transport == "nccl" else 0)


def generate(folder: Path, *options: object) -> Answer:
    line = ["generate", "--speculative", "--model", folder, "--tokens", NUM_TOKENS, "--units", "layer"]
    return apart(*line, "--prefetch-depth", 0, *options, "--json", "-")


def test_the_command_shows_one_text_and_says_what_the_draft_did(folders: dict[str, Path]) -> None:
    prompts = [option for text in ("a b c d e f", "g", "h i") for option in ("--prompt", text)]
    answer = generate(folders["llama"], "--transport", "nccl", *prompts)
    assert answer.code == 0, answer.err
    told = answer.json
    assert told["tokens"] == told["tokens_reference"] == [row["tokens_plain"] for row in told["rows"]]
    assert [len(tokens) for tokens in told["tokens"]] == [NUM_TOKENS] * 3
    gained = [count for row in told["rows"] for count in row["gained"]]
    assert told["acceptance_length"] == pytest.approx(sum(gained) / len(gained)) and told["acceptance_length"] > 1
    assert told["differences_from_plain"] == {
        "count": 0, "num_compared": 3 * NUM_TOKENS, "all_near_ties": True, "near_tie": 1e-3, "positions": [],
    }  # fmt: skip
    assert told["differences_from_reference"] == [] and told["lost"] == []
    assert told["draft"]["layers"] == 2 and told["draft"]["block"] == 4
    assert told["replays"] == {"draft": 3, "target": 1, "fold": 0} and min(told["prefetches"]) > 0
    assert told["exchange_us"]["median"] > 0 and told["plan"]["draft"]["head"] == "outside"
    assert told["num_steps"]["speculative"] < told["num_steps"]["reference"]
    assert "draft: the model's own first 2 of 3 layers" in answer.err and "  why: draft layers 2: the def" in answer.err
    assert f"[rank 0] a b c d e f{told['rows'][0]['text']}\n" in answer.err
    assert f"acceptance length {told['acceptance_length']:.2f} of at most 4" in answer.err
    assert "tokens are the reference's" in answer.err and f"chooses the same {3 * NUM_TOKENS} tokens" in answer.err


def test_the_command_decodes_a_kimi_k3_with_a_random_draft(folders: dict[str, Path]) -> None:
    answer = generate(folders["k3"], "--draft", "random", "--block", 3, "--run", "eager", "--prompt", "a b c")
    assert answer.code == 0, answer.err
    told = answer.json
    assert told["tokens"] == told["tokens_reference"] and told["differences_from_plain"]["all_near_ties"]
    assert told["replays"] == {"draft": 1, "target": 1, "fold": 1} and told["exchange_us"] is None
    assert told["draft"]["what"].endswith("random weights: it shows the steps, and guesses nothing")
    assert sorted(told["order"]) == [0, 1] and told["num_idle"] == [0, 0]
    assert told["prefetches"] == [told["num_steps"]["speculative"] + 1, 0]  # the second rank has no prompt


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--speculative", "--report"], "--report: not with --speculative; leave one out"),
        (["--speculative", "--restart"], "--restart: not with --speculative"),
        (["--draft", "x"], "--draft: these are for --speculative: give both, or neither"),
        (["--draft-layers", "1"], "--draft-layers: these are for --speculative"),
        (["--block", "4"], "--block: these are for --speculative"),
        (["--speculative", "--draft", "x", "--draft-layers", "1"], "--draft and --draft-layers are two drafts: give"),
        (["--speculative", "--block", "1"], "1 is not in the range x>=2"),
        (["--speculative", "--draft-layers", "3"], "a draft of 3 layers of a model of 3: that would be the model"),
        (["--speculative", "--draft", "/nowhere"], "/nowhere"),
        (["--speculative", "--tokens", "2040"], "by blocks of 4, need 2056 positions, the model has 2048: use"),
        (["--speculative", "--block", "9999"], "the model has 2048: use fewer --tokens or a smaller --block"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_options_that_contradict_are_refused_before_ranks_are_started(
    options: list[str], says: str, folders: dict[str, Path]
) -> None:
    answer = here("generate", "--model", folders["llama"], *options)
    assert answer.code == 2 and says in answer.err and answer.out == ""


def test_a_kimi_k3_without_a_draft_is_told_how_to_get_one(folders: dict[str, Path]) -> None:
    for more in ([], ["--draft-layers", 1]):
        answer = here("generate", "--speculative", "--model", folders["k3"], *more)
        assert answer.code == 2 and "save_dflash writes one" in answer.err and "--draft random" in answer.err


def test_a_draft_for_another_model_is_refused_before_ranks_are_started(folders: dict[str, Path]) -> None:
    answer = here("generate", "--speculative", "--model", folders["llama"], "--draft", folders["draft"])
    assert answer.code == 2 and "hidden_size is 64, the target's is 128" in answer.err


def test_a_model_of_one_layer_has_no_layers_for_a_draft() -> None:
    assert [default_layers(count)[0] for count in (1, 2, 3, 30)] == [1, 1, 2, 26]
    config = random_draft_config(CONFIG, None)
    assert (config.block, config.taps, config.hidden_size) == (8, (0, 1, 2), CONFIG.hidden_size)


class FakeStep:
    """Prefers token 3 of five by 2, whatever it is fed."""

    def __init__(self) -> None:
        self.inputs = {name: torch.zeros(1, 1, dtype=torch.int64) for name in ("tokens", "positions")}
        self.outputs = {"logits": 2 * torch.eye(5)[[3]].view(1, 1, 5)}
        self.fed: list[tuple[int, int]] = []

    def replay(self) -> None:
        self.fed.append((int(self.inputs["positions"]), int(self.inputs["tokens"])))


def test_plain_choices_are_compared_at_every_token_of_the_same_text() -> None:
    step = FakeStep()
    chosen, gaps = follow(step, [0, 1], [3, 4, 3, 2])
    assert step.fed == [(0, 0), (1, 1), (2, 3), (3, 4), (4, 3)]
    assert (chosen, gaps) == ([3, 3, 3, 3], [2.0] * 4)
    found = differences(7, [3, 4, 3, 2], chosen, gaps)
    assert [(one.sequence, one.index, one.token, one.plain_token, one.gap) for one in found] == [
        (7, 1, 4, 3, 2.0),
        (7, 3, 2, 3, 2.0),
    ]


@pytest.mark.parametrize(
    ("reference", "gap", "lost", "right"),
    [
        ([1, 2], None, "", True),
        ([1, 2], 9e-4, "", True),
        ([1, 2], 1e-3, "", False),
        ([1, 3], None, "", False),
        ([1, 2], None, "was killed by SIGKILL", False),
    ],
)
def test_what_makes_the_answer_no(reference: list[int], gap: float | None, lost: str, right: bool) -> None:
    difference = {"sequence": 0, "index": 1, "token": 2, "plain_token": 4, "gap": gap}
    batch = {
        "prompts": [0], "tokens": [[1, 2]], "tokens_reference": [reference], "tokens_plain": [[1, 2]], "gained": [[2]],
        "step_s": [0.5], "num_steps": 1, "num_steps_reference": 2, "differences": [] if gap is None else [difference],
    }  # fmt: skip
    facts = {"exchange_s": [], "num_idle": 0, "prefetches": 2, "replays": {}, "plan": {}}
    stories: Any = [SimpleNamespace(rank=0, batches=[batch], done={"batches": [batch], **facts}, lost="")]
    rows: list[dict[str, Any]] = [{"prompt_index": 0, "rank": 0, "tokens": [1, 2]}]
    if lost:
        stories.append(SimpleNamespace(rank=1, batches=None, done={}, lost=lost))
        rows.append({"prompt_index": 1, "rank": 1, "tokens": None})
    rows = rows_of(stories, rows)
    answer = answer_of(stories, rows, [0])
    assert is_right(answer) == right
    assert answer["differences_from_reference"] == ([] if reference == [1, 2] else [0])
    positions = [] if gap is None else [{"prompt_index": 0, "index": 1, "token": 2, "plain_token": 4, "gap": gap}]
    assert answer["differences_from_plain"]["positions"] == positions
    assert answer["acceptance_length"] == 2.0 and answer["step_ms"]["median"] == 500
    assert answer["tokens_reference"] == [reference, *([None] if lost else [])]


def test_help_documents_the_json() -> None:
    text = here("generate", "--help").out
    assert "tokens_reference" in text and "acceptance_length" in text and "exchange_us" in text


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["pull", "nccl"])
def test_smollm2_with_its_own_first_layers(transport: str) -> None:
    line = ["generate", "--speculative", "--tokens", 6, "--prompt", "The capital of France is", "--prompt", "To make"]
    answer = apart(*line, "--world-size", 2, "--transport", transport, "--json", "-", timeout_s=600)
    assert answer.code == 0, answer.err
    told = answer.json
    assert "Paris" in told["rows"][0]["text"] and told["tokens"] == told["tokens_reference"]
    assert told["draft"]["layers"] == 26 and told["acceptance_length"] > 1
