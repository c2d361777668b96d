"""How a model is served: which ranks hold the same bytes, and in which dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from graphshard.core.errors import SpecError

WeightFormat = Literal["config", "bf16", "fp8"]
"""Of the large matrices: as the config says, or one dtype for all that has kernels for it."""
CacheFormat = Literal["bf16", "fp8"]

CACHE_BYTES: dict[str, int] = {"bf16": 2, "fp8": 1}
"""Bytes of one element of the KV cache."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """A shard group: `attention_dp * tp` ranks in one NVLink domain. Experts may be spread over more ranks than these.

    Dense weights are cut `tp` ways and held `attention_dp` times. Routed experts are spread over `ep` ranks; with
    `ep` 1 they are cut `tp` ways as everything else is.
    """

    world_size: int
    """Ranks of the shard group."""
    attention_dp: int | None = None
    """Ranks (or tensor-parallel groups) that serve requests of their own; None: `world_size / tp`."""
    tp: int = 1
    """Ranks over which dense weights are cut."""
    ep: int | None = None
    """Ranks over which routed experts are spread; None: `world_size`."""
    include: Sequence[str] = ()
    """Patterns of weights to shard, in place of every replicated one."""
    exclude: Sequence[str] = ()
    """Patterns of weights that stay resident."""
    weights: WeightFormat = "config"
    kv_cache: CacheFormat = "bf16"

    def __post_init__(self) -> None:
        for name in ("world_size", "tp"):
            _check_count(name, getattr(self, name))
        if self.world_size % self.tp:
            raise SpecError(
                f"tp {self.tp} does not divide world_size {self.world_size}: use tp {_below(self.tp, self.world_size)}"
            )
        if self.attention_dp is None:
            object.__setattr__(self, "attention_dp", self.world_size // self.tp)
        if self.ep is None:
            object.__setattr__(self, "ep", self.world_size)
        for name in ("attention_dp", "ep"):
            _check_count(name, getattr(self, name))
        if self.num_replicas * self.tp != self.world_size:
            raise SpecError(
                f"attention_dp {self.attention_dp} x tp {self.tp} is not world_size {self.world_size}: "
                f"use attention_dp {self.world_size // self.tp}"
            )
        _check_known("weights", self.weights, get_args(WeightFormat))
        _check_known("kv_cache", self.kv_cache, get_args(CacheFormat))
        for name in ("include", "exclude"):
            given = getattr(self, name)
            object.__setattr__(self, name, (given,) if isinstance(given, str) else tuple(given))

    @property
    def num_replicas(self) -> int:
        """How often the group holds each dense weight."""
        assert self.attention_dp is not None, "set by __post_init__"
        return self.attention_dp

    @property
    def expert_ranks(self) -> int:
        """`ep` as a number."""
        assert self.ep is not None, "set by __post_init__"
        return self.ep

    @property
    def cache_element_bytes(self) -> int:
        """Bytes of one element of the KV cache."""
        return CACHE_BYTES[self.kv_cache]


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SpecError(f"{name} is {value!r}: it is a whole number that starts at 1, so the nearest is {name} 1")


def _check_known(what: str, name: object, known: Sequence[str]) -> None:
    if name not in known:
        raise SpecError(f"unknown {what} {name!r}; known are {', '.join(known)}")


def _below(value: int, total: int) -> int:
    """The largest divisor of `total` that is not above `value`."""
    return next(divisor for divisor in range(min(value, total), 0, -1) if total % divisor == 0)
