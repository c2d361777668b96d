"""`graphshard plan` for every config.json in tests/data: a plan each, and a refusal that names its key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_runner import here

pytest.importorskip("transformers")

CONFIGS = Path(__file__).parent.parent / "data" / "configs"
NAMES = sorted(path.name for path in CONFIGS.iterdir())
LARGE = {
    "deepseek-v3",
    "gemma-2-9b",
    "glm-4.5-air",
    "gpt-oss-120b",
    "kimi-linear-48b-a3b",
    "llama-3-70b",
    "qwen3-235b-a22b",
    "qwen3-next-80b-a3b",
}
"""Many layers, or many kinds of them: seconds each."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LARGE)) for name in NAMES])
def test_any_config_can_be_planned(name: str) -> None:
    options = ["--world-size", 4, "--hardware", "h200", "--tokens-per-rank", 512]
    answer = here("plan", CONFIGS / name, *options, "--json", "-")
    code, found = answer.code, answer.json
    assert code in (0, 1) and found["part_bytes"]["total"] > 0
    assert (code == 0) is (found["recommendation"]["answer"] != "none")
    assert found["full"]["freed_before_slots_bytes"] > 0 and found["rows"][0]["freed_bytes"] == 0


def test_a_config_that_cannot_be_read_names_the_key(tmp_path: Path) -> None:
    config = json.loads((CONFIGS / "llama-3-8b" / "config.json").read_text())
    config["model_type"] = "quokka"
    (tmp_path / "config.json").write_text(json.dumps(config))
    answer = here("plan", tmp_path)
    assert answer.code == 2 and "model_type" in answer.err and "quokka" in answer.err
