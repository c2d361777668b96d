"""Pictures of a plan: the lanes of a predicted step, memory freed against time exposed, and time by tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from graphshard.core.sizes import BYTE_UNITS
from graphshard.core.timeline import Timeline
from graphshard.report.timeline import add_legend, draw_lanes

LANE, MARKED = "#4c78a8", "#f58518"
GIB = BYTE_UNITS["GiB"]


@dataclass(frozen=True, slots=True)
class Curve:
    """Times by tokens; None where there is no such time."""

    label: str
    tokens: Sequence[int]
    us: Sequence[float | None]


@dataclass(frozen=True)
class PlanPicture:
    """What is drawn; empty panels are left out."""

    title: str
    step: Timeline
    step_title: str
    frontier: Sequence[tuple[int, float]]
    """(bytes freed, us exposed), rising."""
    chosen: tuple[int, float] | None
    curves: Sequence[Curve]
    curves_title: str
    crossings: Sequence[tuple[str, int]]
    """(what is no slower from there on, tokens)."""


def draw_plan(picture: PlanPicture, path: Path) -> None:
    """Write a PNG to `path`: lanes of the whole step and of its first tenth, then frontier and times side by side."""
    import matplotlib

    matplotlib.use("Agg")  # no display; must come before pyplot
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(14, 9), constrained_layout=True)
    grid = figure.add_gridspec(3, 2, height_ratios=[1, 1, 3])
    end = max(picture.step.duration_us, 1.0)
    lanes = picture.step.lanes
    for row, limit in enumerate((end, end / 10)):
        ax = figure.add_subplot(grid[row, :])
        draw_lanes(ax, [span for span in picture.step.spans if span.begin_us < limit], lanes, limit)
        if row == 0:
            ax.set_title(picture.step_title, loc="left")
            add_legend(ax, picture.step.spans)
    ax.set_xlabel("ms since the step began (lower: its beginning)")
    if picture.frontier:
        _draw_frontier(figure.add_subplot(grid[2, 0]), picture)
    if picture.curves:
        _draw_curves(figure.add_subplot(grid[2, 1]), picture)
    figure.suptitle(picture.title, x=0.01, ha="left")
    figure.savefig(path, dpi=110, format="png")
    plt.close(figure)


def _draw_frontier(ax, picture: PlanPicture) -> None:  # type: ignore[no-untyped-def]  # matplotlib has no types
    freed = [size / GIB for size, _ in picture.frontier]
    exposed = [us / 1e3 for _, us in picture.frontier]
    ax.step(freed, exposed, "-", where="pre", color=LANE)
    ax.plot(freed, exposed, ".", color=LANE)
    if picture.chosen is not None:
        size, us = picture.chosen
        ax.plot([size / GIB], [us / 1e3], "o", color=MARKED, markersize=9, label="this plan")
        ax.legend(frameon=False)
    ax.set_yscale("symlog", linthresh=0.1)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("GiB freed on each rank, net of slots")
    ax.set_ylabel("ms exposed a step")
    ax.set_title("frontier", loc="left")
    ax.grid(alpha=0.3)


def _draw_curves(ax, picture: PlanPicture) -> None:  # type: ignore[no-untyped-def]  # matplotlib has no types
    for curve in picture.curves:
        known = [(x, us) for x, us in zip(curve.tokens, curve.us, strict=True) if us is not None]
        ax.plot([x for x, _ in known], [us for _, us in known], ".-", label=curve.label.replace("_", " "))
    for label, tokens in picture.crossings:
        ax.axvline(tokens, color="gray", linestyle=":", label=label)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xlabel("tokens of all ranks")
    ax.set_ylabel("us, one layer")
    ax.set_title(picture.curves_title, loc="left")
    ax.legend(frameon=False)
    ax.grid(which="both", alpha=0.3)
