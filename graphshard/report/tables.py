"""Tables for the terminal: rows of plain values in, aligned columns out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from graphshard.core.sizes import format_bytes

Row = Mapping[str, object]


def table_of(rows: Sequence[Row], columns: Mapping[str, str], title: str | None = None) -> Table:
    """A table of `rows`: `columns` maps each key to its heading. Missing values show as `-`.

    Numbers are aligned right; a key that ends with `_bytes` is shown in binary units, floats with three digits.
    """
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False)
    for key, heading in columns.items():
        numeric = any(_is_number(row.get(key)) for row in rows)
        table.add_column(heading, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(cell_text(key, row.get(key)) for key in columns))
    return table


def cell_text(key: str, value: object) -> str:
    """`value` as a table shows it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and key.endswith("_bytes"):
        return format_bytes(value)
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
