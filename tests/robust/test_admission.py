"""Taking in a newcomer, step by step, with ranks that are threads: a stand-in for the doorkeeper brings the window."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

import pytest
from byte_model import ByteModel
from byte_steps import compile_bytes, wrong_after
from census import no_growth
from mini import held
from ranks import run_on_ranks

from graphshard._core import ControlPage
from graphshard.comm.control import LIVE
from graphshard.comm.doors import RankRecord
from graphshard.comm.group import Group
from graphshard.comm.process import ProcessId
from graphshard.core.errors import CommError, DeviceError
from graphshard.device import open_device
from graphshard.runtime.runtime import Runtime

LAYERS = [[5000, 300], [6000], [7000]]


class StandIn:
    """Brings newcomers as a doorkeeper does."""

    def __init__(self) -> None:
        self.news: dict[int, RankRecord] = {}
        self.settled: list[tuple[int, bool]] = []

    @property
    def has_news(self) -> bool:
        return bool(self.news)

    def take(self) -> dict[int, RankRecord]:
        self._taken, self.news = self.news, {}
        return dict(self._taken)

    def settle(self, rank: int, *, is_accepted: bool) -> None:
        self._taken.pop(rank).close()
        self.settled.append((rank, is_accepted))

    def close(self) -> None:
        for record in self.news.values():
            record.close()

    def bring(self, runtime: Runtime, rank: int, spoil: int | None = None, num_bytes: int | None = None) -> None:
        """A window with `rank`'s bytes; one of them wrong, or too few, if asked."""
        old = memoryview(runtime._transport._windows.window("shard", rank))
        window = open_device().allocate(num_bytes or len(old), exportable=True)
        memoryview(window)[:] = old[: window.num_bytes]
        if spoil is not None:
            memoryview(window)[spoil] ^= 1
        page = ControlPage()
        page.set_identity(os.getpid(), bytes(32))
        page.set_state(LIVE)
        self.news[rank] = RankRecord(ProcessId.of(os.getpid()), (), page, window.export_fd())


def survivor(group: Group, head: str, depth: int) -> tuple[Runtime, ByteModel] | None:
    """Rank 0's runtime, which is left alone."""
    model = ByteModel(LAYERS)
    runtime = compile_bytes(group, model, units="layer", prefetch_depth=depth, head=head, capture_sizes=[1, 2])
    if group.rank == 0:
        return runtime, model
    runtime.close()
    return None


def left_alone(head: str = "tail", depth: int = 1) -> tuple[Runtime, ByteModel, StandIn]:
    runtime, model = run_on_ranks(survivor, 3, head, depth)[0]
    door = StandIn()
    runtime.let_in(door)  # type: ignore[arg-type]
    return runtime, model, door


def step_in_a_loop(runtime: Runtime, model: ByteModel) -> list[str]:
    def loop() -> None:
        with runtime.begin_step(1) as step:
            for layer in range(len(LAYERS)):
                step.before_layer(layer)
                step.state.run([segment for segment in model.segments if segment.spec.layer == layer])
                step.after_layer(layer)

    return wrong_after(runtime, model, loop)


@pytest.mark.slow
@pytest.mark.parametrize(("head", "depth"), [("inside", 0), ("inside", 2), ("tail", 1), ("outside", 1)])
def test_every_kind_of_step_takes_newcomers_in(head: str, depth: int) -> None:
    runtime, model, door = left_alone(head, depth)
    graph, large = runtime.graph(1), runtime.graph(2)
    steps: list[Callable[[], list[str]]] = [
        lambda: wrong_after(runtime, model, graph.replay),
        lambda: wrong_after(runtime, model, lambda: runtime.run(1)),
        lambda: step_in_a_loop(runtime, model),
        lambda: wrong_after(runtime, model, large.replay),
    ]
    nodes = graph.num_nodes()
    for step in steps:
        gc.collect()  # what earlier tests left is not given back while windows are counted
        before = held()["windows"], runtime.buffer_table()
        old = runtime._transport.generations()
        for rank in (1, 2):
            door.bring(runtime, rank)
        assert step() == []
        assert door.settled == [(1, True), (2, True)]
        door.settled.clear()
        assert [a == b for a, b in zip(old, runtime._transport.generations(), strict=True)] == [True, False, False]
        assert [other() for other in steps] == [[]] * 4
        assert (held()["windows"], runtime.buffer_table()) == before and graph.num_nodes() == nodes
    runtime.close()


def test_admit_says_who_came_in() -> None:
    runtime, model, door = left_alone()
    assert runtime.admit() == ()
    door.bring(runtime, 2)
    assert runtime.admit() == (2,)
    assert runtime.admit() == ()
    assert wrong_after(runtime, model, runtime.graph(1).replay) == []
    runtime.close()


@pytest.mark.parametrize(
    ("spoil", "num_bytes", "error", "words"),
    [
        (17, None, CommError, "rank 0 gathered other bytes of unit 0 than their owners loaded: checksum"),
        (None, 64, DeviceError, "bytes, a window of"),
    ],
)
def test_a_newcomer_that_is_not_what_it_told_is_left_out(
    spoil: int | None, num_bytes: int | None, error: type[Exception], words: str
) -> None:
    """The others come in; steps go on over what was mapped before; nothing of the liar stays."""
    runtime, model, door = left_alone()
    graph = runtime.graph(1)
    for act in (graph.replay, lambda: runtime.run(1)):  # streams start their threads when they are first used
        assert wrong_after(runtime, model, act) == []
    with no_growth():
        before = held()["windows"], runtime._transport.generations()
        door.bring(runtime, 1, spoil, num_bytes)
        with pytest.raises(error, match=words):
            runtime.admit()
        assert door.settled == [(1, False)]
        assert (held()["windows"], runtime._transport.generations()) == before
        assert wrong_after(runtime, model, graph.replay) == []
        door.bring(runtime, 1, spoil, num_bytes)
        door.bring(runtime, 2)
        with pytest.warns(UserWarning, match=f"rank 0 goes on without a rank that came back: .*{words}"):
            assert wrong_after(runtime, model, graph.replay) == []
        assert door.settled[1:] == [(1, False), (2, True)]
        assert wrong_after(runtime, model, lambda: runtime.run(1)) == []
        assert held()["windows"] == before[0]
    runtime.close()


def test_nobody_comes_in_while_a_loop_is_open() -> None:
    runtime, model, door = left_alone()
    step = runtime.begin_step(1)
    door.bring(runtime, 1)
    for layer in range(len(LAYERS)):
        step.before_layer(layer)
        step.state.run([segment for segment in model.segments if segment.spec.layer == layer])
        step.after_layer(layer)
    step.end()
    assert door.settled == []
    assert step_in_a_loop(runtime, model) == []
    assert door.settled == [(1, True)]
    runtime.close()


def test_a_graph_that_cannot_be_captured_again_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its old list keeps the memory it reads."""
    runtime, model, door = left_alone()
    graph = runtime.graph(1)
    door.bring(runtime, 1)

    def refuse(*_: object) -> None:
        raise DeviceError("no capture today")

    with monkeypatch.context() as patched:
        patched.setattr(type(graph), "capture_again", refuse)
        with pytest.warns(UserWarning, match="no capture today"):
            assert wrong_after(runtime, model, graph.replay) == []
    assert wrong_after(runtime, model, graph.replay) == []
    door.bring(runtime, 1)
    assert runtime.admit() == (1,)
    assert wrong_after(runtime, model, graph.replay) == []
    runtime.close()
