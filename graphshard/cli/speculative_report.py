"""What `generate --speculative` answers, from what its ranks made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from graphshard.bench.stats import summarize
from graphshard.cli.common import Output
from graphshard.cli.generate_job import RankStory
from graphshard.cli.generate_report import lost_of
from graphshard.cli.speculative_draft import DraftChoice
from graphshard.models.speculative.acceptance import acceptance_length
from graphshard.models.speculative.compare import NEAR_TIE, Difference

BY_PROMPT = ("tokens_reference", "tokens_plain", "gained")
MAX_SHOWN = 8
"""Differences that are shown one by one; JSON has all."""


def rows_of(stories: Sequence[RankStory], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`rows` of prompts with what the other ways of decoding gave; None where a prompt was lost."""
    found: dict[int, dict[str, Any]] = {}
    for batch in _batches(stories):
        for place, number in enumerate(batch["prompts"]):
            one = {key: batch[key][place] for key in BY_PROMPT}
            found[number] = {**one, "acceptance_length": acceptance_length(one["gained"])}
    nothing = dict.fromkeys((*BY_PROMPT, "acceptance_length"))
    return [{**row, **found.get(row["prompt_index"], nothing)} for row in rows]


def answer_of(stories: Sequence[RankStory], rows: Sequence[dict[str, Any]], order: Sequence[int]) -> dict[str, Any]:
    """What is said of the whole job; `rows` as `rows_of` makes them."""
    done = [story.done for story in stories if story.batches is not None]
    batches = _batches(stories)
    made = [row for row in rows if row["tokens"] is not None]
    differing = [Difference(**one) for batch in batches for one in batch["differences"]]
    exchange_s = [seconds for one in done for seconds in one["exchange_s"]]
    step_s = [seconds for batch in batches for seconds in batch["step_s"]]
    return {
        "tokens": [row["tokens"] for row in rows],
        "tokens_reference": [row["tokens_reference"] for row in rows],
        "acceptance_length": acceptance_length([count for row in made for count in row["gained"]]),
        "differences_from_reference": [row["prompt_index"] for row in made if row["tokens"] != row["tokens_reference"]],
        "differences_from_plain": {
            "count": len(differing),
            "num_compared": sum(len(row["tokens"]) for row in made),
            "all_near_ties": all(one.is_near_tie for one in differing),
            "near_tie": NEAR_TIE,
            "positions": [_position(one) for one in differing],
        },
        "num_steps": {
            "speculative": _most_steps(done, "num_steps"),
            "reference": _most_steps(done, "num_steps_reference"),
        },
        "num_idle": [one["num_idle"] for one in done],
        "replays": done[0]["replays"] if done else None,
        "prefetches": [one["prefetches"] for one in done],
        "exchange_us": summary_of([seconds * 1e6 for seconds in exchange_s]),
        "step_ms": summary_of([seconds * 1e3 for seconds in step_s]),
        "plan": done[0]["plan"] if done else None,
        "lost": lost_of(stories, rows),
        "order": list(order),
    }


def is_right(answer: dict[str, Any]) -> bool:
    """Whether the exit code is 0."""
    plain = answer["differences_from_plain"]["all_near_ties"]
    return plain and not answer["differences_from_reference"] and not answer["lost"]


def summary_of(samples: Sequence[float]) -> dict[str, float] | None:
    """None of no samples."""
    if not samples:
        return None
    one = summarize(samples)
    return {"median": one.median, "p10": one.p10, "p90": one.p90, "n": one.n}


def show_draft(out: Output, draft: DraftChoice) -> None:
    """Say which draft it is, and why."""
    out.say(f"draft: {draft.what}")
    for reason in draft.reasons:
        out.say(f"  why: {reason}")


def show_answer(out: Output, answer: dict[str, Any], block: int, num_tokens: int) -> None:
    """Say how far the draft's guesses went, and whether the tokens are right."""
    steps, replays = answer["num_steps"], answer["replays"]
    if replays is not None:
        out.say(
            f"acceptance length {answer['acceptance_length']:.2f} of at most {block}: {steps['speculative']} steps, "
            f"where one token a step takes {steps['reference']}, for {num_tokens} tokens of each prompt"
        )
        folds = ", then the fold" if replays["fold"] else ""
        out.say(f"a step replays the draft {_times(replays['draft'])}, the target once{folds}{_step_text(answer)}")
    if answer["exchange_us"] is not None:
        us = answer["exchange_us"]
        out.say(
            f"ranks agree before each step: {us['median']:.0f} us (p90 {us['p90']:.0f}), waiting for the last included"
        )
    _show_differences(out, answer)
    for one in answer["lost"]:
        out.say(f"LOST with rank {one['rank']}: prompts {' '.join(map(str, one['prompt_indices']))}")


def _show_differences(out: Output, answer: dict[str, Any]) -> None:
    wrong, plain = answer["differences_from_reference"], answer["differences_from_plain"]
    if wrong:
        out.say(f"tokens DIFFER from the reference's: prompts {' '.join(map(str, wrong))}")
    else:
        out.say("tokens are the reference's (the same steps, a token each)")
    if not plain["count"]:
        out.say(f"plain decoding, a sequence and a token at a time, chooses the same {plain['num_compared']} tokens")
        return
    kind = f"all where two are within {NEAR_TIE:g}" if plain["all_near_ties"] else "NOT only where two are nearly equal"
    out.say(f"plain decoding chooses another token at {plain['count']} of {plain['num_compared']} places, {kind}:")
    for one in plain["positions"][:MAX_SHOWN]:
        out.say(
            f"  prompt {one['prompt_index']}, token {one['index']}: {one['token']}, plainly {one['plain_token']} "
            f"by {one['gap']:.2g}"
        )


def _position(one: Difference) -> dict[str, Any]:
    told = asdict(one)
    return {"prompt_index": told.pop("sequence"), **told}


def _batches(stories: Sequence[RankStory]) -> list[dict[str, Any]]:
    return [batch for story in stories for batch in story.batches or ()]


def _most_steps(done: Iterable[dict[str, Any]], key: str) -> int:
    """Of the rank with the most; where ranks step together, all have taken part in as many."""
    return max((sum(batch[key] for batch in one["batches"]) for one in done), default=0)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _step_text(answer: dict[str, Any]) -> str:
    return f"; {answer['step_ms']['median']:.3g} ms" if answer["step_ms"] is not None else ""
