"""Where finished weights come from before they are sharded, a range of their bytes at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from graphshard.comm.group import Group
from graphshard.core.specs import ModelSpec, WeightSpec


class WeightSource(Protocol):
    """Bytes by weight. Several threads may read from one source at once."""

    def prepare(self, model: ModelSpec, group: Group) -> None:
        """Find everything that can be refused, and what ranks must agree on (collective; alone on one that came back).

        Nothing is reserved yet.

        Raises:
            LoadError: names, dtypes or shapes do not fit `model`; the same on every rank.
            SpecError: ranks have unlike weights.
        """

    def read_into(self, spec: WeightSpec, begin: int, out: memoryview) -> None:
        """Write bytes `[begin, begin + len(out))` of the finished weight into `out`, whose items are bytes.

        Raises:
            LoadError: they cannot be read.
        """

    def way(self, name: str) -> str:
        """How the weight comes about: `bytes`, or what is done to whole rows (`rows: quantize_fp8 per channel`)."""

    def identity(self) -> str | None:
        """Equal on two ranks of one machine only if they read the very same bytes; None if that is not known.

        Raises:
            LoadError: what is read was changed or replaced since it was opened.
        """

    def release(self, names: Sequence[str]) -> None:
        """These weights have been copied and will not be read again: the source may give up its own copies."""

    @property
    def num_bytes_read(self) -> int:
        """Bytes read of what lies behind the source so far."""

    @property
    def checkpoint_bytes(self) -> int:
        """All that the weights are made of, each tensor once, whoever reads it; known once it is prepared."""

    @property
    def temporary_bytes(self) -> int:
        """The most that lay in memory at one time to make weights, beside where they are written."""
