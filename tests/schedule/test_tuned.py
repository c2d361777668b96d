"""Measured blocks: between, beside and at measured numbers of tokens; files, and what is refused."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tuned_cases import HOST, NARROW, blocks_model, rows_of, tuned_of

from graphshard.core.errors import SpecError
from graphshard.core.specs import DeviceSpec, StepShape
from graphshard.schedule.auto import make_plan
from graphshard.schedule.tune_file import FORMAT, as_tuned, load_tuned, parse_tuned, tune_content, tune_text
from graphshard.schedule.tuned import kind_of, kinds_of, time_at

MODEL = blocks_model()
FIRST = MODEL.blocks[0]
TIMES = {4: (0.8, 0.2), 64: (1.0, 2.0)}
TUNED = tuned_of(MODEL, TIMES)


def test_blocks_alike_but_for_their_layer_are_one_kind() -> None:
    kinds = kinds_of(MODEL)
    assert [len(blocks) for blocks in kinds.values()] == [2, 1]
    assert kind_of(MODEL, FIRST) == "mlp_compute 64x32 64x32 float32" and NARROW == (64, 32)
    assert [block for blocks in kinds.values() for block in blocks] == list(MODEL.blocks)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(1, 2.0), (4, 2.0), (16, 4.0), (8, 2.0 * 2**0.5), (64, 8.0), (65, 8.0), (10_000, 8.0)],
)
def test_times_are_powers_between_two_measured_numbers_and_the_nearest_ones_outside(
    tokens: int, expected: float
) -> None:
    assert time_at([(4, 2.0), (64, 8.0)], tokens) == pytest.approx(expected)
    assert time_at([(4, 2.0)], tokens) == 2.0


def test_of_many_measured_numbers_the_nearest_two_count() -> None:
    points = [(1, 5.0), (2, 1.0), (8, 4.0), (16, 100.0)]
    assert time_at(points, 4) == pytest.approx(2.0)
    assert [time_at(points, tokens) for tokens, _ in points] == [ms for _, ms in points]


@pytest.mark.parametrize(
    ("tokens", "mode", "reason"),
    [
        (4, "tensor_parallel", "measured: 0.2 ms against 0.8 ms at 4 tokens a rank"),
        (64, "gather", "measured: 1 ms against 2 ms at 64 tokens a rank"),
        (1, "tensor_parallel", "measured: 0.2 ms against 0.8 ms at 4 tokens a rank, the nearest to 1"),
        (99, "gather", "measured: 1 ms against 2 ms at 64 tokens a rank, the nearest to 99"),
        (
            16,
            "tensor_parallel",
            "between those measured at 4 and 64 tokens a rank: 0.632 ms against 0.894 ms at 16",
        ),
    ],
)
def test_the_choice_says_what_was_measured(tokens: int, mode: str, reason: str) -> None:
    choice = TUNED.choose(MODEL, FIRST, tokens)
    assert (choice.mode, choice.reason) == (mode, reason)


def test_of_equal_times_the_gathered_one_is_chosen() -> None:
    tuned = tuned_of(MODEL, {4: (1.5, 1.5)})
    assert tuned.choose(MODEL, FIRST, 4).mode == "gather"


def test_each_kind_has_times_of_its_own() -> None:
    narrow, wide = TUNED.kinds
    tuned = replace(TUNED, rows=rows_of(narrow, {4: (1.0, 2.0)}) + rows_of(wide, {4: (2.0, 1.0)}), tokens=(4,))
    assert [tuned.choose(MODEL, block, 4).mode for block in MODEL.blocks] == ["gather", "gather", "tensor_parallel"]


def test_what_is_missing_is_known_and_what_was_measured_counts() -> None:
    narrow, wide = TUNED.kinds
    begun = replace(TUNED, rows=TUNED.rows[:2])
    assert begun.missing == ((narrow, 64), (wide, 4), (wide, 64)) and begun.num_measured == 1
    assert "3 measurements of 4 are missing" in begun.headline and "missing" not in TUNED.headline
    assert begun.choose(MODEL, FIRST, 64).reason.endswith("at 4 tokens a rank, the nearest to 64")
    with pytest.raises(SpecError, match=r"no measurement of layers\.2\.mlp .* yet; run it again, it goes on"):
        begun.choose(MODEL, MODEL.blocks[2], 4)
    with pytest.raises(SpecError, match=r"no measurement of layers\.2\.mlp .*: measure with `graphshard tune`"):
        replace(begun, kinds=(narrow,)).choose(MODEL, MODEL.blocks[2], 4)


def test_the_headline_says_how_it_was_measured() -> None:
    assert TUNED.headline == (
        f"tune file {TUNED.digest[:12]}: 2 ranks, transport pull, some cpu, units weight, prefetch_depth 0, "
        "executor cooperative"
    )


def test_measurements_of_something_else_are_refused() -> None:
    TUNED.check(MODEL, 2, "pull", HOST)
    other = blocks_model(spaced=False)
    with pytest.raises(SpecError, match=rf"is of model three-blocks \({MODEL.digest[:12]}\), and this is model three"):
        TUNED.check(other, 2, "pull", HOST)
    with pytest.raises(SpecError, match="is of world_size 2, and this is world_size 4: measure with"):
        TUNED.check(MODEL, 4, "pull", HOST)
    with pytest.raises(SpecError, match="is of transport pull, and this is transport nccl"):
        TUNED.check(MODEL, 2, "nccl", HOST)
    with pytest.raises(SpecError, match="is of device host, and this is device cuda"):
        TUNED.check(MODEL, 2, "pull", DeviceSpec("cuda", "card", memory_bytes=1))


def test_the_digest_is_of_measurements_and_not_of_notes() -> None:
    assert replace(TUNED, notes={}).digest == TUNED.digest
    slower = tuned_of(MODEL, TIMES | {64: (1.0, 2.1)})
    assert slower.digest != TUNED.digest
    assert replace(TUNED, world_size=3).digest != TUNED.digest


def test_a_file_is_a_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "tune.json"
    path.write_text(tune_text(TUNED))
    assert load_tuned(path) == TUNED and as_tuned(str(path)) == TUNED and as_tuned(TUNED) is TUNED
    assert json.loads(path.read_text())["format"] == FORMAT
    assert parse_tuned(tune_content(TUNED)) == TUNED


def damaged(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(tune_text(TUNED))
    change(content)
    return content


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(format="graphshard-tune-0"), "format is 'graphshard-tune-0'; this version reads graph"),
        (lambda c: c.pop("format"), "format is None; this version"),
        (lambda c: c.pop("tokens"), "the key tokens is missing"),
        (lambda c: c.update(more=1), "the key more is unknown; known are model, "),
        (lambda c: c.update(world_size=0), "world_size is 0; it is a whole number that starts at 1"),
        (lambda c: c.update(transport="mpi"), "transport is 'mpi'; known are pull, nccl"),
        (lambda c: c.update(rows={}), r"rows is \{\}; it is a list"),
        (lambda c: c["rows"][1].pop("n"), r"the key rows\[1\].n is missing"),
        (lambda c: c["rows"][1].update(median_ms=0.0), r"rows\[1\].median_ms is 0.0; it is a time above 0"),
        (lambda c: c["rows"][1].update(median_ms=float("inf")), r"rows\[1\].median_ms is inf; it is a time above 0"),
        (lambda c: c["rows"][1].update(median_ms=10**400), r"rows\[1\].median_ms is 10*; it is a time above 0"),
        (lambda c: c["rows"][1].update(mode="replicated"), r"rows\[1\].mode is 'replicated'; known are gather, tensor"),
        (lambda c: c["rows"].pop(), "the rows of .* at 64 tokens a rank are not gather and tensor_parallel in turn"),
        (lambda c: c["rows"].pop(0), "the rows of .* at 4 tokens a rank are not gather and tensor_parallel in turn"),
        (lambda c: c.update(rows=c["rows"] + c["rows"][:2]), "at 4 tokens a rank was measured twice"),
        (lambda c: c.update(kinds=[""]), r"kinds\[0\] is ''; it is a text"),
    ],
)
def test_a_damaged_file_is_refused_by_key(change: Callable[[dict[str, Any]], object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse_tuned(damaged(change))


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tune.json"
    with pytest.raises(SpecError, match=r"cannot read the tune file .*tune\.json: No such file"):
        load_tuned(path)
    path.write_text("{")
    with pytest.raises(SpecError, match=r"the tune file .*tune\.json is not JSON"):
        load_tuned(path)
    path.write_text("[" * 100_000)
    with pytest.raises(SpecError, match=r"the tune file .*tune\.json is not JSON"):
        load_tuned(path)
    path.write_text("[]")
    with pytest.raises(SpecError, match=r"the tune file .*tune\.json holds a list, not an object"):
        load_tuned(path)
    with pytest.raises(SpecError, match="tune is 3: give the file"):
        as_tuned(3)  # type: ignore[arg-type]


def test_rows_of_one_mode_twice_are_no_measurement() -> None:
    with pytest.raises(SpecError, match="are not gather and tensor_parallel in turn"):
        replace(TUNED, rows=(TUNED.rows[0], TUNED.rows[0]))


def test_steps_that_are_not_like_those_measured_are_warned_of() -> None:
    asked: dict[str, Any] = {"tune": TUNED, "min_shard_bytes": 0, "step_shapes": [4]}
    with pytest.warns(UserWarning, match="measured with prefetch_depth 0, here 2; executor cooperative, here threaded"):
        plan = make_plan(MODEL, 2, HOST, dual="auto", prefetch_depth=2, executor="threaded", **asked)
    assert plan.block_reasons[-1].startswith("the tune file is of other steps: measured with prefetch_depth 0, here 2")
    card, there = replace(TUNED, device_kind="cuda", device="a card"), DeviceSpec("cuda", "another card", 2**40)
    with pytest.warns(UserWarning, match="the tune file is of a card, this is another card"):
        plan = make_plan(MODEL, 2, there, dual="auto", prefetch_depth=0, **(asked | {"tune": card}))
    assert "card, this" not in str(plan.block_reasons), "ranks compare plans, and not what their devices are called"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "other steps" not in str(make_plan(MODEL, 2, HOST, dual="auto", **asked).block_reasons)
        make_plan(MODEL, 2, HOST, dual="gather", prefetch_depth=2, **asked)


def test_a_plan_goes_by_the_file_unless_a_mode_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "tune.json"
    path.write_text(tune_text(TUNED))
    asked: dict[str, Any] = {"step_shapes": [4, 64], "tune": path, "min_shard_bytes": 0}
    plan = make_plan(MODEL, 2, HOST, dual="auto", **asked)
    assert dict(plan.modes) == {StepShape(4): ("tensor_parallel",) * 3, StepShape(64): ("gather",) * 3}
    assert f"modes: {TUNED.headline}" in plan.block_reasons
    assert any("tensor_parallel, measured: 0.2 ms against 0.8 ms at 4 tokens a rank" in r for r in plan.block_reasons)
    forced = make_plan(MODEL, 2, HOST, dual="tensor_parallel", **asked)
    assert {mode for _, modes in forced.modes for mode in modes} == {"tensor_parallel"}
    assert f"modes: tensor_parallel was asked for, whatever is known: {TUNED.headline}" in forced.block_reasons
    with pytest.raises(SpecError, match="dual is off, which slices none: say dual auto"):
        make_plan(MODEL, 2, HOST, **asked)
    with pytest.raises(SpecError, match="is of transport pull, and this is transport nccl"):
        make_plan(MODEL, 2, HOST, dual="auto", transport="nccl", **asked)
