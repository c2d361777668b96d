"""Certificates: the first difference is named on every rank, alike."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from ranks import MODES, run_on_ranks, try_on_ranks

from graphshard.comm.certificate import Certificate, agree_min, compare, exchange
from graphshard.comm.group import Group
from graphshard.core.errors import CommError
from graphshard.core.ops import AgLaunch, Gemm, RecordGate, WaitOnce
from graphshard.core.program import Program
from graphshard.core.specs import ModelSpec, SegmentSpec, WeightSpec


def program(num_units: int) -> Program:
    ops: list[Any] = []
    for unit in range(num_units):
        ops += [
            AgLaunch(unit, 0),
            WaitOnce(unit, 0),
            Gemm(unit, unit + 1, unit, "q_proj", (unit,)),
            RecordGate(unit, 0),
        ]
    return Program(tuple(ops), 1, num_units, num_units, (None,), (None,))


def model_text(shape: tuple[int, ...], num_weights: int, name: str = "small") -> str:
    weights = tuple(WeightSpec(f"w{i}", shape if i == 1 else (4,), "int8") for i in range(num_weights))
    return ModelSpec(name, weights, tuple(SegmentSpec(w.name, None, (w.name,)) for w in weights)).text()


def certificate() -> Certificate:
    text = program(3).text()
    return Certificate(
        model="m" * 64,
        plan="p" * 64,
        layout="l" * 64,
        programs={"1x1": text, "2x1": text},
        settings={"torch": "2.13", "transport": "pull"},
        windows=[("shard", 4096)],
        numbers={"spare_cores": 1},
        model_text=model_text((4,), 2),
    )


def other_certificate(what: str) -> Certificate:
    mine = certificate()
    short = program(2)
    swapped = replace(short, ops=(*short.ops[:5], AgLaunch(1, 0), *short.ops[6:]))
    two, three = short.text(), program(3).text()
    changes: dict[str, dict[str, Any]] = {
        "nothing": {},
        "setting": {"settings": {"torch": "2.12", "transport": "pull"}},
        "more settings": {"settings": {"executor": "threaded", "torch": "2.13", "transport": "pull"}},
        "number": {"numbers": {"spare_cores": 0}},
        "shapes": {"programs": {"2x1": three, "1x1": three}, "settings": {"buffers": "follow from the shapes"}},
        "weight": {"model": "other", "model_text": model_text((4, 4), 2), "settings": {"torch": "2.12"}},
        "more weights": {"model": "other", "model_text": model_text((4,), 3)},
        "model name": {"model": "other", "model_text": model_text((4,), 2, "other")},
        "no text": {"model": "other", "model_text": ""},
        "shorter program": {"programs": {"1x1": three, "2x1": two}, "plan": "other"},
        "op": {"programs": {"1x1": two, "2x1": swapped.text()}},
        "entry": {"programs": {"1x1": replace(program(3), entry=(2,)).text(), "2x1": three}},
        "layout": {"layout": "other"},
        "window": {"windows": [("shard", 8192)]},
        "more windows": {"windows": [("shard", 4096), ("draft", 4096)]},
    }
    return replace(mine, **changes[what])


def exchange_as(group: Group, unlike_rank: int, what: str) -> str:
    exchange(group, other_certificate(what if group.rank == unlike_rank else "nothing"))
    return "alike"


EXPECTED = {
    "setting": 'setting torch is "2.13" on ranks 0 1, "2.12" on rank 2',
    "more settings": 'the next entry is "setting torch" on ranks 0 1, "setting executor" on rank 2',
    "number": 'number spare_cores is "1" on ranks 0 1, "0" on rank 2',
    "shapes": 'step shapes is "1x1 2x1" on ranks 0 1, "2x1 1x1" on rank 2',
    "weight": 'weight 1 is "name=w1 shape=[4] dtype=int8 strides=none" on ranks 0 1, '
    '"name=w1 shape=[4,4] dtype=int8 strides=none" on rank 2',
    "more weights": 'weight 2 is "nothing" on ranks 0 1, "name=w2 shape=[4] dtype=int8 strides=none" on rank 2',
    "model name": 'model is "name=small kept=[]" on ranks 0 1, "name=other kept=[]" on rank 2',
    "no text": 'weight 0 is "name=w0 shape=[4] dtype=int8 strides=none" on ranks 0 1, "nothing" on rank 2',
    "shorter program": 'program 2x1, op 8 is "ag_launch unit=2 slot=0 stream=copy" on ranks 0 1, "nothing" on rank 2',
    "entry": 'program 1x1, line 1 is "entry    0=-" on ranks 0 1, "entry    0=2" on rank 2',
    "layout": f'layout digest is "{"l" * 64}" on ranks 0 1, "other" on rank 2',
    "window": 'window 0 is "shard (4096 B)" on ranks 0 1, "shard (8192 B)" on rank 2',
    "more windows": 'the next entry is "nothing" on ranks 0 1, "window 1" on rank 2',
}


@pytest.mark.parametrize("what", list(EXPECTED))
def test_the_first_difference_is_named_on_every_rank(what: str) -> None:
    outcomes = try_on_ranks(exchange_as, 3, 2, what)
    assert {(outcome.error_type, outcome.error) for outcome in outcomes} == {
        (
            "CommError",
            f"certificates differ: {EXPECTED[what]}; start all ranks with the same model, plan, versions and settings",
        )
    }


@pytest.mark.parametrize("what", list(EXPECTED))
def test_one_that_comes_back_is_told_the_same(what: str) -> None:
    told = json.loads(json.dumps(certificate().told(3)))
    with pytest.raises(CommError) as caught:
        compare(other_certificate(what), told, 2, 3)
    assert EXPECTED[what] in str(caught.value)


def exchange_swapped(group: Group) -> None:
    what = "op" if group.rank == 0 else "nothing"
    mine = other_certificate(what)
    exchange(group, replace(mine, programs={"2x1": mine.programs["2x1"]}))


def test_an_op_is_named_by_its_index() -> None:
    for outcome in try_on_ranks(exchange_swapped, 2):
        assert (
            'program 2x1, op 5 is "ag_launch unit=1 slot=0 stream=copy" on rank 0, '
            '"wait_once unit=1 slot=0 stream=compute" on rank 1' in outcome.error
        )


@pytest.mark.parametrize("mode", MODES)
def test_equal_certificates_pass(mode: str) -> None:
    assert run_on_ranks(exchange_as, 2, 0, "nothing", mode=mode) == ["alike"] * 2
    assert run_on_ranks(exchange_as, 1, 0, "window", mode=mode) == ["alike"]


def agree(group: Group, values: list[Any]) -> int:
    return agree_min(group, "spare cores", values[group.rank])


def test_numbers_are_agreed_before_they_choose_anything() -> None:
    """No rank's own number decides."""
    assert run_on_ranks(agree, 3, [5, 2, 7]) == [2, 2, 2]
    for outcome in try_on_ranks(agree, 2, [1, "many"]):
        assert "agreed spare cores: ranks 1 gave no whole number" in outcome.error
