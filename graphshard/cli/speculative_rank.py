"""What a rank of `generate --speculative` runs: its prompts with a draft, then again without, then one token a step.

All runtimes are built before the first step, since building needs all ranks; under transport pull nothing after that
waits for another rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from graphshard.bench.decode import step_of
from graphshard.cli.generate_rank import TIMEOUT_S, keep_company, sender, wait_for_order
from graphshard.cli.generate_sizes import dealt
from graphshard.cli.generate_wire import Lines, connect
from graphshard.cli.loading import compile_shown
from graphshard.cli.speculative_decode import Blocks
from graphshard.comm.group import Group
from graphshard.core.specs import StepShape
from graphshard.models.open import OpenedModel, open_model
from graphshard.models.speculative.compare import differences
from graphshard.models.speculative.decoder import SpeculativeDecoder
from graphshard.models.speculative.open import OpenedPair, open_pair
from graphshard.models.speculative.plain import follow
from graphshard.models.speculative.proposers import Proposer
from graphshard.runtime.runtime import Runtime
from graphshard.runtime.speculative import Speculation, speculate

PLAIN = StepShape(1, 1)


@dataclass(frozen=True)
class SpeculativeRequest:
    """What ranks do; the same on all of them."""

    model: str
    draft: str | None
    draft_layers: int | None
    block: int
    prompts: list[list[int]]
    num_tokens: int
    batch_size: int
    cache_length: int
    run: Literal["eager", "graph"]
    choices: dict[str, Any]
    """Of both models' plans."""
    address: str
    """Where the command listens."""
    fault: None = None

    def batches(self, rank: int, world_size: int) -> list[dict[int, list[int]]]:
        """The prompts of a rank, by number."""
        batches = dealt(len(self.prompts), rank, world_size, self.batch_size)
        return [{number: self.prompts[number] for number in numbers} for numbers in batches]

    def num_plain_steps(self, rank: int, world_size: int) -> int:
        """Steps of one token that all of a rank's prompts take."""
        return sum(len(prompt) + self.num_tokens - 1 for prompt in self.prompts[rank::world_size])

    def open(self) -> OpenedPair:
        """Both models."""
        return open_pair(
            self.model,
            draft=self.draft,
            draft_layers=self.draft_layers,
            block=self.block,
            max_batch_size=self.batch_size,
            cache_length=self.cache_length,
        )


@dataclass(frozen=True)
class Made:
    """Everything that steps."""

    speculation: Speculation
    proposer: Proposer
    plain: Runtime
    """The model as it is without a draft, for one sequence."""


def generate(group: Group, values: dict[str, Any]) -> None:
    """`generate --speculative` on one rank. What it made goes to the command at once."""
    request = SpeculativeRequest(**values)
    torch.set_num_threads(1)
    lines = connect(request.address)
    lines.send({"what": "hello", "rank": group.rank})
    with built(group, request) as made:
        lines.send({"what": "ready", "is_newcomer": False})
        batches, facts = decoded(made, group, request, lines)
        lines.send({"what": "done", "batches": batches, **facts})
        wait_for_order(lines)


def decoded(
    made: Made, group: Group, request: SpeculativeRequest, lines: Lines | None = None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """This rank's prompts decoded in all three ways: by batch, and what is said of the whole run.

    With `lines`, tokens of prompt 0 are sent as they come.
    """
    mine = request.batches(group.rank, group.world_size)
    draft = made.speculation.draft
    assert draft is not None
    num_before = draft.num_primes  # each unit was gathered to be checked
    found = _blocks(made, request, made.proposer).run(mine, sender(lines))
    num_prefetches = draft.num_primes - num_before
    made.speculation.discard()
    reference = _blocks(made, request, None).run(mine, sender(None))
    plain = _plain_choices(made.plain, group, request, found.tokens)
    for batch, again in zip(found.batches, reference.batches, strict=True):
        batch["tokens_reference"], batch["num_steps_reference"] = again["tokens"], again["num_steps"]
        batch["tokens_plain"] = [plain[number][0] for number in batch["prompts"]]
        batch["differences"] = [
            asdict(one)
            for number, tokens in zip(batch["prompts"], batch["tokens"], strict=True)
            for one in differences(number, tokens, *plain[number])
        ]
    facts = {
        "exchange_s": found.exchange_s + reference.exchange_s,
        "num_idle": found.num_idle,
        "prefetches": num_prefetches,
        "replays": _replays(made.speculation),
        "plan": _plan_facts(made.speculation.target, draft),
    }
    return found.batches, facts


@contextmanager
def built(group: Group, request: SpeculativeRequest) -> Iterator[Made]:
    """Both models of a step, and the plain one."""
    pair = request.open()
    proposer = pair.proposer(request.batch_size)
    model = Path(request.model)
    plain = open_model(model, 1, request.cache_length)
    with ExitStack() as stack:

        def compiled(opened: OpenedModel, folder: Path, shapes: list[tuple[int, int]], **options: Any) -> Runtime:
            return stack.enter_context(_compiled(group, request, opened, folder, shapes, **options))

        alone = compiled(plain, model, [(1, 1)])
        target = compiled(pair.target, model, [(request.batch_size, pair.block)])
        lender = target if pair.draft.model.spec().borrowed else None
        shapes = list(dict.fromkeys(proposer.shapes))
        # a target whose own rules say what is sharded, however small, has a draft that is cut as finely
        cut = {"min_shard_bytes": 0} if target.model.kept else {}
        draft = compiled(pair.draft, pair.draft_folder, shapes, borrow=lender, head="outside", **cut)
        tokens = [tokens for _, tokens in proposer.shapes]
        speculation = stack.enter_context(speculate(target, draft, draft_tokens=tokens, run=request.run))
        yield Made(speculation, proposer, alone)


def _compiled(
    group: Group,
    request: SpeculativeRequest,
    opened: OpenedModel,
    folder: Path,
    shapes: list[tuple[int, int]],
    **options: Any,
) -> Runtime:
    return compile_shown(
        opened.model,
        group,
        checkpoint=folder,
        recipes=opened.recipes,
        ignore=opened.ignore,
        capture_sizes=shapes,
        timeout_s=TIMEOUT_S,
        **{**options, **request.choices},
    )


def _blocks(made: Made, request: SpeculativeRequest, proposer: Proposer | None) -> Blocks:
    step = made.speculation.graph(request.batch_size, request.block)
    decoder = SpeculativeDecoder(step, proposer, num_positions=request.cache_length)
    return Blocks(made.speculation, decoder, request.num_tokens, skips_draft=proposer is None)


def _plain_choices(
    runtime: Runtime, group: Group, request: SpeculativeRequest, tokens: Mapping[int, list[int]]
) -> dict[int, tuple[list[int], list[float]]]:
    """What plain decoding chooses along this rank's texts, by prompt; then steps for others, where they need any."""
    step = step_of(runtime, PLAIN, request.run)
    found = {number: follow(step, request.prompts[number], made) for number, made in tokens.items()}
    keep_company(runtime, step, [request.num_plain_steps(rank, group.world_size) for rank in range(group.world_size)])
    return found


def _replays(speculation: Speculation) -> dict[str, int]:
    """Of one step, on every rank."""
    has_fold = bool(speculation.target.model.folds)
    return {"draft": speculation.num_draft_replays, "target": 1, "fold": int(has_fold)}


def _plan_facts(target: Runtime, draft: Runtime) -> dict[str, Any]:
    """What was planned of either model."""
    return {
        name: {
            "num_units": len(runtime.plan.units),
            "chunk_bytes": runtime.layout.shard_bytes,
            "slot_bytes": runtime.layout.slot_bytes,
            "resident_bytes": runtime.layout.resident_bytes,
            "head": runtime.plan.head,
            "reasons": list(runtime.plan.reasons),
        }
        for name, runtime in (("target", target), ("draft", draft))
    }
