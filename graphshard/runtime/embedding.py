"""Captured steps by handle: what a server that replays them through `graphshard.h` and this runtime share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from graphshard._core import ControlPage, Event, Graph, Step, StepOrder
from graphshard.core.errors import CommError, ProgramError
from graphshard.core.ops import AgLaunch
from graphshard.core.specs import StepShape
from graphshard.runtime.bind import Ground, bind_gathers

if TYPE_CHECKING:
    from graphshard.runtime.graphs import Captured

Held = tuple[int | None, ...]


class Embedding:
    """The order of C's replays and this runtime's own steps, which use the same slots. One for each runtime.

    Either side may step after the other has; not both at a time. What slots hold is forgotten when sides change.
    """

    def __init__(self, ground: Ground, page: ControlPage) -> None:
        self._ground, self._page = ground, page
        self._compute, self._prefetch = ground.streams["compute"], ground.streams["prefetch"]
        self._order, self._last_step = StepOrder(ground.driver), Event(ground.driver)
        self._seen = 0
        self._keys: dict[Held, int] = {}

    def step(
        self,
        shape: StepShape,
        captured: Captured,
        inputs: Mapping[str, Tensor],
        outputs: Mapping[str, Tensor],
        executor: str,
    ) -> Step:
        """`captured` as C opens it: it owns the graph, the buffers and the slots from then on.

        Raises:
            ProgramError: C would have to issue collective gathers beside the graph.
        """
        program = captured.bound.program
        launches = [AgLaunch(unit, slot, "prefetch") for slot, unit in enumerate(program.entry) if unit is not None]
        if launches and self._ground.transport.is_collective:
            raise ProgramError(
                f"step shape {shape} begins with units in its slots, which C would gather eagerly beside the captured "
                "gathers of one communicator: plan with head='inside', or use transport pull"
            )
        entry = self._key(program.entry)
        prefetch = bind_gathers(launches, self._ground) if launches else None
        return Step(
            Graph.from_handle(self._ground.driver, captured.handle, captured).instantiate(executor),
            captured.bound.streams[0],
            (shape.batch_size, shape.tokens_per_sequence),
            _buffers(inputs),
            _buffers(outputs),
            calls=captured.calls,
            order=self._order,
            prefetch=prefetch,
            prefetch_stream=None if prefetch is None else self._prefetch,
            slots=(entry, entry if _satisfies(program.exit, program.entry) else 0),
            done=self._ground.done,
            page=self._page,
            keep=[captured, self._ground.memory, dict(inputs), dict(outputs)],
            transport=self._ground.transport.name,
            needs_peers=self._ground.transport.is_collective or captured.bound.joint is not None,
        )

    @property
    def num_replays(self) -> int:
        """Replays by C so far; no control page tells peers of them."""
        return self._order.num_replays

    @property
    def has_news(self) -> bool:
        """Whether C replayed or prefetched since this runtime last took over: then slots hold what it left."""
        return self._order.num_uses != self._seen

    def take_over(self, timeout_s: float) -> bool:
        """This runtime uses the slots again, after all that C replayed or prefetched; C relies on nothing in them then.

        Returns whether C did either since: then slots hold what it left.

        Raises:
            CommError: C's last replay or prefetch did not end in time. The next call waits for it again.
        """
        num_uses, is_news = self._order.num_uses, self.has_news
        if is_news and not self._order.synchronize(timeout_s):
            what = f"replay {self._order.num_replays}, or a prefetch,"
            raise CommError(f"waited {timeout_s:.1f} s for {what} of the server that embeds this runtime")
        self._seen = num_uses
        self._order.forget()
        return is_news

    def hand_over(self) -> None:
        """A step of this runtime was enqueued: C's next replay comes after it, and relies on nothing in the slots."""
        self._order.leave(self._compute)

    def hand_over_prefetch(self) -> None:
        """Gathers between steps were enqueued, if any were due: as `hand_over`."""
        self._compute.record(self._last_step)
        self._prefetch.wait(self._last_step)
        self._order.leave(self._prefetch)

    def _key(self, entry: Held) -> int:
        if all(unit is None for unit in entry):
            return 0
        return self._keys.setdefault(entry, len(self._keys) + 1)


def _satisfies(held: Held, wanted: Held) -> bool:
    return all(unit is None or unit == has for unit, has in zip(wanted, held, strict=True))


def _buffers(tensors: Mapping[str, Tensor]) -> list[tuple[str, int, int]]:
    return [(name, tensor.data_ptr(), tensor.nbytes) for name, tensor in tensors.items()]
