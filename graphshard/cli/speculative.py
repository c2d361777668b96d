"""The command's side of `generate --speculative`: checks the pair, starts ranks, says what came out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from graphshard.cli.common import Output
from graphshard.cli.generate_job import GenerateJob
from graphshard.cli.generate_screen import Screen, say_first
from graphshard.cli.generate_sizes import sizes_of
from graphshard.cli.prompts import Codec
from graphshard.cli.speculative_draft import DraftAsked, DraftChoice, chosen_draft
from graphshard.cli.speculative_report import answer_of, is_right, rows_of, show_answer, show_draft
from graphshard.comm.launch import failure_text, raise_first_failure

ENTRY = "graphshard.cli.speculative_rank:generate"
RUN_TIMEOUT_S = 1800.0

JSON_HELP = """With --speculative `rows` have tokens_reference, tokens_plain (what plain decoding chooses behind the
same text), gained (tokens of each step) and acceptance_length too, and the other keys are `tokens`, `tokens_reference`,
`acceptance_length`, `differences_from_reference` (prompts), `differences_from_plain` {count, num_compared,
all_near_ties, near_tie, positions [{prompt_index, index, token, plain_token, gap}]}, `num_steps` {speculative,
reference}, `num_idle` and `prefetches` [by rank], `replays` {draft, target, fold} of one step, `exchange_us`
{median, p10, p90, n} of ranks that agree before a step, or null, `step_ms`, `plan` {target, draft}, `draft` {what,
layers, block, reasons}, `lost`, `order`, `model, world_size, run, num_tokens, batch_size, cache_length`."""


def generate_speculatively(
    out: Output,
    folder: Path,
    texts: list[str],
    world_size: int,
    batch_size: int,
    asked: DraftAsked,
    request: dict[str, Any],
) -> bool:
    """Generate from `texts` with a draft; `request` holds what does not depend on it. Whether the tokens are right."""
    with chosen_draft(folder, asked) as draft:
        sizes = sizes_of(folder, texts, request["num_tokens"], world_size, batch_size, draft.block)
        request = {**request, **draft.request(), **sizes}
        _check_pair(folder, request)
        return _run(out, folder, texts, world_size, draft, request)


def _check_pair(folder: Path, request: dict[str, Any]) -> None:
    """SpecError or LoadError, before ranks are started, if model and draft do not belong together."""
    if request["draft"] is None:
        return  # the model's own layers do
    from graphshard.models.speculative.open import open_pair  # imports torch

    pair = {key: request[key] for key in ("draft", "draft_layers", "block", "cache_length")}
    open_pair(folder, max_batch_size=request["batch_size"], **pair)


def _run(
    out: Output, folder: Path, texts: list[str], world_size: int, draft: DraftChoice, request: dict[str, Any]
) -> bool:
    say_first(out, folder, len(texts), world_size, request["batch_size"])
    show_draft(out, draft)
    screen = Screen(out, Codec(folder), texts, world_size)
    with GenerateJob(request, world_size, restart=False, timeout_s=RUN_TIMEOUT_S, entry=ENTRY) as job:
        screen.follow(job)
        job.run()
        screen.finish()
        results = job.end()
    if out.debug and (failures := failure_text(results)):
        out.say(failures)
    if not any(story.batches is not None for story in job.stories):
        raise_first_failure(results)
    rows = rows_of(job.stories, screen.rows(job.stories))
    answer = answer_of(job.stories, rows, job.order)
    show_answer(out, answer, draft.block, request["num_tokens"])
    keys = ("run", "num_tokens", "batch_size", "cache_length")
    facts = {"model": folder.name, "world_size": world_size, **{key: request[key] for key in keys}}
    out.emit(rows, **facts, **answer, draft=draft.told())
    return is_right(answer)
