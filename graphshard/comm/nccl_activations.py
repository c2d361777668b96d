"""Activations between ranks by NCCL: an all-gather and a reduce-scatter a block, on a communicator of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from graphshard._core import Communicator, NcclError, Stream
from graphshard.comm.activations import ActPlace
from graphshard.comm.alignment import Alignment
from graphshard.comm.control import ControlTable
from graphshard.comm.group import Group
from graphshard.core.errors import CommError
from graphshard.core.lowering import ActCollective, ActOp
from graphshard.device.base import Device

PURPOSE = "activations"
"""What the communicator's name says of it."""
COLLECTIVE = 1
"""Its number in op lists: gathers of weights have 0."""
DTYPES = ("float32", "bfloat16", "float16")
"""What a reduce-scatter adds; how it rounds and in which order is the library's own business."""


class NcclActivations:
    """One communicator. Ranks are kept together, and ended together, by the one that gathers weights."""

    def __init__(self, group: Group, communicator: Communicator) -> None:
        """Take `communicator` over; `warm_up` does the rest."""
        self._group, self.communicator = group, communicator
        self.collectives: tuple[Communicator, ...] = (communicator,)

    def warm_up(self, device: Device, places: Sequence[ActPlace], timeout_s: float) -> None:
        """Run the largest of each collective once, eagerly: what is set up lazily is set up here, bounded (collective).

        Raises:
            CommError: on every rank: a block's numbers cannot be added, or a first collective did not end.
        """
        self._group.agree("numbers of blocks", lambda: _check_dtypes(places))
        self._group.agree("nccl warm-up of activations", lambda: self._warm_up(device, places, timeout_s))

    def ops(self, op: ActOp, place: ActPlace, stream: int) -> list[tuple[object, ...]]:
        """One collective; see `Activations`."""
        assert isinstance(op, ActCollective), op
        if op.kind == "all_gather":
            return [("all_gather", stream, COLLECTIVE, place.gathered, place.tokens, place.token_bytes)]
        sizes = (place.num_elements, place.dtype)
        return [("reduce_scatter", stream, COLLECTIVE, place.summed, place.partial, *sizes)]

    def alignment(
        self, gathers: Alignment, control: ControlTable, timeout_s: float, shapes: Sequence[str]
    ) -> Alignment:
        """That of the gathers: all steps need all ranks there."""
        del control, timeout_s, shapes
        return gathers

    def watch(self, is_idle: Callable[[], bool]) -> None:
        """An abort ends what waits."""

    def close(self) -> None:
        """The transport of the weights ends both communicators."""

    def _warm_up(self, device: Device, places: Sequence[ActPlace], timeout_s: float) -> None:
        stream = Stream(device.driver)
        gather = max(places, key=lambda place: place.token_bytes)
        scatter = max(places, key=lambda place: place.partial_bytes)
        name = self.communicator.name
        try:
            self.communicator.all_gather(gather.gathered, gather.tokens, gather.token_bytes, stream, timeout_s)
            self.communicator.reduce_scatter(
                scatter.summed, scatter.partial, scatter.num_elements, scatter.dtype, stream, timeout_s
            )
        except NcclError as error:
            raise CommError(f"rank {self._group.rank}: the warm-up of {name} failed: {error}") from error
        if not stream.synchronize(timeout_s):
            self.communicator.abort(0.0)
            raise CommError(
                f"rank {self._group.rank} waited {timeout_s:.1f} s for the warm-up of {name}: a rank does not take part"
            )


def _check_dtypes(places: Sequence[ActPlace]) -> None:
    for place in places:
        if place.dtype not in DTYPES:
            raise CommError(
                f"a tensor-parallel block of {place.dtype} cannot be summed by transport nccl, which adds "
                f"{', '.join(DTYPES)}: use transport pull, or gather the block"
            )
