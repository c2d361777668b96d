"""Which spans of the parts make up a span of a concatenation or a slice: of bytes, or of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def concat_spans(begin: int, end: int, sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Part, begin and end in it, for each span of `[begin, end)` where `sizes[i]` of part i, in turn, repeat."""
    period = sum(sizes)
    if begin >= end:
        return
    for turn in range(begin // period, -(-end // period)):
        start = turn * period
        for part, size in enumerate(sizes):
            first, last = max(begin, start), min(end, start + size)
            if first < last:
                yield part, first - start + turn * size, last - start + turn * size
            start += size


def slice_spans(begin: int, end: int, period: int, kept_begin: int, kept_end: int) -> Iterator[tuple[int, int]]:
    """Begin and end in the part of each span of `[begin, end)`, where [kept_begin, kept_end) of each period stays."""
    kept = kept_end - kept_begin
    if begin >= end:
        return
    for turn in range(begin // kept, -(-end // kept)):
        first, last = max(begin, turn * kept), min(end, (turn + 1) * kept)
        shift = turn * (period - kept) + kept_begin
        yield first + shift, last + shift
