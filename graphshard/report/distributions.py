"""A picture of samples: every one a dot, with a box from the tenth to the ninetieth percentile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PLAIN, MARKED = "#4c78a8", "#f58518"


@dataclass(frozen=True, slots=True)
class Distribution:
    """Samples of one thing; a marked one is drawn in another colour."""

    label: str
    samples: Sequence[float]
    marked: bool = False


def draw_distributions(panels: Mapping[str, Sequence[Distribution]], path: Path, title: str) -> None:
    """Write a PNG to `path`: one panel for each heading, its distributions below each other on one logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")  # no display; must come before pyplot
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    tallest = max(len(distributions) for distributions in panels.values())
    size = (6.5 * len(panels), 1.2 + 0.4 * tallest)
    figure, axes = plt.subplots(1, len(panels), figsize=size, squeeze=False, constrained_layout=True)
    for ax, (heading, distributions) in zip(axes[0], panels.items(), strict=True):
        ax.set_xscale("log")
        _draw_panel(ax, distributions)
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.xaxis.set_major_formatter(ScalarFormatter())
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.set_title(heading, loc="left")
    figure.suptitle(title, x=0.01, ha="left")
    figure.savefig(path, dpi=110, format="png")
    plt.close(figure)


def _draw_panel(ax, distributions: Sequence[Distribution]) -> None:  # type: ignore[no-untyped-def]  # matplotlib has no types
    for row, one in enumerate(distributions):
        color = MARKED if one.marked else PLAIN
        spread = [row + 0.6 * (i % 7 - 3) / 7 for i in range(len(one.samples))]  # dots beside each other, not random
        ax.plot(one.samples, spread, ".", color=color, alpha=0.35, markersize=3)
    ax.boxplot(
        [list(one.samples) for one in distributions],
        positions=range(len(distributions)),
        orientation="horizontal",
        widths=0.7,
        whis=(10, 90),
        showfliers=False,
        medianprops={"color": "black"},
    )
    ax.set_yticks(range(len(distributions)), [one.label for one in distributions])
    ax.set_ylim(len(distributions) - 0.4, -0.6)
    ax.grid(axis="x", which="both", alpha=0.3)
