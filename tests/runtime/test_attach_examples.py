"""The examples in the documentation run, and give the bits they promise."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import rank_environment, run_on_ranks

import graphshard

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@functools.cache
def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def example(group: graphshard.Group, name: str, *arguments: str) -> bool:
    return bool(load(name).main(group, *arguments))


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("own_loop", "threads"),
        ("own_loop", "processes"),
        ("engine_load", "threads"),
        pytest.param("engine_load", "processes", marks=pytest.mark.slow),
        ("attach_transformers", "threads"),
        pytest.param("attach_transformers", "processes", marks=pytest.mark.slow),
    ],
)
def test_examples_run(name: str, mode: str) -> None:
    if mode == "threads":
        load(name)  # transformers cannot be imported by two threads at once
    assert run_on_ranks(example, 2, name, mode=mode) == [True, True]


@pytest.mark.parametrize(
    ("transport", "mode"),
    [
        ("pull", "threads"),
        ("nccl", "threads"),
        pytest.param("pull", "processes", marks=pytest.mark.slow),
        pytest.param("nccl", "processes", marks=pytest.mark.slow),
    ],
)
def test_a_speculative_loop_of_ones_own_runs(transport: str, mode: str) -> None:
    assert run_on_ranks(example, 2, "speculative_loop", transport, mode=mode) == [True, True]


def test_the_loop_of_a_speculative_server_has_thirty_lines() -> None:
    assert len(inspect.getsource(load("speculative_loop").serve).splitlines()) <= 30


@pytest.mark.parametrize(("name", "most"), [("own_loop", 26), ("engine_load", 40), ("speculative_loop", 44)])
def test_examples_are_short(name: str, most: int) -> None:
    lines = [line for line in (EXAMPLES / f"{name}.py").read_text().splitlines() if line.strip()]
    assert len(lines) <= most, "20 to 40 lines, and what a script needs around them"


@pytest.mark.slow
def test_an_example_runs_under_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(EXAMPLES / "own_loop.py")]
    environment = {**os.environ, **rank_environment(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"\[rank ./2\] equal: True", done.stdout)) == [
        "[rank 0/2] equal: True",
        "[rank 1/2] equal: True",
    ]
