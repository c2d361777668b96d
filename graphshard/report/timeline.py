"""A picture of one step: a lane for each stream, a bar for each op."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

COLORS = {"compute": "#4c78a8", "copy": "#f58518", "wait": "#e4e4e4"}
"""By kind of span. Waits are the time a stream stands still for another."""


class Span(Protocol):
    """An op's time on its stream; `kind` is one of COLORS, times count from the step's first op."""

    @property
    def lane(self) -> str:
        """The stream."""

    @property
    def kind(self) -> str:
        """What the stream does: compute, copy or wait."""

    @property
    def label(self) -> str:
        """What the bar says if it is wide enough."""

    @property
    def begin_us(self) -> float:
        """When the op began."""

    @property
    def end_us(self) -> float:
        """When it was done."""


def draw_timeline(spans: Sequence[Span], path: Path, title: str, zoom_us: float | None = None) -> None:
    """Write a PNG of `spans` to `path`: the whole step, and below it the first `zoom_us` (None: a tenth of it)."""
    import matplotlib

    matplotlib.use("Agg")  # no display; must come before pyplot
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    lanes = list(dict.fromkeys(span.lane for span in spans))
    end = max((span.end_us for span in spans), default=1.0)
    figure, axes = plt.subplots(2, 1, figsize=(14, 2.2 + 1.1 * len(lanes)), constrained_layout=True)
    for ax, limit in zip(axes, (end, zoom_us or end / 10), strict=True):
        shown = [span for span in spans if span.begin_us < limit]
        _draw_lanes(ax, shown, lanes, limit)
    axes[0].set_title(title, loc="left")
    axes[1].set_xlabel("ms since the step's first op (lower: its beginning)")
    kinds = [kind for kind in COLORS if any(span.kind == kind for span in spans)]
    patches = [Patch(color=COLORS[kind], label=kind) for kind in kinds]
    axes[0].legend(handles=patches, loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False)
    figure.savefig(path, dpi=110, format="png")
    plt.close(figure)


def _draw_lanes(ax, spans: Sequence[Span], lanes: Sequence[str], limit_us: float) -> None:  # type: ignore[no-untyped-def]  # matplotlib has no types
    for kind, color in COLORS.items():
        for row, lane in enumerate(lanes):
            bars = [
                (span.begin_us / 1e3, (span.end_us - span.begin_us) / 1e3)
                for span in spans
                if span.lane == lane and span.kind == kind
            ]
            ax.broken_barh(bars, (row - 0.4, 0.8), facecolor=color, edgecolor="white", linewidth=0.2)
    for span in spans:
        if span.kind != "wait" and span.end_us - span.begin_us > limit_us / 25:
            center = (span.begin_us + span.end_us) / 2e3
            ax.text(center, lanes.index(span.lane), span.label, ha="center", va="center", fontsize=6, clip_on=True)
    ax.set_yticks(range(len(lanes)), lanes)
    ax.set_ylim(len(lanes) - 0.5, -0.5)
    ax.set_xlim(0, limit_us / 1e3)
