"""Recommendations and `auto` on small models: each answer, its reasons, and that its options make a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from small_models import CUDA, layered_model, machine

from graphshard.core.errors import SpecError
from graphshard.core.layout import build_layout
from graphshard.core.specs import DeviceSpec, KeptWeight, StepShape
from graphshard.cost.choose import ChooseRequest, choose
from graphshard.cost.facts import ModelFacts
from graphshard.cost.hardware import HardwareSpec, Link, Measured
from graphshard.cost.host_step import THREADED_PULL, predict_step
from graphshard.cost.patterns import exact_patterns
from graphshard.cost.plain import plain_facts
from graphshard.cost.problem import ResidencyRequest
from graphshard.cost.recommend import hides_from, recommend
from graphshard.cost.residency import bytes_for_kv_tokens
from graphshard.schedule.auto import make_plan
from graphshard.schedule.emit import emit
from graphshard.schedule.synthetic import synthetic_model
from graphshard.verify import verify

MODEL, FACTS = layered_model([[100, 40]] * 6)
LARGER, LARGER_FACTS = layered_model([[1200, 1100]] * 6)
"""Weights that are worth a gather where nobody names them."""
HOST = DeviceSpec("host", "test", 2**33)


def asked(tokens: int, hardware: HardwareSpec | None = None) -> ResidencyRequest:
    return ResidencyRequest(MODEL, FACTS, hardware or machine(), 2, (StepShape(tokens),))


def test_many_tokens_hide_everything() -> None:
    found = recommend(asked(4000))
    assert found.answer == "full" and found.residency is not None and len(found.full.chosen) == 12
    assert found.residency.outcome.freed_bytes >= found.full.freed_bytes > 0, "what slots cost may be worth keeping"


def test_few_tokens_hide_a_part_or_nothing() -> None:
    slow = replace(machine(), links=(Link("pull", 0.4e9, 1e6),))
    found = recommend(asked(1, hardware=slow))
    assert found.answer == "none" and found.residency is None
    assert "keep every weight resident" in found.lines()[-1]
    more = recommend(asked(60))
    assert more.answer == "partial" and more.residency is not None
    assert 0 < more.residency.outcome.freed_bytes < more.full.freed_bytes


def test_the_threshold_is_where_it_is_hidden() -> None:
    found = hides_from(asked(1))
    assert found is not None and recommend(asked(found)).answer == "full"
    assert hides_from(asked(1), max_share=0.0) is None, "the first gather is always exposed a little"
    with pytest.raises(SpecError, match="max_share is 1: it is a share of the step"):
        recommend(asked(1), max_share=1)


def test_bytes_for_kv_tokens() -> None:
    layers = tuple(replace(layer, kv_bytes_per_token=100, state_bytes_per_request=7) for layer in FACTS.layers)
    facts = replace(FACTS, layers=layers)
    assert bytes_for_kv_tokens(facts, 1000, 500) == 2 * 6 * (500 * 100 + 7)
    with pytest.raises(SpecError, match="0 KV tokens in sequences of 500: both start at 1"):
        bytes_for_kv_tokens(facts, 0, 500)


def test_patterns_name_exactly_the_chosen() -> None:
    names = [f"model.layers.{i}.{part}" for i in range(4) for part in ("up.weight", "down.weight")] + ["odd[1].weight"]
    every_up = [name for name in names if "up" in name]
    assert exact_patterns(every_up, names) == ("model.layers.*.up.weight",)
    assert exact_patterns(every_up[:2], names) == tuple(every_up[:2])
    assert exact_patterns(["odd[1].weight"], names) == ("odd[[]1].weight",)
    assert exact_patterns([], names) == ()


def made(hardware: HardwareSpec, device: DeviceSpec, **changes: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What `choose` says for a model of this file, having made, emitted and verified the plan."""
    model, facts = (LARGER, LARGER_FACTS) if hardware.kind == "host" else (MODEL, FACTS)
    shapes = (StepShape(1), StepShape(16))
    chosen = choose(ChooseRequest(model, facts, hardware, device, 2, shapes, **changes))
    plan = make_plan(model, 2, device, **chosen.options)
    layout = build_layout(model, plan)
    verify(emit(model, plan), layout, model=model).raise_if_bad()
    limit = changes.get("memory_limit_bytes")
    assert limit is None or layout.reserved_bytes(device.granularity_bytes) <= limit
    return chosen.options, chosen.reasons


def test_auto_on_a_gpu_takes_what_is_hidden_or_what_a_limit_asks_for() -> None:
    whole = build_layout(MODEL, make_plan(MODEL, 2, CUDA, replicated=True)).reserved_bytes(CUDA.granularity_bytes)
    options, reasons = made(machine(), CUDA, max_share=0.5)
    assert options["include"] and any("tokens a rank" in reason for reason in reasons)
    device = replace(CUDA, granularity_bytes=256)
    options, reasons = made(machine(), device, memory_limit_bytes=whole * 7 // 10)
    assert options["include"] and any(reason.startswith("not units") for reason in reasons)
    options, reasons = made(machine(), CUDA, memory_limit_bytes=whole)
    assert options == {"replicated": True} and "they fit" in reasons[0]
    with pytest.raises(SpecError, match="cannot be freed"):
        made(machine(), CUDA, memory_limit_bytes=1024)


def test_auto_on_a_host_walks_each_candidate() -> None:
    """With no spare core depth 0; with one, overlap wins unless both fight for the memory."""
    host = replace(machine(), kind="host")
    options, reasons = made(host, HOST)
    assert options["prefetch_depth"] == 0 and options["executor"] == "cooperative" and len(reasons) == 2
    spare = replace(HOST, spare_cores=1)
    options, _ = made(host, spare)
    assert options["prefetch_depth"] == 1 and options["executor"] == "threaded"
    fighting = replace(host, overlap_copy=3.0, overlap_compute=3.0)
    options, reasons = made(fighting, spare)
    assert options["prefetch_depth"] == 0 and any("times as long" in reason for reason in reasons)
    with pytest.raises(SpecError, match="no plan fits 10 B: the smallest needs"):
        made(host, HOST, memory_limit_bytes=10)


def test_one_rank_keeps_all() -> None:
    chosen = choose(ChooseRequest(MODEL, FACTS, machine(), CUDA, 1, (StepShape(1),)))
    assert chosen.options == {"replicated": True}


def test_measured_segments_go_first() -> None:
    """A host's whole segments, measured with weights in memory and in the cache, decide."""
    entries = tuple(
        Measured(what, (LARGER.digest, segment, batch, 1), us)
        for segment in ("s0", "s1")
        for batch in (1, 16)
        for what, us in (("segment", 100.0), ("segment_cached", 1.0))
    )
    host = replace(machine(), kind="host", cache_bytes=80 * 1024, measured=entries)
    options, reasons = made(host, HOST)
    assert options == {"units": "weight", "prefetch_depth": 0, "executor": "cooperative"}
    gathers_ms = 6 * (2 * 3.0 + (1200 + 1100) * 64 / 0.4e9 * 1e6) / 1e3
    assert f"{gathers_ms + 12 * 1e-3:.2f} ms a step" in reasons[0]


def test_auto_takes_the_shortest_step_that_bench_predicts() -> None:
    """`bench step --predict` walks threaded steps with a copy thread's wake-up and a shared cache; so does `auto`."""
    spare = replace(HOST, spare_cores=1)
    plain = replace(machine(), kind="host", cache_bytes=80 * 1024, cache_bytes_per_s=4e9)
    candidates: list[dict[str, Any]] = [
        {"units": units, "prefetch_depth": depth, "executor": executor}
        for units in ("weight", "layer")
        for depth, executor in ((0, "cooperative"), (1, "threaded"))
    ]
    found = []
    for wake_up_us in (0.0, 5000.0):
        host = replace(plain, links=(*plain.links, Link(THREADED_PULL, 0.4e9, 3.0 + wake_up_us)))
        facts = plain_facts(LARGER, 2)

        def step_us(options: dict[str, Any], host: HardwareSpec = host, facts: ModelFacts = facts) -> float:
            plan = make_plan(LARGER, 2, spare, **options)
            us = [predict_step(LARGER, facts, plan, shape, host).duration_us for shape in (StepShape(1), StepShape(16))]
            return sum(us) / 2

        shapes = (StepShape(1), StepShape(16))
        chosen = choose(ChooseRequest(LARGER, facts, host, spare, 2, shapes))
        best = min(candidates, key=step_us)
        assert chosen.options == best and f"{step_us(best) / 1e3:.2f} ms a step predicted" in chosen.reasons[0]
        found.append(best["executor"])
    assert found == ["threaded", "cooperative"]


def test_plain_facts_of_a_spec() -> None:
    model = synthetic_model(2, (("norm", (64,)), ("proj", (64, 32))), vocab_size=100)
    facts = plain_facts(model, 2)
    assert facts.replicated == ("layers.0.proj", "layers.1.proj") and facts.num_layers == 2
    assert facts.weight("embed").rows == "none" and facts.weight("layers.0.norm").rows == "none"


def test_plain_facts_leave_alone_what_the_model_keeps() -> None:
    model = synthetic_model(2, (("norm", (64,)), ("proj", (64, 32))))
    model = replace(model, kept=(KeptWeight("layers.1.proj", "rewritten after loading"),))
    facts = plain_facts(model, 2)
    assert facts.replicated == ("layers.0.proj",)
    assert facts.weight("layers.1.proj").reason == "rewritten after loading"
