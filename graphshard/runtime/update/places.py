"""Where a rank keeps the bytes of each weight: the layout's own answer, which no update changes."""

from __future__ import annotations

from typing import Literal, NamedTuple

from graphshard.core.layout import Layout, chunk_pieces

Area = Literal["shards", "resident", "outside"]
"""Memory of the runtime; `outside`: a tensor of the attached module itself."""


class Place(NamedTuple):
    """`num_bytes` of `weight`, from `weight_begin` on, lie in `area` from `begin` on (`outside`: of its own tensor)."""

    weight: str
    area: Area
    begin: int
    weight_begin: int
    num_bytes: int


def places_of(layout: Layout, rank: int) -> dict[str, list[Place]]:
    """By weight: this rank's pieces of it in its chunks, or the whole of it in resident memory."""
    places: dict[str, list[Place]] = {}
    for unit in layout.units:
        for piece in chunk_pieces(unit, rank):
            begin, num_bytes = unit.chunk_offset + piece.chunk_offset, piece.weight_end - piece.weight_begin
            place = Place(piece.weight, "shards", begin, piece.weight_begin, num_bytes)
            places.setdefault(piece.weight, []).append(place)
    for view in layout.resident:
        places[view.weight] = [Place(view.weight, "resident", view.offset, 0, view.num_bytes)]
    return places
