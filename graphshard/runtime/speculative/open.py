"""How a speculation is made: the one collective call before its steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from graphshard.comm.rejoin import Newcomer
from graphshard.core.errors import SpecError
from graphshard.runtime.folding import RunMode
from graphshard.runtime.runtime import Runtime
from graphshard.runtime.speculative.agreement import compare_rows
from graphshard.runtime.speculative.speculation import Speculation, whole_group


def speculate(
    target: Runtime,
    draft: Runtime | None = None,
    *,
    draft_tokens: Sequence[int] | None = None,
    num_draft_replays: int = 1,
    run: RunMode = "graph",
) -> Speculation:
    """Step `target` and `draft` together: make the sequences of their steps, verify them, compare them over ranks.

    Collective, under both transports; a rank that came back (`rejoin_group`, pull) calls it alone. Nothing runs.

    Args:
        target: verifies. Compiled with step shapes `batch_size x block`.
        draft: proposes; a second `graphshard.compile` over the same group, with head "outside" if its first unit is to
            be gathered under the target's fold. None: nothing is proposed, the step is `verify` and `commit`.
        draft_tokens: the tokens per sequence of each draft replay of a step, in order: `(2, 1, 1)` for a draft that
            proposes one token a replay. None: as many as the target's, `num_draft_replays` times: a block at once.
        num_draft_replays: how often the draft runs in each step, on every rank, whatever tokens it finds.
        run: "graph" replays captured steps, "eager" runs them. The same on all ranks under transport nccl.

    Returns:
        The speculation, which owns both runtimes from now on: its `close` closes them.

    Raises:
        SpecError: no step shape of the target goes with step shapes of the draft, or settings contradict each other;
            or this is not given runtimes, on the rank that does so.
        ProgramError: the verifier found that a sequence, or two that follow each other, would race.
        CommError: ranks differ, naming the first difference: the setting, or the op of the sequence. On every rank.
    """
    for name, given in (("target", target), ("draft", draft)):
        if not isinstance(given, Runtime) and not (name == "draft" and given is None):
            raise SpecError(f"{name} is of type {type(given).__name__}: give what graphshard.compile returned")
    if isinstance(target.group, Newcomer):
        return Speculation(target, draft, _checked_tokens(draft, draft_tokens, num_draft_replays), run)
    group = whole_group(target)
    try:
        tokens = partial(_checked_tokens, draft, draft_tokens, num_draft_replays)
        speculation = group.agree("speculation", lambda: Speculation(target, draft, tokens(), run, group))
        rows, texts = speculation.certificate()
        compare_rows(group, "speculation", rows, texts)
    except BaseException:
        group.close()
        raise
    return speculation


def _checked_tokens(draft: Runtime | None, draft_tokens: Sequence[int] | None, num_draft_replays: int) -> list[int]:
    """Of each draft replay the tokens per sequence; 0: as many as the target's."""
    if draft is None:
        if draft_tokens is not None:
            raise SpecError(f"draft_tokens={list(draft_tokens)} without a draft: give one, or leave them out")
        if num_draft_replays != 1:
            raise SpecError(f"num_draft_replays={num_draft_replays} without a draft: give one, or leave it out")
        return []
    if num_draft_replays < 1:
        raise SpecError(f"num_draft_replays={num_draft_replays}: a draft runs at least once a step; or give draft=None")
    if draft_tokens is None:
        return [0] * num_draft_replays
    if isinstance(draft_tokens, int):
        raise SpecError(f"draft_tokens={draft_tokens}: give a number for each draft replay, as in (2, 1, 1)")
    if not draft_tokens or min(draft_tokens) < 1:
        raise SpecError(f"draft_tokens={list(draft_tokens)}: one number above 0 for each draft replay")
    if num_draft_replays not in (1, len(draft_tokens)):
        raise SpecError(f"draft_tokens={list(draft_tokens)} are not for num_draft_replays={num_draft_replays}")
    return list(draft_tokens)
