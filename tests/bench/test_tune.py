"""`tune` with steps that only count: what is measured, what a file keeps, what a second run does; never how fast."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphshard.bench.threads import run_threads
from graphshard.bench.tune import TuneRequest, not_sliced, plan_tuning, tune
from graphshard.comm.group import Group
from graphshard.core.errors import CommError, SpecError
from graphshard.core.plan import Mode
from graphshard.core.specs import StepShape
from graphshard.models.config import LlamaConfig
from graphshard.models.llama import Llama
from graphshard.runtime.model import SegmentedModel
from graphshard.schedule.tune_file import load_tuned
from graphshard.schedule.tuned import MODES, kind_of

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8,
    tied_embeddings=True,
)  # fmt: skip
MODEL = Llama(CONFIG, max_batch_size=64, dual=True)
SPEC = MODEL.spec()
KIND = kind_of(SPEC, SPEC.blocks[0])


@dataclass
class FakeRuntimes:
    """What a rank built and stepped."""

    fails_after: int | None = None
    """Counted builds and steps at other numbers of tokens."""
    prefetch_depth: int = 0
    runs: Mode | None = None
    """How blocks run, whatever was asked for."""
    built: list[tuple[tuple[int, ...], Mode, int]] = field(default_factory=list)
    """Tokens, mode, number of blocks."""
    stepped: list[tuple[Mode, int]] = field(default_factory=list)
    closed: int = 0

    def __call__(self, model: SegmentedModel, mode: Mode, tokens: Sequence[int]) -> Any:
        self.built.append((tuple(tokens), mode, len(model.spec().blocks)))
        plan = SimpleNamespace(
            step_shapes=tuple(StepShape(n) for n in tokens),
            modes_of=lambda shape: (self.runs or mode,) * len(model.spec().blocks),
            block_reasons=("because",),
            unit_policy="weight",
            prefetch_depth=self.prefetch_depth,
            executor="cooperative",
        )
        return _FakeRuntime(self, mode, plan)


@dataclass
class _FakeRuntime:
    all: FakeRuntimes
    mode: Mode
    plan: Any

    def __enter__(self) -> _FakeRuntime:
        return self

    def __exit__(self, *error: object) -> None:
        self.all.closed += 1

    def graph(self, n: int) -> Any:
        inputs = {"tokens": torch.zeros(n, 1, dtype=torch.int64)}
        return SimpleNamespace(inputs=inputs, replay=lambda: self._step(n), synchronize=lambda: None)

    def _step(self, n: int) -> None:
        at = len({tokens for _, tokens in self.all.stepped} | {n})
        if self.all.fails_after is not None and at > self.all.fails_after:
            raise CommError("staged")
        self.all.stepped.append((self.mode, n))


def request(path: Path, *tokens: int, **changes: Any) -> TuneRequest:
    made = TuneRequest(
        path=path, tokens=tokens, num_steps=7, num_layers=2, transport="pull", device_kind="host", device="some cpu",
        settings={"cache_length": 16}, notes={"machine": {}}, vocab_size=64,
    )  # fmt: skip
    return replace(made, **changes)


def run(asked: TuneRequest, fakes: list[FakeRuntimes]) -> list[tuple[int, int]]:
    """The file is written; what rank 0's bar was told."""
    told: list[tuple[int, int]] = []

    def rank(group: Group) -> None:
        on_measured = (lambda done, total: told.append((done, total))) if group.rank == 0 else (lambda *_: None)
        tune(group, MODEL, fakes[group.rank], asked, on_measured)

    run_threads(rank, len(fakes))
    return told


def test_equal_blocks_are_measured_once_both_ways_in_turns(tmp_path: Path) -> None:
    path, fakes = tmp_path / "tune.json", [FakeRuntimes(), FakeRuntimes()]
    assert run(request(path, 4, 1), fakes) == [(0, 2), (1, 2), (2, 2)]
    tuned = load_tuned(path)
    assert tuned.kinds == (KIND,) and tuned.tokens == (1, 4) and not tuned.missing
    assert [(row.tokens_per_rank, row.mode, row.n) for row in tuned.rows] == [(n, m, 7) for n in (1, 4) for m in MODES]
    assert tuned.settings == {
        "cache_length": 16, "num_layers": 2, "units": "weight", "prefetch_depth": 0, "executor": "cooperative",
    }  # fmt: skip
    for fake in fakes:
        assert fake.built == [((1, 4), mode, 2) for mode in MODES] and fake.closed == 2
        modes = [mode for mode, n in fake.stepped if n == 4]
        turns = [4, 4, 4, 4, 2, 2]  # counted steps of a turn, and the one before them
        assert modes == [
            m for m, count in zip((*MODES, *MODES[::-1], *MODES), turns, strict=True) for _ in range(count)
        ]


def test_a_run_that_ends_early_loses_nothing_and_the_next_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "tune.json"
    with pytest.raises(CommError, match="staged"):
        run(request(path, 1, 4, 16), [FakeRuntimes(fails_after=2) for _ in range(2)])
    first = load_tuned(path)
    assert first.num_measured == 2 and first.missing == ((KIND, 16),)
    assert [one.name for one in tmp_path.iterdir()] == ["tune.json"]
    fakes = [FakeRuntimes(), FakeRuntimes()]
    assert run(request(path, 1, 4, 16), fakes) == [(2, 3), (3, 3)]
    assert fakes[0].built == [((16,), mode, 2) for mode in MODES]
    assert load_tuned(path).rows[: len(first.rows)] == first.rows and not load_tuned(path).missing


def test_a_whole_file_is_not_measured_again_and_grows_by_what_is_new(tmp_path: Path) -> None:
    path = tmp_path / "tune.json"
    run(request(path, 4), [FakeRuntimes(), FakeRuntimes()])
    before, fakes = path.read_bytes(), [FakeRuntimes(), FakeRuntimes()]
    assert run(request(path, 4), fakes) == [(1, 1)]
    assert fakes[0].built == [] and path.read_bytes() == before
    run(request(path, 64), fakes)
    assert fakes[0].built == [((64,), mode, 2) for mode in MODES] and load_tuned(path).tokens == (4, 64)


def test_a_file_of_something_else_is_refused_on_all_ranks_before_anything_is_built(tmp_path: Path) -> None:
    path = tmp_path / "tune.json"
    run(request(path, 4), [FakeRuntimes(), FakeRuntimes()])
    for changes, message in (
        ({"transport": "nccl"}, r"holds measurements with transport pull, this run has nccl: give another file"),
        ({"device": "another cpu"}, "with device some cpu, this run has another cpu"),
        ({"num_layers": 1}, "with num_layers 2, this run has 1"),
        ({"settings": {"cache_length": 32}}, "with cache_length 16, this run has 32"),
    ):
        fakes = [FakeRuntimes(), FakeRuntimes()]
        with pytest.raises(SpecError, match=message):
            run(request(path, 8, **changes), fakes)
        assert fakes[0].built == fakes[1].built == []
    with pytest.raises(SpecError, match="with world_size 2, this run has 4"):
        plan_tuning(SPEC, 4, request(path, 4), load_tuned(path))
    with pytest.raises(SpecError, match="with prefetch_depth 0, this run has 1"):
        run(request(path, 8), [FakeRuntimes(prefetch_depth=1), FakeRuntimes(prefetch_depth=1)])
    path.write_text(json.dumps({"format": "x"}))
    with pytest.raises(SpecError, match=r"the tune file .* format is 'x'"):
        run(request(path, 8), [FakeRuntimes(), FakeRuntimes()])


def test_blocks_that_run_otherwise_are_no_measurement(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"were to run by tensor_parallel, and at 4x1 they run by gather: because"):
        run(request(tmp_path / "tune.json", 4), [FakeRuntimes(runs="gather"), FakeRuntimes(runs="gather")])
    assert not (tmp_path / "tune.json").exists()


def test_what_cannot_be_sliced_is_said(tmp_path: Path) -> None:
    asked = request(tmp_path / "tune.json", 4)
    why = not_sliced(SPEC, 3)
    assert list(why) == [KIND] and why[KIND].startswith("layers.0.mlp: ")
    with pytest.raises(SpecError, match=r"llama has no block that may run in slices on 3 ranks: layers\.0\.mlp: "):
        plan_tuning(SPEC, 3, asked, None)
    odd = Llama(replace(CONFIG, intermediate_size=48), 1, dual=True).spec()
    assert list(not_sliced(odd, 3).values()) == [
        "layers.0.mlp: it does not divide: hidden size 32 is no multiple of 3 ranks"
    ]
    with pytest.raises(SpecError, match="it has none: make it with dual=True"):
        plan_tuning(Llama(CONFIG, 1).spec(), 2, asked, None)
