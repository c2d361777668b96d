"""What `graphshard plan` says: tables for people, one JSON object for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphshard.cli.common import Output
from graphshard.cli.plan_work import DualTable, Fit, Planned, PlanWork
from graphshard.core.sizes import BYTE_UNITS, format_bytes
from graphshard.cost.problem import Outcome
from graphshard.report.tables import table_of

MAX_FRONTIER_ROWS = 12
"""On the terminal; JSON has them all."""
GIB = BYTE_UNITS["GiB"]


def say_plan(out: Output, work: PlanWork) -> None:
    """Everything, for people. A target that cannot be reached is an error before anything is said."""
    fit, advice = fit_text(work.fit(work.chosen), work), advice_lines(work)
    ask, deployment = work.ask, work.ask.deployment
    out.say(
        f"{work.model.spec.name} on {deployment.world_size} ranks of {ask.hardware} (attention_dp "
        f"{deployment.attention_dp}, tp {deployment.tp}, ep {deployment.ep}, weights {deployment.weights})"
    )
    for note in work.model.facts.notes:
        out.say(f"  note: {note}")
    out.say()
    rows = [
        {"part": one.part, "layers": one.num_layers, "num_bytes": one.num_bytes, "gib": one.num_bytes / GIB}
        for one in work.parts
    ]
    total = sum(one.num_bytes for one in work.parts)
    rows.append({"part": "total", "layers": None, "num_bytes": total, "gib": total / GIB})
    out.say(table_of(rows, {"part": "held alike by all ranks", "layers": "layers", "gib": "GiB"}))
    _say_ledger(out, work)
    out.say(fit)
    out.say()
    for line in advice:
        out.say(line)
    if ask.hardware.kind == "host":
        out.say("on a host gathers take cores from compute, so little hides: go by the steps predicted for this plan")
    if work.is_shardable:
        _say_frontier(out, work)
        _say_by_shape(out, work)
    for table in work.dual_tables():
        _say_dual(out, table)


def fit_text(fit: Fit, work: PlanWork) -> str:
    """Whether a rank holds what it is to hold; if not, with how many expert ranks it would."""
    used, memory = format_bytes(fit.used_bytes), format_bytes(fit.memory_bytes)
    if fit.fits:
        return f"fits: {used} of {memory} are used before any request"
    text = f"does NOT fit: {used} are needed before any request, {work.ask.hardware.name} has {memory}"
    if not fit.routed_bytes:
        return text
    ep = work.ask.deployment.ep
    experts = f"; {format_bytes(fit.routed_bytes)} of them are routed experts at ep {ep}"
    if fit.least_ep is None:
        return f"{text}{experts}, and no ep makes room"
    return f"{text}{experts}: the least ep that fits is --ep {fit.least_ep}"


def advice_lines(work: PlanWork) -> list[str]:
    """The recommendation with its reasons, and why each other setup lost."""
    if not work.is_shardable:
        return [
            "recommended: none",
            f"nothing of {work.model.spec.name} is held alike by all ranks under this deployment: {_why_nothing(work)}",
        ]
    lines = []
    if work.target_bytes is None:
        lines += work.advice.lines()
    else:
        lines.append(f"to free on each rank: {format_bytes(work.target_bytes)}")
        if work.target_bytes <= 0:
            lines.append("recommended: none; it is met with every weight resident")
    if work.residency is not None:
        lines += [f"  {line}" for line in work.residency.lines()]
    return lines


def _why_nothing(work: PlanWork) -> str:
    reasons: dict[str, int] = {}
    for fact in work.model.facts.weights:
        reasons[fact.reason] = reasons.get(fact.reason, 0) + work.model.spec.weight(fact.weight).num_bytes
    return max(reasons, key=lambda reason: reasons[reason], default="it has no weights")


def _say_ledger(out: Output, work: PlanWork) -> None:
    columns = {"line": "a rank's memory", "full": "all sharded", "chosen": "this plan", "formula": "="}
    rows = [
        {"line": one.line, "full": one.text, "chosen": other.text, "formula": one.formula}
        for one, other in zip(work.full.ledger.rows(), work.chosen.ledger.rows(), strict=True)
    ]
    out.say()
    out.say(table_of(rows, columns))
    out.say()


def _say_frontier(out: Output, work: PlanWork) -> None:
    points = work.front.points
    most = points[-1].freed_bytes
    wanted = [most * i // (MAX_FRONTIER_ROWS - 1) for i in range(MAX_FRONTIER_ROWS)]
    shown = list(dict.fromkeys(next(one for one in points if one.freed_bytes >= size) for size in wanted))
    columns = {
        "freed_gib": "GiB freed",
        "exposed_ms": "ms exposed",
        "share": "of the step",
        "how": "units/depth",
        "num_units": "units",
        "num_slots": "slots",
    }
    rows = [
        {
            **frontier_row(one),
            "freed_gib": one.freed_bytes / GIB,
            "exposed_ms": one.exposed_us / 1e3,
            "share": f"{one.exposed_us / _mean_step_us(work):.1%}",
            "how": f"{one.setup.units}/{one.setup.prefetch_depth}",
        }
        for one in shown
    ]
    out.say()
    title = f"frontier, {len(shown)} of {len(points)} points (exposed: the mean over the step shapes)"
    if work.target_bytes is None and len(work.ask.step_shapes) > 1:
        title += f"; the recommended plan is sought at {work.advice.hardest} alone, where hiding is hardest"
    out.say(table_of(rows, columns, title))


def _say_by_shape(out: Output, work: PlanWork) -> None:
    rows = [
        {
            "shape": row["step_shape"],
            "step_ms": row["step_us"] / 1e3,
            "full": row["full_exposed_us"] / 1e3,
            "hidden": row["hidden_freed_bytes"] / GIB,
            "plan": prediction.duration_us / 1e3,
            "exposed": prediction.total_exposed_us / 1e3,
        }
        for row, prediction in zip(work.hidden_by_shape(), work.predictions, strict=True)
    ]
    columns = {
        "shape": "step shape",
        "step_ms": "ms a step, replicated",
        "full": "a full gather exposes",
        "hidden": "GiB that hide",
        "plan": "ms a step, this plan",
        "exposed": "exposed",
    }
    out.say()
    title = (
        "by step shape (sequences x tokens of one rank); exposed: compute waits. It is slower beside gathers, too, "
        "which hides more of them than the search above counts"
    )
    out.say(table_of(rows, columns, title))


def _say_dual(out: Output, table: DualTable) -> None:
    columns = {
        "tokens_per_group": "tokens of all ranks",
        "replicated_us": "us replicated",
        "gather_us": "gathered",
        "tensor_parallel_us": "in slices",
        "best": "best",
    }
    out.say()
    out.say(table_of(_dual_rows(table), columns, f"{table.block.name}, one of {table.block.layers} layers, three ways"))
    for first, second, tokens in table.crossovers:
        where = "never" if tokens is None else f"from {tokens:,} tokens of all ranks on"
        out.say(f"{second} is no slower than {first}: {where}")


def plan_json(work: PlanWork) -> dict[str, Any]:
    """Keys as `cli.plan.JSON_HELP` lists them, without `rows`."""
    bf16, bf16_layer = work.periphery_bf16_bytes
    totals: dict[str, Any] = {"kda": 0, "mla": 0, "moe_periphery": 0}
    totals |= {one.part: one.num_bytes for one in work.parts}
    totals["total"] = sum(one.num_bytes for one in work.parts)
    fit = work.fit(work.chosen)
    return {
        "model": work.model.spec.name,
        "hardware": work.ask.hardware.name,
        "world_size": work.world_size,
        "step_shapes": [str(shape) for shape in work.ask.step_shapes],
        "part_bytes": totals,
        "part_layers": {one.part: one.num_layers for one in work.parts},
        "periphery_bf16_bytes": bf16,
        "periphery_bf16_bytes_per_layer": bf16_layer,
        "full": _planned_json(work, work.full),
        "plan": _planned_json(work, work.chosen),
        "ledger": {
            "full": {one.line: one.value for one in work.full.ledger.rows()},
            "plan": {one.line: one.value for one in work.chosen.ledger.rows()},
        },
        "fit": {
            "fits": fit.fits,
            "used_bytes": fit.used_bytes,
            "memory_bytes": fit.memory_bytes,
            "routed_expert_bytes": fit.routed_bytes,
            "least_ep": fit.least_ep,
        },
        "recommendation": recommendation_json(work),
        "by_step_shape": _by_shape_json(work) if work.is_shardable else [],
        "dual": [_dual_json(table) for table in work.dual_tables()],
        "notes": list(work.model.facts.notes),
    }


def recommendation_json(work: PlanWork) -> dict[str, Any]:
    """The answer, its reasons, the plan's options and who lost."""
    residency = work.residency
    found: dict[str, Any] = {"answer": "none", "reasons": advice_lines(work), "target_bytes": None}
    if work.is_shardable:
        found["target_bytes"] = work.target_bytes
        if work.target_bytes is None:
            found["answer"] = work.advice.answer
        elif residency is not None:
            found["answer"] = "target"
        full = work.advice.full
        found["hides_from_tokens_per_rank"] = work.advice.hides_from
        found["hides_between_tokens_per_rank"] = work.advice.hides_between
        found["full_exposed_us"], found["full_gather_us"] = full.exposed_us, full.gather_us
        found["mean_step_us"] = _mean_step_us(work)
    if residency is not None:
        found |= {
            "include": list(residency.include),
            "bound_us": residency.bound_us,
            "is_exact": residency.is_exact,
            **frontier_row(residency.outcome),
            "exposed_us": work.mean_us(residency.outcome.exposed_by_shape),
            "exposed_us_by_shape": list(residency.outcome.exposed_by_shape),
            "rejected": [{"setup": str(one.setup), "reason": one.reason} for one in residency.rejected],
        }
    return found


def frontier_row(one: Outcome) -> dict[str, Any]:
    """A point as a row."""
    return {
        "freed_bytes": one.freed_bytes,
        "exposed_us": one.exposed_us,
        "sharded_bytes": one.sharded_bytes,
        "gather_us": one.gather_us,
        "units": one.setup.units,
        "prefetch_depth": one.setup.prefetch_depth,
        "num_units": one.num_units,
        "num_slots": one.num_slots,
        "slot_bytes": one.slot_bytes,
    }


def _planned_json(work: PlanWork, planned: Planned) -> dict[str, Any]:
    ledger, layout = planned.ledger, planned.layout
    return {
        "units": planned.plan.unit_policy,
        "prefetch_depth": planned.plan.prefetch_depth,
        "gross_bytes": ledger.gross_bytes,
        "freed_before_slots_bytes": ledger.net_of_ranks_bytes,
        "slots_bytes": ledger.slot_bytes,
        "draft_slots_bytes": ledger.draft_slot_bytes,
        "num_slots": len(layout.slots),
        "num_units": len(layout.units),
        "largest_unit_bytes": max((unit.num_bytes for unit in layout.units), default=0),
        "freed_bytes": ledger.freed_bytes,
        "used_bytes": ledger.used_bytes,
        "kv_tokens": ledger.kv_tokens,
        "kv_tokens_gained": ledger.kv_tokens_gained,
        "sequences_gained": ledger.sequences_gained,
    }


def _by_shape_json(work: PlanWork) -> list[dict[str, Any]]:
    return [
        {
            **row,
            "plan_us": one.duration_us,
            "plan_exposed_us": one.total_exposed_us,
            "plan_exposed_us_by_unit": dict(one.exposed_us),
            "peak_slot_bytes": one.peak_slot_bytes,
            "graph_nodes": one.num_nodes,
            "launch_us": one.launch_us,
        }
        for row, one in zip(work.hidden_by_shape(), work.predictions, strict=True)
    ]


def _dual_json(table: DualTable) -> dict[str, Any]:
    block = table.block
    return {
        "block": block.name,
        "role": block.role,
        "layers": block.layers,
        "num_bytes": block.num_bytes,
        "times": _dual_rows(table),
        "crossovers": [
            {"first": first, "second": second, "tokens_per_group": tokens} for first, second, tokens in table.crossovers
        ],
    }


def _dual_rows(table: DualTable) -> list[dict[str, Any]]:
    names = ("tokens_per_group", "replicated_us", "gather_us", "tensor_parallel_us", "best")
    return [{name: getattr(row, name) for name in names} for row in table.rows]


def _mean_step_us(work: PlanWork) -> float:
    return work.mean_us([times.total_us for times in work.front.search.problem.times])


def frontier_rows(points: Sequence[Outcome]) -> list[dict[str, Any]]:
    """JSON's `rows`."""
    return [frontier_row(one) for one in points]
