"""`graphshard demo` on a small random llama over two processes, and what it says when something differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_runner import Answer, apart, here
from small_llama import CONFIG, write_small_llama

from graphshard.bench.decode import Decoded
from graphshard.bench.side_by_side import difference
from graphshard.bench.threads import run_threads
from graphshard.cli import ranks
from graphshard.cli.demo import _by_prompt
from graphshard.cli.matrix import matrix_request
from graphshard.cli.prompts import PROMPTS, Codec

NUM_TOKENS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_llama(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="module")
def demo(folder: Path) -> tuple[Answer, Path]:
    """One run for all tests that look at it."""
    png = folder.parent / "demo.png"
    answer = apart("demo", "--model", folder, "--tokens", NUM_TOKENS, "--units", "weight", "--png", png, "--json", "-")
    assert answer.code == 0, answer.err
    return answer, png


def told(demo: tuple[Answer, Path]) -> dict[str, Any]:
    return demo[0].json


def test_sharded_tokens_and_bits_equal_the_replicated_models(demo: tuple[Answer, Path]) -> None:
    answer = told(demo)
    assert answer["identical"] is True and answer["logits_identical"] is True
    assert answer["tokens"] == answer["tokens_replicated"]
    assert [len(tokens) for tokens in answer["tokens"]] == [NUM_TOKENS] * len(PROMPTS)
    assert len({tuple(tokens) for tokens in answer["tokens"]}) > 1  # it is no constant


def test_tokens_equal_transformers_own(demo: tuple[Answer, Path]) -> None:
    assert told(demo)["tokens_transformers"] == told(demo)["tokens"]


def test_json_has_the_promised_keys(demo: tuple[Answer, Path]) -> None:
    answer = told(demo)
    assert answer["model"] == "small" and answer["device"] == "host" and answer["world_size"] == 2
    assert answer["prompt"] == PROMPTS[0] and answer["text"].split() == [str(token) for token in answer["tokens"][0]]
    assert set(answer["step_ms"]) == {"replicated", "eager", "graph"}
    assert all(ms > 0 for ms in answer["step_ms"].values())
    assert [row["run"] for row in answer["rows"]] == ["replicated", "eager", "graph"]
    assert answer["graph_nodes"].get("kernel", 0) == 0
    assert answer["graph_nodes"]["memcpy"] == 2 * answer["num_units"]


def test_bytes_add_up(demo: tuple[Answer, Path]) -> None:
    answer = told(demo)
    assert answer["shardable_bytes"] + answer["kept_bytes"] >= answer["total_bytes"]  # kept ones are padded
    bound = answer["shardable_bytes"] / 2 + 2 * answer["largest_unit_bytes"]
    assert answer["chunk_bytes"] + answer["slot_bytes"] <= 1.01 * bound
    for rank in answer["pss_by_rank"]:
        for pss in rank.values():
            assert pss["total_bytes"] >= pss["anon_bytes"] + pss["shmem_bytes"] > 0


def test_the_timeline_is_a_picture(demo: tuple[Answer, Path]) -> None:
    assert demo[1].read_bytes().startswith(b"\x89PNG\r\n")
    assert demo[1].stat().st_size > 10_000


def test_text_goes_to_the_terminal_while_it_is_generated(demo: tuple[Answer, Path]) -> None:
    err = demo[0].err
    assert told(demo)["text"] in err
    assert err.index("eager") < err.index(told(demo)["text"]) < err.index("memory of all ranks")
    assert "identical: logits of every step" in err


@pytest.mark.slow
def test_eager_alone_with_another_plan_and_world_size(folder: Path) -> None:
    png = folder.parent / "tail.png"
    options = ["--tokens", 2, "--world-size", 3, "--run", "eager", "--head", "tail", "--prefetch-depth", 1]
    answer = apart("demo", "--model", folder, *options, "--no-reference", "--png", png, "--json", "-")
    assert answer.code == 0, answer.err
    assert answer.json["identical"] is True and answer.json["tokens_transformers"] is None
    assert answer.json["plan"]["head"] == "tail" and "graph" not in answer.json["step_ms"]


@pytest.mark.slow
def test_the_collective_transport_is_identical_too(folder: Path) -> None:
    png = folder.parent / "nccl.png"
    options = ["--tokens", 2, "--transport", "nccl", "--no-reference", "--png", png, "--json", "-"]
    answer = apart("demo", "--model", folder, *options)
    assert answer.code == 0, answer.err
    assert answer.json["identical"] is True and answer.json["plan"]["transport"] == "nccl"
    assert set(answer.json["step_ms"]) == {"replicated", "eager", "graph"}
    nodes = answer.json["graph_nodes"]
    assert nodes["memcpy"] > 0 and not nodes.get("kernel")


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["pull", "nccl"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_matrix_of_plans_over_threads(folder: Path, world_size: int, transport: str) -> None:
    common = {"units": "weight", "transport": transport}
    request = matrix_request(str(folder), [[5, 6, 7], [8], [9, 10], [11, 12, 13, 14]], 3, common, world_size)
    rows = run_threads(lambda group: ranks.matrix(group, request), world_size)[0]
    assert all(row["identical"] for row in rows)
    tried = {(row["prefetch_depth"], row["head"], row["run"]) for row in rows}
    assert len(tried) == len(rows) == 2 * len(request["choices"])


@pytest.mark.slow
def test_the_whole_matrix(folder: Path) -> None:
    """World sizes 1 to 4, threads and processes, depths 0 to 2, all head policies, eager and graph."""
    png = folder.parent / "matrix.png"
    options = ["--tokens", 2, "--no-reference", "--matrix", "--png", png]
    answer = apart("demo", "--model", folder, *options, "--json", "-", timeout_s=600)
    assert answer.code == 0, answer.err
    rows = [row for row in answer.json["rows"] if "ranks" in row]
    assert answer.json["matrix_identical"] is True and all(row["identical"] for row in rows)
    assert {(row["ranks"], row["world_size"]) for row in rows} == {
        (kind, world_size) for kind in ("threads", "processes") for world_size in (1, 2, 3, 4)
    }


def test_a_checkpoint_that_lacks_a_weight_is_one_error_and_code_2(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    values = json.loads((folder / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**values, "num_hidden_layers": CONFIG.num_layers + 1}))
    (broken / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    answer = apart("demo", "--model", broken, "--tokens", 2)
    assert answer.code == 2, answer.err
    assert "LoadError: " in answer.err and "layers.3" in answer.err and "Traceback" not in answer.err


def test_a_folder_without_a_config_is_code_2(tmp_path: Path) -> None:
    answer = here("demo", "--model", tmp_path)
    assert answer.code == 2 and "config.json" in answer.err


def test_differences_are_found_in_bits_and_in_tokens() -> None:
    def run(hashes: list[str], tokens: list[list[int]]) -> Decoded:
        return Decoded(tokens, hashes, [0.1] * len(hashes), 1.0)

    good = run(["a", "b", "c"], [[1, 2]])
    assert difference(good, run(["a", "b", "c"], [[1, 2]])) is None
    assert difference(good, run(["a", "x", "c"], [[1, 2]])) == 1
    assert difference(good, run(["a", "b"], [[1, 2]])) == 2
    assert difference(good, run(["a", "b", "c"], [[1, 3]])) == 0


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_dealt_prompts_come_back_in_order(world_size: int) -> None:
    each = -(-len(PROMPTS) // world_size)
    dealt = [[[i % len(PROMPTS)] for i in range(rank, each * world_size, world_size)] for rank in range(world_size)]
    assert _by_prompt(dealt) == [[i] for i in range(len(PROMPTS))]


def test_prompts_without_a_tokenizer_are_tokens_of_the_vocabulary(tmp_path: Path) -> None:
    codec = Codec(tmp_path)
    encoded = [codec.encode(prompt, 100) for prompt in PROMPTS]
    assert all(0 <= token < 100 for tokens in encoded for token in tokens)
    assert len({len(tokens) for tokens in encoded}) > 1 and len({tuple(tokens) for tokens in encoded}) == len(PROMPTS)


def test_a_folder_without_a_model_is_never_ready(tmp_path: Path) -> None:
    answer = here("demo", "--model", tmp_path, "--png", tmp_path / "demo.png")
    assert answer.code == 2 and answer.out == ""
    assert answer.err.startswith("SpecError: no model config: ")
