"""`graphshard generate`: a model generates text on ranks that keep 1/N of its layers each, and that fail alone."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from graphshard.cli.common import COUNT, Output, Size, answering, refuse_given
from graphshard.cli.generate_job import GenerateJob
from graphshard.cli.generate_report import report_of, show_report, summary_of
from graphshard.cli.generate_screen import Screen, say_first
from graphshard.cli.generate_sizes import sizes_of, texts_of
from graphshard.cli.planning import depth_option, transport_option, units_option
from graphshard.cli.prompts import Codec
from graphshard.cli.speculative import JSON_HELP as SPECULATIVE_JSON_HELP
from graphshard.cli.speculative import generate_speculatively
from graphshard.cli.speculative_draft import DraftAsked
from graphshard.comm.launch import failure_text, raise_first_failure
from graphshard.core.errors import SpecError
from graphshard.report.machine import machine_facts

RUN_TIMEOUT_S = 1800.0

JSON_HELP = """JSON keys: `rows` has one row for each prompt {prompt_index, rank, prompt, state, text, tokens, ttft_ms,
reason}: state is done or lost, and reason says why it was lost; `tokens` (by prompt, null if lost); `lost` {rank,
prompt_indices, reason}; `restarts` {rank, reason}; `order` (ranks as they finished); `time_per_token_ms` and `ttft_ms`
{median, p10, p90, p99, n}; `model, world_size, run, num_tokens, batch_size, cache_length`; `report` null or
{identical, units [{unit, name, num_bytes, gather_us, compute_us}], sharded and replicated [by rank: weight_bytes,
chunk_bytes, slot_bytes, resident_bytes, other_bytes, kv_bytes_per_sequence, concurrency, kv_tokens, staged_bytes (of an
update of all weights), kv_tokens_updating, startup_peak_rss_bytes, startup_peak_pss_bytes, pss_bytes,
time_per_token_ms], kv_tokens {sharded, replicated, gained, and each _updating: what fits on every rank}, memory_bytes,
plan}, and `no_report` why there is none."""


class _Fault(click.ParamType[list[Any]]):
    """A signal to a rank before a step, for tests: `SIGKILL:1@3`."""

    name = "signal:rank@step"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[Any]:
        """[signal, rank, step]; anything else is a usage error."""
        if not isinstance(value, str):
            return list(value)
        found = re.fullmatch(r"(SIG[A-Z0-9]+):([0-9]+)@([0-9]+)", value)
        if found is None or found.group(1) not in signal.Signals.__members__:
            self.fail(f"{value!r} is no fault: write SIGKILL:1@3", param, ctx)
        return [found.group(1), int(found.group(2)), int(found.group(3))]


@click.command("generate", epilog=f"{JSON_HELP}\n\n{SPECULATIVE_JSON_HELP}")
@click.option("--model", type=click.Path(path_type=Path), help="Folder of a llama or Kimi K3 instead of SmolLM2-135M.")
@click.option("--world-size", type=COUNT, default=2, show_default=True, help="Rank processes.")
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="Repeat it for more; eight are built in.")
@click.option(
    "--prompts",
    "prompts_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A prompt a line.",
)
@click.option("--tokens", type=COUNT, default=32, show_default=True, help="Tokens to generate for each prompt.")
@click.option("--run", type=click.Choice(["eager", "graph"]), default="graph", show_default=True, help="How steps run.")
@depth_option
@units_option("auto")
@transport_option
@click.option("--batch-size", type=COUNT, default=8, show_default=True, help="At most so many sequences in a step.")
@click.option("--memory", type=Size(), help="What one rank may use; by default an equal part of the machine's.")
@click.option("--report", is_flag=True, help="Measure units, latency, memory, beside the replicated model.")
@click.option("--restart", is_flag=True, help="Start a rank again that was killed; it joins the others.")
@click.option("--speculative", is_flag=True, help="Decode by blocks that a draft proposes; compare with doing without.")
@click.option("--draft", metavar="FOLDER|random", help="A DFlash or a llama; else a llama's own first layers.")
@click.option("--draft-layers", type=COUNT, help="So many of them.  [default: 7 of 8]")
@click.option("--block", type=click.IntRange(min=2), help="Tokens that a step verifies.  [default: the draft's, or 4]")
@click.option("--fault", type=_Fault(), hidden=True, help="SIGNAL:RANK@STEP: a test's.")
@answering
def command(
    out: Output,
    model: Path | None,
    world_size: int,
    prompts: tuple[str, ...],
    prompts_file: Path | None,
    tokens: int,
    run: str,
    prefetch_depth: int | str,
    units: str,
    transport: str,
    batch_size: int,
    **more: Any,
) -> bool:
    """Generate greedily on rank processes; prompts are dealt to them in turn, and each rank decodes its own.

    Rank 0's first prompt is shown while it is generated. A rank that dies takes its own prompts with it and no others;
    a stopped one delays nobody (transport nccl: both end all ranks). Exit code 1: prompts were lost, or a bit differs;
    with --speculative, a token differs from the same steps' without a draft, or from plain decoding's where no two
    tokens are nearly equal.
    """
    kind = _Kind(**more)
    kind.check(world_size, transport)
    folder = model or _smollm2()
    texts = texts_of(prompts, prompts_file)
    request = {
        "model": str(folder),
        "num_tokens": tokens,
        "run": run,
        "choices": {"units": units, "prefetch_depth": prefetch_depth, "transport": transport},
        "fault": kind.fault,
    }
    if kind.speculative:
        asked = DraftAsked(kind.draft, kind.draft_layers, kind.block)
        return generate_speculatively(out, folder, texts, world_size, batch_size, asked, request)
    sizes = sizes_of(folder, texts, tokens, world_size, batch_size)
    return _generate(out, folder, texts, world_size, kind, {**request, "report": kind.report, **sizes})


@dataclass(frozen=True)
class _Kind:
    """What is done besides generating; the options' values."""

    memory: int | None
    report: bool
    restart: bool
    speculative: bool
    draft: str | None
    draft_layers: int | None
    block: int | None
    fault: list[Any] | None

    def check(self, world_size: int, transport: str) -> None:
        """A usage error, or SpecError, if options contradict each other."""
        if self.speculative:
            refuse_given(("report", "memory", "restart", "fault"), "not with --speculative; leave one out")
            if self.draft is not None and self.draft_layers is not None:
                raise click.UsageError("--draft and --draft-layers are two drafts: give one")
        else:
            refuse_given(("draft", "draft_layers", "block"), "these are for --speculative: give both, or neither")
        if self.restart:
            _check_restart(world_size, transport)
        if self.memory is not None and not self.report:
            raise click.UsageError("--memory is what --report counts with: give both, or neither")


def _generate(
    out: Output, folder: Path, texts: list[str], world_size: int, kind: _Kind, request: dict[str, Any]
) -> bool:
    screen = Screen(out, Codec(folder), texts, world_size)
    say_first(out, folder, len(texts), world_size, request["batch_size"])
    with GenerateJob(request, world_size, restart=kind.restart, timeout_s=RUN_TIMEOUT_S) as job:
        screen.follow(job)
        job.run()
        screen.finish()
        no_report = job.run_report() if kind.report else "not asked for"
        results = job.end()
    if out.debug and (failures := failure_text(results)):
        out.say(failures)
    if not any(story.batches is not None for story in job.stories):
        raise_first_failure(results)
    return _answer(out, job, screen, request, kind.memory, no_report)


def _answer(
    out: Output, job: GenerateJob, screen: Screen, request: dict[str, Any], memory: int | None, no_report: str
) -> bool:
    rows = screen.rows(job.stories)
    answer = summary_of(job.stories, rows, job.order)
    found = None
    if not no_report:
        total = int(str(machine_facts()["memory_bytes"]))
        found = report_of(job.stories, memory or total // len(job.stories), request["cache_length"])
    if request["report"]:
        show_report(out, answer, found, no_report)
    else:
        screen.summary(answer)
    keys = ("run", "num_tokens", "batch_size", "cache_length")
    facts = {"model": Path(request["model"]).name, "world_size": len(job.stories), **{k: request[k] for k in keys}}
    out.emit(rows, **facts, **answer, report=found, no_report=no_report or None)
    return not answer["lost"] and (found is None or bool(found["identical"]))


def _smollm2() -> Path:
    from graphshard.models.smollm2 import prepare_smollm2

    return prepare_smollm2()


def _check_restart(world_size: int, transport: str) -> None:
    if world_size == 1:
        raise SpecError("--restart needs another rank, that the restarted one can join: use --world-size 2 or more")
    if transport != "pull":
        raise SpecError(
            f"--restart needs transport pull: a communicator of {transport} cannot take in a rank that came back"
        )
