"""Only what is truly replicated is sharded: ranks compare what they are about to load, weight by weight.

Ranks that read the very same files need not; others compare a 128-bit hash of each weight, before anything is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest
from typing import Any

from graphshard.comm.checksums import hash_of_pieces
from graphshard.comm.group import Group
from graphshard.core.counts import by_value
from graphshard.core.errors import SpecError
from graphshard.core.specs import ModelSpec, WeightSpec
from graphshard.runtime.weights.source import WeightSource

_STRIPE_BYTES = 4 << 20


def bytes_hash(data: memoryview) -> str:
    """A 128-bit hash, as ranks tell it."""
    return hash_of_pieces([data])


def source_hash(source: WeightSource, spec: WeightSpec) -> str:
    """`bytes_hash` of a whole weight, of which a stripe at a time is in memory."""
    return hash_of_pieces(_stripes(source, spec))


def check_source(group: Group, model: ModelSpec, source: WeightSource) -> None:
    """Compare what `source` holds for `model` over the group (collective).

    Raises:
        SpecError: on every rank, naming the first weight that differs and the ranks.
        LoadError: on every rank, if one lacks a weight.
    """
    if group.world_size == 1:
        return
    identities = [identity for identity, _ in group.all_gather(source.identity(), name="checkpoint")]
    if identities[0] is not None and all(identity == identities[0] for identity in identities):
        return
    names = [weight.name for weight in model.owned]
    check_replicated(
        group,
        names,
        lambda name: source_hash(source, model.weight(name)),
        progress=lambda: source.num_bytes_read,
    )


def check_replicated(
    group: Group,
    names: Iterable[str],
    hash_of: Callable[[str], str],
    *,
    may_differ: bool = False,
    progress: Callable[[], int] | None = None,
) -> None:
    """Compare the weights `names` over the group (collective); `hash_of` gives this rank's hash of one.

    Others wait for a rank whose `progress` grows, see `Group.agree`. With `may_differ` weights that stay whole may
    differ, and the error says so.

    Raises:
        SpecError: on every rank, naming the first weight that differs and the ranks.
    """
    mine = group.agree("load", lambda: [[name, hash_of(name)] for name in names], progress=progress)
    gathered: list[Any] = [value for value, _ in group.all_gather(mine, name="replicated check")]
    rows = list(zip_longest(*gathered))
    for row in rows:
        found = [pair[0] if pair else "none" for pair in row]
        if len(set(found)) > 1:
            raise SpecError(
                f"ranks shard unlike weights: the next is {by_value(found)}; give all of them the same model"
            )
    unlike = [row for row in rows if len({pair[1] for pair in row}) > 1]
    if unlike:
        name = unlike[0][0][0]
        way = f", or keep it whole with exclude=[{name!r}]" if may_differ else ""
        raise SpecError(
            f"weight {name} is not replicated: its hash is {by_value([pair[1][:12] for pair in unlike[0]])} "
            f"({len(unlike)} of {len(rows)} weights differ); load the same bytes on all ranks{way}"
        )


def _stripes(source: WeightSource, spec: WeightSpec) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(_STRIPE_BYTES, spec.num_bytes)))
    for begin in range(0, spec.num_bytes, _STRIPE_BYTES):
        stripe = buffer[: min(_STRIPE_BYTES, spec.num_bytes - begin)]
        source.read_into(spec, begin, stripe)
        yield stripe
