"""A module's own tensors as the source of shards: compared over the group first, given up as they are copied."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from graphshard.comm.group import Group
from graphshard.core.errors import SpecError
from graphshard.runtime.source import TensorSource

_HASH_BYTES = 16


class ModuleSource(TensorSource):
    """Parameters that lose their storage once their bytes are in the runtime's memory."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__(parameters)
        self._parameters = parameters
        self.num_released = 0

    def release(self, names: Sequence[str]) -> None:
        """Give the storage of `names` back; the parameters stay the same objects."""
        for name in names:
            parameter = self._parameters[name]
            parameter.data = torch.empty(0, dtype=parameter.dtype)
            self.num_released += 1


def weight_hash(weight: Tensor) -> str:
    """A 128-bit hash of a weight's elements; gaps between strided ones do not count."""
    flat = weight.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=_HASH_BYTES).hexdigest()


def check_replicated(group: Group, weights: Mapping[str, Tensor], names: Iterable[str]) -> None:
    """Compare the weights `names` over the group (collective), before anything is changed.

    Raises:
        SpecError: on every rank, naming the first weight that differs and the ranks.
    """
    mine = [[name, weight_hash(weights[name])] for name in names]
    gathered: list[Any] = [value for value, _ in group.all_gather(mine, name="replicated check")]
    rows = list(zip_longest(*gathered))
    for row in rows:
        found = [pair[0] if pair else "none" for pair in row]
        if len(set(found)) > 1:
            raise SpecError(
                f"ranks shard unlike weights: the next is {_by_value(found)}; attach the same module on all"
            )
    unlike = [row for row in rows if len({pair[1] for pair in row}) > 1]
    if unlike:
        name = unlike[0][0][0]
        raise SpecError(
            f"weight {name} is not replicated: its hash is {_by_value([pair[1][:12] for pair in unlike[0]])} "
            f"({len(unlike)} of {len(rows)} weights differ); load the same bytes on all ranks, or keep it whole with "
            f"exclude=[{name!r}]"
        )


def _by_value(values: Sequence[str]) -> str:
    """`ab12 on rank 0, cd34 on ranks 1 2`."""
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    return ", ".join(
        f"{value} on rank{'s' if len(which) > 1 else ''} {' '.join(which)}" for value, which in ranks.items()
    )
