"""The bench of a speculative step: the sequences it issues, its arithmetic, and its structure on small runs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from ranks import run_on_ranks

from graphshard.bench.speculative import (
    OVERLAP_KEYS,
    SETTINGS,
    SpeculativeRequest,
    alone,
    measure_speculative,
    models_of,
    plan_of,
    sequence_of,
    speculative_rows,
)
from graphshard.bench.speculative_models import HEAD_SIZE, HEADS, LayeredModel, fill_records, replay_records
from graphshard.bench.speculative_predict import SpeculativePredictor
from graphshard.core.errors import SpecError
from graphshard.core.sequence import COMMIT_FOLD, Fold, PrefetchLaunch, Replay, StepSequence
from graphshard.core.specs import StepShape
from graphshard.core.timeline import prefetch_name
from graphshard.cost.kernels import gather_us
from graphshard.cost.published import hardware
from graphshard.schedule.emit import emit
from graphshard.schedule.sequence import DRAFT, TARGET
from graphshard.verify.sequence import verify_sequences

SMALL = SpeculativeRequest(fold_ms=0.3, draft_bytes=64 * 2**10, target_bytes=128 * 2**10, num_samples=2, timeout_s=30.0)

CLOCK_US = 0.1
"""Differences of events are float32 milliseconds: a second has steps of 0.06 us."""


def sequences(world_size: int = 2) -> dict[str, StepSequence]:
    programs = [emit(spec, plan_of(spec, world_size, "pull")) for spec in (m.spec() for m in models_of(SMALL, 1))]
    return {setting: sequence_of(programs[0], programs[1], setting) for setting in SETTINGS}


def made_up(rank: int) -> dict[str, Any]:
    """What a rank would have measured: gathers of 20 and 40 us, a fold of 30, segments of 5."""
    steps = [{"prefetch_us": 20.0, "fold_us": 30.0, "overlap_us": us + rank, "late_us": 1.0} for us in (18.0, 10.0)]
    times = {"fold_us": [30.0, 30.0], "draft_us": [20.0, 20.0], "target_us": [40.0, 40.0]}
    specs = [model.spec() for model in models_of(SMALL, 1)]
    return {
        "samples": {**dict.fromkeys(SETTINGS, steps), **times},
        "num_records": 1,
        "segments_us": {TARGET: [5.0] * 3, DRAFT: [5.0] * 3},
        **{f"{name}_bytes": spec.weights[0].num_bytes for name, spec in zip((TARGET, DRAFT), specs, strict=True)},
    }


@pytest.mark.parametrize("setting", SETTINGS)
def test_what_is_issued_passes_the_verifier(setting: str) -> None:
    sequence = sequences()[setting]
    verify_sequences({"step": sequence}, num_copies=2).raise_if_bad()
    names = [type(op).__name__ for op in sequence.ops]
    assert names.count("PrefetchLaunch") == names.count("PrefetchWait") == names.count("Replay") == 2
    assert sequence.ops[-1] == Fold(TARGET, COMMIT_FOLD)
    assert sequence.ops[-2] == PrefetchLaunch(DRAFT, 0, 0, "copy" if setting == "shared" else "prefetch")


def test_settings_differ_in_where_the_target_gathers() -> None:
    issued = sequences()
    own, beside, shared = (issued[setting].ops for setting in SETTINGS)
    assert own[0] == beside[-3] == PrefetchLaunch(TARGET, 0, 0, "prefetch")
    assert shared[-3] == PrefetchLaunch(TARGET, 0, 0, "copy")
    assert own.index(Replay(DRAFT)) > 0 and beside.index(Replay(TARGET)) < len(beside) - 3


def test_rows_are_medians_over_all_ranks() -> None:
    rows = speculative_rows([made_up(0), made_up(1)])
    assert [(row["setting"], row["stream"]) for row in rows] == [
        ("own", "own"),
        ("beside", "own"),
        ("shared", "shared"),
    ]
    for row in rows:
        assert (row["prefetch_us"], row["fold_us"], row["overlap_us"], row["n"]) == (20.0, 30.0, 14.5, 4)
        assert row["overlap_share"] == pytest.approx(14.5 / 20) and row["p10"] < row["overlap_share"] < row["p90"]
        assert [(one["rank"], one["share"]) for one in row["samples"]] == [
            (0, 0.9),
            (0, 0.5),
            (1, 0.95),
            (1, 0.55),
        ]
    assert alone([made_up(0)])["target_us"].median == 40.0


def test_predictions_by_what_was_measured() -> None:
    """Own: 20 us under 30. Beside: both gathers share the link, so 40 us with 30 of them under the fold. Shared: the
    target's 40 us come first, the fold is over, and the next step waits for the draft's."""
    predictor = SpeculativePredictor(SMALL, [made_up(0), made_up(0)], None)
    shares = {setting: predictor.overlap(setting).share for setting in SETTINGS}
    assert shares == pytest.approx({"own": 1.0, "beside": 0.75, "shared": 0.0})
    assert predictor.step("own").exposed_us == ()
    assert predictor.step("shared").exposed_us == ((DRAFT, 0, pytest.approx(40 + 20 - 30)),)


def test_predictions_by_a_machine() -> None:
    """The fold is as long alone as the run found it; all else is the machine's, what it does beside a gather too."""
    machine = replace(hardware("b200"), kind="host", name="some host")
    predictor = SpeculativePredictor(SMALL, [made_up(0), made_up(0)], machine)
    made = predictor.step("own")
    gather = gather_us(64 * 2**10, 2, "pull", machine)
    found = made.overlap(DRAFT, COMMIT_FOLD)
    assert found.prefetch_us == pytest.approx(gather * machine.overlap_copy) and found.share == pytest.approx(1.0)
    beside_us = found.prefetch_us * (1 - 1 / machine.overlap_compute)
    assert found.fold_us == pytest.approx(30.0 + beside_us) and "some host" in predictor.source


def test_units_have_the_size_that_was_asked_for() -> None:
    for num_bytes in (4096, 64 * 2**10, 14 * 2**20):
        model = LayeredModel("m", 3, num_bytes)
        (rows, width) = model.spec().weights[0].shape
        assert rows * width * 4 == num_bytes and rows >= width
    with pytest.raises(SpecError, match="too small to time"):
        LayeredModel("m", 3, 1000)
    assert LayeredModel("m", 3, 4096).spec().folds == () and not LayeredModel("m", 3, 4096).folds


def test_the_fold_is_a_delta_rule() -> None:
    """After a record the state answers its key with its value, since keys have length 1."""
    state = torch.zeros(HEADS, HEAD_SIZE, HEAD_SIZE)
    keys, values = torch.empty(3, HEADS, HEAD_SIZE), torch.empty(3, HEADS, HEAD_SIZE)
    fill_records(keys, values)
    replay_records(state, keys, values)
    answered = torch.bmm(keys[-1].unsqueeze(1), state).squeeze(1)
    torch.testing.assert_close(answered, values[-1], rtol=1e-5, atol=1e-5)  # float32 sums of 128 products


@pytest.mark.parametrize(("world_size", "transport"), [(1, "pull"), (2, "pull"), (2, "nccl")])
def test_a_small_run(world_size: int, transport: str) -> None:
    """Ranks as threads. In turn under pull: a gather needs no peer's help."""
    request = {**vars(SMALL), "transport": transport, "in_turn": transport == "pull"}
    ranks = run_on_ranks(measure_speculative, world_size, request)
    rows = speculative_rows(ranks)
    for row in rows:
        assert row["n"] == SMALL.num_samples * world_size
        for one in row["samples"]:
            assert 0 <= one["overlap_us"] <= min(one["prefetch_us"], one["fold_us"]) and 0 <= one["share"] <= 1
            assert all(one[key] >= 0 for key in OVERLAP_KEYS) and one["fold_us"] > 0 < one["prefetch_us"]
    for rank in ranks:
        check_timeline(rank["timeline"]["spans"])
        assert rank["num_records"] == ranks[0]["num_records"] and rank["event_us"] > 0
        assert {name: len(us) for name, us in rank["segments_us"].items()} == {DRAFT: 3, TARGET: 3}
        assert all(us > 0 for of in rank["segments_us"].values() for us in of)
    assert SpeculativePredictor(SpeculativeRequest(**request), ranks, None).step("shared").timeline.duration_us > 0


def check_timeline(spans: list[dict[str, Any]]) -> None:
    """A traced step: what is ordered by events is ordered in time; spans of a lane do not overlap."""
    lanes: dict[str, list[dict[str, Any]]] = {}
    for span in spans:
        lanes.setdefault(span["lane"], []).append(span)
    assert {"draft.compute", "draft.copy", "draft.prefetch", "target.compute", "target.copy"} <= set(lanes)
    for lane in lanes.values():
        assert all(one["begin_us"] <= one["end_us"] for one in lane)
        assert all(before["end_us"] <= after["begin_us"] + CLOCK_US for before, after in pairwise(lane))
    (fold,) = [span for span in spans if span["name"] == COMMIT_FOLD]
    computed = [span for span in spans if span["layer"] is not None]
    draft_end, target_end = (
        max(span["end_us"] for span in computed if span["lane"] == f"{name}.compute") for name in (DRAFT, TARGET)
    )
    assert draft_end <= target_end <= fold["begin_us"] < fold["end_us"]
    gather = [span for span in spans if span["name"] == prefetch_name(DRAFT, 0)][-1]
    assert target_end <= gather["begin_us"] < gather["end_us"]
    (target_gather,) = [span for span in spans if span["name"] == prefetch_name(TARGET, 0)]
    first = min(span["begin_us"] for span in computed if span["lane"] == "target.compute" and span["layer"] == 0)
    assert target_gather["end_us"] <= first + CLOCK_US


def test_the_fold_runs_between_steps() -> None:
    """A step of the target does not change the state; the fold is a segment of its own."""
    model = LayeredModel("m", 3, 4096, num_records=2)
    assert [fold.spec.name for fold in model.folds] == [COMMIT_FOLD]
    assert [segment.spec.name for segment in model.segments] == ["proj"] * 3
    names = [buffer.name for buffer in model.buffers(StepShape(1)) if buffer.role == "cache"]
    assert names == ["state", "keys", "values"]
