"""What `generate` shows while it runs: one prompt as it grows, the others when their rank is done, and what fails."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graphshard.cli.common import Output
from graphshard.cli.generate_job import GenerateJob, RankStory
from graphshard.cli.generate_wire import Message
from graphshard.cli.prompts import TOKENIZER, Codec, Typewriter


def say_first(out: Output, folder: Path, num_prompts: int, world_size: int, batch_size: int) -> None:
    """Say what is to be generated."""
    if not (folder / TOKENIZER).exists():
        out.say(f"no {TOKENIZER} in {folder}: words become tokens by their letters, and tokens are shown as numbers")
    out.say(f"{folder.name}: prompts: {num_prompts} over {world_size} ranks, in batches of {batch_size}")


class Screen:
    """The prompts' texts, and who is to generate them."""

    def __init__(self, out: Output, codec: Codec, texts: Sequence[str], world_size: int) -> None:
        self._out, self._codec, self._texts, self._world_size = out, codec, texts, world_size
        self._writer: Typewriter | None = None
        self._waiting: list[str] = []  # said once the growing prompt is whole
        self._is_paused = False  # the growing prompt's line was broken off
        self._job: GenerateJob | None = None

    def follow(self, job: GenerateJob) -> None:
        """Show what happens to `job` from now on."""
        self._job = job
        job.on_message, job.on_change, job.on_turn = self._hear, self._tell_change, self._say_no_later

    def finish(self) -> None:
        """All ranks are settled: whatever was held back is said."""
        self._end_line()

    def rows(self, stories: Sequence[RankStory]) -> list[dict[str, Any]]:
        """A row for each prompt, in their order."""
        rows = []
        for index, text in enumerate(self._texts):
            story = stories[index % self._world_size]
            row = {"prompt_index": index, "rank": story.rank, "prompt": text}
            rows.append({**row, **self._outcome(index, story)})
        return rows

    def summary(self, answer: dict[str, Any]) -> None:
        """A last line."""
        times = answer["time_per_token_ms"]
        if times is not None:
            self._out.say(
                f"{times['median']:.3g} ms a token (p99 {times['p99']:.3g}, n={times['n']}), first token after "
                f"{answer['ttft_ms']['median']:.3g} ms"
            )
        for one in answer["lost"]:
            self._out.say(f"LOST with rank {one['rank']}: prompts {_numbers(one['prompt_indices'])}")

    # --- inside ---

    def _outcome(self, index: int, story: RankStory) -> dict[str, Any]:
        nothing = {"state": "lost", "text": None, "tokens": None, "ttft_ms": None}
        for batch in story.batches or ():
            if index in batch["prompts"]:
                tokens = batch["tokens"][batch["prompts"].index(index)]
                ttft_ms = batch["first_token_s"][batch["prompts"].index(index)] * 1e3
                text = self._codec.decode(tokens)
                return {"state": "done", "text": text, "tokens": tokens, "ttft_ms": ttft_ms, "reason": None}
        return {**nothing, "reason": f"rank {story.rank} {story.lost}"}

    def _hear(self, rank: int, message: Message) -> None:
        if message["what"] == "token":
            if self._writer is None:
                self._writer = Typewriter(self._codec)
                print(f"\n[rank {rank}] {self._texts[0]}", end="", flush=True)
            if self._is_paused:
                print(f"[rank {rank}] ...", end="", flush=True)
                self._is_paused = False
            self._writer.add(message["token"])
        elif message["what"] == "ready" and message["is_newcomer"]:
            self._say(f"[rank {rank}] is back")
        elif message["what"] == "done":
            self._show_done(rank, message["batches"])

    def _show_done(self, rank: int, batches: list[dict[str, Any]]) -> None:
        was_shown = rank == 0 and self._writer is not None
        if rank == 0:
            self._end_line()
        for batch in batches:
            for index, tokens in zip(batch["prompts"], batch["tokens"], strict=True):
                if index or not was_shown:
                    self._say(f"[rank {rank}] {self._texts[index]}{self._codec.decode(tokens)}")

    def _tell_change(self, story: RankStory) -> None:
        if story.rank == 0:
            self._end_line()
        mine = range(story.rank, len(self._texts), self._world_size)
        if story.lost:
            what = f"prompts {_numbers(list(mine))} are LOST" if mine else "it had no prompts"
            self._say(f"[rank {story.rank}] {story.lost}: {what}")
        else:
            self._say(f"[rank {story.rank}] {story.ended[-1]}: started again")

    def _say(self, text: str) -> None:
        """Say a line; while a prompt grows it is held back, but not for a rank that is stopped."""
        self._waiting.append(text.replace("\n", "\n    "))
        self._say_no_later()

    def _say_no_later(self) -> None:
        if not self._waiting:
            return
        assert self._job is not None
        if self._writer is None or self._is_paused:
            self._flush()
        elif self._job.stories[0].process.state() == "stopped":
            print(" ... (rank 0 is stopped)", flush=True)
            self._is_paused = True
            self._flush()

    def _end_line(self) -> None:
        if self._writer is not None and not self._is_paused:
            print(flush=True)
        self._writer, self._is_paused = None, False
        self._flush()

    def _flush(self) -> None:
        for text in self._waiting:
            self._out.say(text)
        self._waiting.clear()


def _numbers(indices: list[int]) -> str:
    return " ".join(map(str, indices))
