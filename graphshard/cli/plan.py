"""`graphshard plan`: is sharding worth it, what to shard, and what will it cost, before a server is started."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graphshard.cli.common import COUNT, Output, Size, answering, check_writable
from graphshard.cli.counts import Counts
from graphshard.cli.planning import transport_option
from graphshard.core.errors import SpecError
from graphshard.core.specs import StepShape
from graphshard.cost.deployment import Deployment
from graphshard.cost.dual import Mode
from graphshard.cost.segments import DEFAULT_CONTEXT_TOKENS

if TYPE_CHECKING:
    from graphshard.cli.plan_work import PlanAsk, PlanWork

DEFAULT_TOKENS = (8, 16, 32, 64, 128, 256, 512, 1024)

JSON_HELP = """JSON keys. `rows` is the frontier: {freed_bytes, exposed_us, sharded_bytes, gather_us, units,
prefetch_depth, num_units, num_slots, slot_bytes}. `part_bytes` {kda, mla, moe_periphery, ..., total} and
`part_layers`: what all ranks hold alike; `periphery_bf16_bytes` and `periphery_bf16_bytes_per_layer`. `full` (all of
it sharded) and `plan` (the recommended one): {gross_bytes, freed_before_slots_bytes, slots_bytes, num_slots,
num_units, largest_unit_bytes, freed_bytes, used_bytes, kv_tokens, ...}; `ledger` has each line of both. `fit` {fits,
used_bytes, memory_bytes, routed_expert_bytes, least_ep}. `recommendation` {answer: full|partial|none|target, reasons,
hides_from_tokens_per_rank, hides_between_tokens_per_rank [least, most] by published figures, units, prefetch_depth,
include, exposed_us (mean over the step shapes), exposed_us_by_shape, bound_us, rejected: [{setup, reason}]}.
`by_step_shape`: step_us (replicated), full_exposed_us, hidden_freed_bytes, plan_us, plan_exposed_us, graph_nodes, ...
`dual`: for each block {block, times, crossovers: [{first, second, tokens_per_group}]}: from so many tokens of all
ranks on, `second` is no slower than `first`; null: never. Sizes are bytes of one rank.

Exit code 1: nothing is worth sharding."""


@click.command("plan", epilog=JSON_HELP)
@click.argument("source", metavar="kimi-k3|FOLDER|CONFIG.JSON")
@click.option("--draft", type=click.Path(path_type=Path), help="Folder or config.json of a draft model.")
@click.option("--world-size", type=int, default=8, show_default=True, help="Ranks that share one copy.")
@click.option("--hardware", "machine", default="b200", show_default=True, help="A name, or a file of `calibrate`.")
@click.option(
    "--weights",
    type=click.Choice(["config", "bf16", "fp8"]),
    default="config",
    show_default=True,
    help="What weights are stored as.",
)
@click.option(
    "--kv-cache",
    type=click.Choice(["bf16", "fp8"]),
    default="bf16",
    show_default=True,
    help="What keys and values are stored as.",
)
@click.option("--attention-dp", type=int, help="Ranks with requests of their own; default: world size / tp.")
@click.option("--tp", type=int, default=1, show_default=True, help="Ranks over which dense weights are cut.")
@click.option("--ep", type=int, help="Ranks over which routed experts are spread; default: the world size.")
@click.option("--include", multiple=True, help="Pattern of weights to shard, in place of all that ranks hold alike.")
@click.option("--exclude", multiple=True, help="Pattern of weights that stay resident.")
@click.option("--free", type=Size(), help="Free so much on each rank, net of slots.")
@click.option("--memory-limit", type=Size(), help="Of a rank's chunks, slots and resident weights.")
@click.option("--kv-tokens", type=COUNT, help="Cached tokens to have room for on each rank.")
@click.option("--context", type=COUNT, default=DEFAULT_CONTEXT_TOKENS, show_default=True, help="Tokens of a request.")
@click.option("--tokens-per-rank", type=Counts(), help="Step shapes of one sequence of so many tokens. [8,16,...,1024]")
@click.option("--capture-sizes", type=Counts(), help="Step shapes of so many sequences, a token each.")
@transport_option
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the step's lanes, frontier, and time by tokens.")
@answering
def command(out: Output, plot: Path | None, **options: Any) -> bool:
    """Plan for a model from its config alone: no weights, no GPU.

    Says what all ranks hold alike, what a plan frees and exposes at each step shape, which plan to take and why the
    others lost, and from how many tokens on computing in slices stops to pay.
    """
    from graphshard.cli.plan_report import frontier_rows, plan_json, say_plan
    from graphshard.cli.plan_work import PlanWork

    if plot is not None:
        check_writable("--plot", plot)
    work = PlanWork(_ask(options))
    say_plan(out, work)
    if plot is not None:
        _draw(work, plot)
        out.say(f"picture: {plot}")
    out.emit(frontier_rows(work.front.points) if work.is_shardable else [], **plan_json(work))
    return work.residency is not None


def _ask(options: dict[str, Any]) -> PlanAsk:
    """The options as `PlanAsk`."""
    from graphshard.cli.plan_work import PlanAsk
    from graphshard.cost.hardware_file import named_hardware

    targets = ("free", "memory_limit", "kv_tokens")
    given = [f"--{name.replace('_', '-')}" for name in targets if options[name] is not None]
    if len(given) > 1:
        raise SpecError(f"{' and '.join(given)} are targets of one plan: give one of them")
    deployment = Deployment(
        world_size=options["world_size"],
        attention_dp=options["attention_dp"],
        tp=options["tp"],
        ep=options["ep"],
        include=options["include"],
        exclude=options["exclude"],
        weights=options["weights"],
        kv_cache=options["kv_cache"],
    )
    return PlanAsk(
        source=options["source"],
        draft=options["draft"],
        deployment=deployment,
        hardware=named_hardware(options["machine"]),
        step_shapes=_shapes(options["tokens_per_rank"], options["capture_sizes"]),
        transport=options["transport"],
        context_tokens=options["context"],
        free_bytes=options["free"],
        memory_limit_bytes=options["memory_limit"],
        kv_tokens=options["kv_tokens"],
    )


def _shapes(tokens_per_rank: list[int] | None, capture_sizes: list[int] | None) -> tuple[StepShape, ...]:
    shapes = [StepShape(1, tokens) for tokens in tokens_per_rank or ()]
    shapes += [StepShape(size) for size in capture_sizes or ()]
    return tuple(sorted(set(shapes))) or tuple(StepShape(1, tokens) for tokens in DEFAULT_TOKENS)


def _draw(work: PlanWork, path: Path) -> None:
    from graphshard.report.frontier import Curve, PlanPicture, draw_plan

    tables = work.dual_tables()[:1]
    chosen = None
    if work.residency is not None:
        outcome = work.residency.outcome
        chosen = (outcome.freed_bytes, work.mean_us(outcome.exposed_by_shape))
    shape, prediction = work.ask.step_shapes[0], work.predictions[0]
    modes: tuple[Mode, ...] = ("replicated", "gather", "tensor_parallel")
    curves = [
        Curve(mode, [row.tokens_per_group for row in table.rows], [row.us(mode) for row in table.rows])
        for table in tables
        for mode in modes
    ]
    picture = PlanPicture(
        title=f"{work.model.spec.name}, {work.world_size} ranks of {work.ask.hardware.name}",
        step=prediction.timeline,
        step_title=f"predicted step {shape}: {prediction.duration_us / 1e3:,.2f} ms",
        frontier=[(one.freed_bytes, one.exposed_us) for one in work.front.points] if work.is_shardable else [],
        chosen=chosen,
        curves=curves,
        curves_title=f"{tables[0].block.role} of a layer, three ways" if tables else "",
        crossings=[
            (f"{second} no slower than {first} from {tokens:,}", tokens)
            for table in tables
            for first, second, tokens in table.crossovers
            if tokens is not None
        ],
    )
    draw_plan(picture, path)
