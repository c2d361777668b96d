"""A picture of one step: a lane for each stream, a bar for each op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from graphshard.core.timeline import Span, Timeline

COLORS = {"compute": "#4c78a8", "copy": "#f58518", "wait": "#c4c4c4"}
"""By kind of span. Waits are the time a stream stands still for another."""

MARKS = ("#54a24b", "#e45756", "#b279a2", "#72b7b2")
"""For spans that are to be found at once, by their names."""

LETTERS = 250
"""As many fit beside each other in a lane, about."""


def draw_timeline(spans: Sequence[Span], path: Path, title: str, zoom_us: float | None = None) -> None:
    """Write a PNG of `spans` to `path`: the whole step, and below it the first `zoom_us` (None: a tenth of it)."""
    import matplotlib

    matplotlib.use("Agg")  # no display; must come before pyplot
    import matplotlib.pyplot as plt

    lanes = list(dict.fromkeys(span.lane for span in spans))
    end = max((span.end_us for span in spans), default=1.0)
    figure, axes = plt.subplots(2, 1, figsize=(14, 2.2 + 1.1 * len(lanes)), constrained_layout=True)
    for ax, limit in zip(axes, (end, zoom_us or end / 10), strict=True):
        shown = [span for span in spans if span.begin_us < limit]
        draw_lanes(ax, shown, lanes, limit)
    axes[0].set_title(title, loc="left")
    axes[1].set_xlabel("ms since the step's first op (lower: its beginning)")
    add_legend(axes[0], spans)
    figure.savefig(path, dpi=110, format="png")
    plt.close(figure)


def draw_timelines(
    timelines: Sequence[Timeline],
    path: Path,
    title: str,
    predicted: Sequence[Timeline] = (),
    marked: Sequence[str] = (),
) -> None:
    """Write a PNG to `path`: the step of every rank below each other, on one clock if the timelines share one.

    Predicted steps follow, from the same beginning. Spans whose names are `marked` have colours of their own.
    """
    import matplotlib

    matplotlib.use("Agg")  # no display; must come before pyplot
    import matplotlib.pyplot as plt

    first = min(one.offset_us for one in timelines)
    shown = [(one, one.offset_us - first, f"rank {one.rank}") for one in timelines]
    shown += [(one, 0.0, f"rank {one.rank}, predicted") for one in predicted]
    end = max(shift + one.duration_us for one, shift, _ in shown)
    heights = [len(one.lanes) for one, _, _ in shown]
    size = (14, 1.2 + 0.5 * len(shown) + 0.5 * sum(heights))
    figure, axes = plt.subplots(
        len(shown), 1, figsize=size, squeeze=False, sharex=True, constrained_layout=True, height_ratios=heights
    )
    colors = dict(zip(marked, MARKS, strict=False))
    for ax, (one, shift, label) in zip(axes[:, 0], shown, strict=True):
        moved = [replace(span, begin_us=span.begin_us + shift, end_us=span.end_us + shift) for span in one.spans]
        draw_lanes(ax, moved, one.lanes, end, colors)
        ax.set_ylabel(label)
    axes[0, 0].set_title(title, loc="left", pad=24 if marked else None)  # the legend of many stands below it
    axes[-1, 0].set_xlabel("ms since the first rank's step began")
    add_legend(axes[0, 0], [span for one, _, _ in shown for span in one.spans], colors)
    figure.savefig(path, dpi=110, format="png")
    plt.close(figure)


def add_legend(ax, spans: Sequence[Span], marked: Mapping[str, str] | None = None) -> None:  # type: ignore[no-untyped-def]  # matplotlib has no types
    """Name the kinds of `spans`, and those with colours of their own, above the right end of `ax`."""
    from matplotlib.patches import Patch

    kinds = [kind for kind in COLORS if any(span.kind == kind for span in spans)]
    patches = [Patch(color=COLORS[kind], label=kind) for kind in kinds]
    patches += [Patch(color=color, label=name) for name, color in (marked or {}).items()]
    ax.legend(handles=patches, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(patches), frameon=False)


def draw_lanes(  # type: ignore[no-untyped-def]  # matplotlib has no types
    ax, spans: Sequence[Span], lanes: Sequence[str], limit_us: float, marked: Mapping[str, str] | None = None
) -> None:
    """Draw `spans` up to `limit_us` on `ax`, a row for each of `lanes`; names where there is room.

    `marked`: colours by the names of spans; others have those of their kinds.
    """
    own = marked or {}
    colors = {span: own.get(span.name, COLORS[span.kind]) for span in spans}
    for color in dict.fromkeys((*COLORS.values(), *own.values())):
        for row, lane in enumerate(lanes):
            bars = [
                (span.begin_us / 1e3, (span.end_us - span.begin_us) / 1e3)
                for span in spans
                if span.lane == lane and colors[span] == color
            ]
            ax.broken_barh(bars, (row - 0.4, 0.8), facecolor=color, edgecolor="white", linewidth=0.2)
    for span in spans:
        if span.kind != "wait" and span.duration_us > limit_us * max(1 / 25, len(span.name) / LETTERS):
            center = (span.begin_us + span.end_us) / 2e3
            ax.text(center, lanes.index(span.lane), span.name, ha="center", va="center", fontsize=6, clip_on=True)
    ax.set_yticks(range(len(lanes)), lanes)
    ax.set_ylim(len(lanes) - 0.5, -0.5)
    ax.set_xlim(0, limit_us / 1e3)
