"""Communicators over the host NCCL, threads as ranks: bytes, order, windows, ends."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import pytest
from device_helpers import TIMEOUT_S, drained

from graphshard._core import Calls, Communicator, Driver, GraphExec, Memory, NcclError, NcclLibrary, OpList, Stream
from graphshard.device.host import library_path

SHORT_S = 0.05  # for calls that are known not to return
CHUNK = 4096

Result = TypeVar("Result")


def on_ranks(world_size: int, function: Callable[[int], Result]) -> list[Result]:
    """`function(rank)` on a thread for each rank, bounded."""
    outcomes: dict[int, Result | BaseException] = {}

    def run(rank: int) -> None:
        try:
            outcomes[rank] = function(rank)
        except BaseException as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert len(outcomes) == world_size, f"ranks {sorted(set(range(world_size)) - set(outcomes))} are stuck"
    for outcome in outcomes.values():
        if isinstance(outcome, BaseException):
            raise outcome
    return [outcomes[rank] for rank in range(world_size)]  # type: ignore[misc]


class Rank:
    """One rank's communicator, window and stream: chunk r of the window is rank r's."""

    def __init__(self, library: NcclLibrary, unique_id: bytes, world_size: int, rank: int) -> None:
        self.driver, self.rank, self.world_size = library_driver(library), rank, world_size
        self.stream = Stream(self.driver)
        self.communicator = Communicator(library, unique_id, world_size, rank, "weights", TIMEOUT_S)
        self.window: Memory | None = self.communicator.allocate(CHUNK * world_size)
        self.shard: Memory | None = self.communicator.allocate(CHUNK)
        for memory in (self.window, self.shard):
            self.communicator.register(memory, TIMEOUT_S)
        self.stream.fill(self.shard.address, rank + 1, CHUNK)
        assert self.stream.synchronize(TIMEOUT_S)

    def gather(self, timeout_s: float | None = None) -> None:
        assert self.window is not None and self.shard is not None
        self.communicator.all_gather(self.window.address, self.shard.address, CHUNK, self.stream, timeout_s)

    def list_of(self, num_gathers: int) -> OpList:
        assert self.window is not None and self.shard is not None
        op = ("all_gather", 0, 0, self.window.address, self.shard.address, CHUNK)
        return OpList(self.driver, [self.stream], 0, [op] * num_gathers, [self.communicator])

    def captured(self, num_gathers: int = 1) -> GraphExec:
        return self.list_of(num_gathers).capture(Calls([]), lock_timeout_s=TIMEOUT_S).instantiate()

    def gathered(self) -> bytes:
        assert self.stream.synchronize(TIMEOUT_S)
        assert self.window is not None
        return bytes(self.window)

    def clear(self) -> None:
        assert self.window is not None
        self.stream.fill(self.window.address, 0xEE, CHUNK * self.world_size)


def library_driver(_: NcclLibrary) -> Driver:
    return Driver(str(library_path()))


def expected(world_size: int) -> bytes:
    return b"".join(bytes([rank + 1]) * CHUNK for rank in range(world_size))


@pytest.fixture(scope="module")
def host_path() -> str:
    return str(library_path().with_name("libgraphshard_hostnccl.so"))


@pytest.fixture
def host_library(driver: Driver, host_path: str) -> NcclLibrary:
    return NcclLibrary(host_path, driver)


@contextlib.contextmanager
def staged(path: str, spec: str) -> Iterator[None]:
    library = ctypes.CDLL(path)
    assert library.gshost_nccl_stage(spec.encode()) == 0
    try:
        yield
    finally:
        assert library.gshost_nccl_stage(b"") == 0


def opened(library: NcclLibrary, world_size: int) -> list[Rank]:
    unique_id = library.unique_id()
    return on_ranks(world_size, lambda rank: Rank(library, unique_id, world_size, rank))


def destroyed(ranks: Sequence[Rank]) -> list[bool]:
    return on_ranks(len(ranks), lambda rank: ranks[rank].communicator.destroy(TIMEOUT_S))


def test_library_is_the_host_one(host_library: NcclLibrary, host_path: str) -> None:
    assert (host_library.path, host_library.missing) == (host_path, [])
    assert host_library.version >= 22803


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_gathers_are_right(host_library: NcclLibrary, world_size: int) -> None:
    """Eager, warm, and captured on each rank's own thread, twice."""
    ranks = opened(host_library, world_size)

    def step(rank: int) -> list[bytes]:
        own = ranks[rank]
        found = []
        for timeout_s in (TIMEOUT_S, None):
            own.clear()
            own.gather(timeout_s)
            found.append(own.gathered())
        graph = own.captured(2)
        for _ in range(2):
            own.clear()
            graph.launch(own.stream)
            found.append(own.gathered())
        assert own.communicator.async_error() is None
        return found

    assert on_ranks(world_size, step) == [[expected(world_size)] * 4] * world_size
    assert destroyed(ranks) == [True] * world_size


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sums_are_right(host_library: NcclLibrary, world_size: int) -> None:
    ranks = opened(host_library, world_size)
    num_elements = CHUNK // 4

    def step(rank: int) -> list[float]:
        own = ranks[rank]
        assert own.window is not None and own.shard is not None
        given = (ctypes.c_float * (num_elements * world_size)).from_buffer(own.window)
        given[:] = [float(rank + 1) * (1 + i // num_elements) for i in range(len(given))]
        own.communicator.reduce_scatter(
            own.shard.address, own.window.address, num_elements, "float32", own.stream, TIMEOUT_S
        )
        assert own.stream.synchronize(TIMEOUT_S)
        return list((ctypes.c_float * num_elements).from_buffer_copy(own.shard))

    total = sum(range(1, world_size + 1))
    sums = [[float(total * (rank + 1))] * num_elements for rank in range(world_size)]
    assert on_ranks(world_size, step) == sums
    assert destroyed(ranks) == [True] * world_size


def test_a_rank_that_never_comes(host_library: NcclLibrary) -> None:
    with pytest.raises(NcclError, match=r"^ncclCommInitRankConfig did not return within 0.05 s"):
        Communicator(host_library, host_library.unique_id(), 2, 0, "weights", SHORT_S)


def test_windows_that_do_not_match_end_bounded(host_library: NcclLibrary) -> None:
    """One rank registers, the other does not: the first says so by name, and both can end."""
    ranks = opened(host_library, 2)
    memory = ranks[0].communicator.allocate(CHUNK)
    with pytest.raises(NcclError, match=r"^ncclCommWindowRegister did not return within 0.05 s"):
        ranks[0].communicator.register(memory, SHORT_S)
    assert Communicator.abort_all([rank.communicator for rank in ranks], TIMEOUT_S) == [True, True]


def test_a_null_window_is_an_error_on_every_rank(host_library: NcclLibrary, host_path: str) -> None:
    """The library answers success, and there is no window."""
    with staged(host_path, "null_window"):
        unique_id = host_library.unique_id()

        def step(rank: int) -> None:
            with pytest.raises(NcclError, match="symmetric support is missing"):
                Rank(host_library, unique_id, 2, rank)

        on_ranks(2, step)


def test_an_aborted_gather_is_freed(host_library: NcclLibrary) -> None:
    """Rank 1 never gathers; rank 0's abort frees what waits for it, and later captures are refused."""
    ranks = opened(host_library, 2)
    on_ranks(2, lambda rank: ranks[rank].gather(TIMEOUT_S))
    ranks[0].gather()
    assert not ranks[0].stream.synchronize(SHORT_S)
    assert Communicator.abort_all([rank.communicator for rank in ranks], TIMEOUT_S) == [True, True]
    assert ranks[0].stream.synchronize(TIMEOUT_S)
    with pytest.raises(NcclError, match="broken: it was aborted, at op 0 of 1"):
        ranks[0].captured()


def test_an_abort_that_hangs_is_left_behind(host_library: NcclLibrary, host_path: str) -> None:
    """Both aborts are given up within the limit; a later try may succeed."""
    ranks = opened(host_library, 2)
    communicators = [rank.communicator for rank in ranks]
    with staged(host_path, "abort_hang"):
        assert Communicator.abort_all(communicators, SHORT_S) == [False, False]
        assert [communicator.is_broken for communicator in communicators] == [True, True]
    assert Communicator.abort_all(communicators, TIMEOUT_S) == [True, True]


ORDERS = list(itertools.permutations(("graph", "window", "communicator", "memory")))


def verdicts(order: Sequence[str]) -> list[str]:
    """What each rank is told, part by part: nothing but in the wrong order."""
    told = []
    is_destroyed = order.index("graph") < order.index("communicator")  # refused otherwise
    for i, part in enumerate(order):
        gone = order[:i]
        if part == "window" and "memory" in gone:
            told.append("")  # nothing to name it by: its communicator takes it along
        elif part in ("window", "communicator") and "graph" not in gone:
            told.append("graphs with its collectives are alive")
        else:
            is_late = part == "window" and is_destroyed and "communicator" in gone
            told.append("it was destroyed" if is_late else "")
    return told


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_every_order_of_ending(host_library: NcclLibrary, driver: Driver, order: tuple[str, ...]) -> None:
    """Graphs, windows, communicator, memory. Another order is refused or harmless, and never a hang."""
    ranks = opened(host_library, 2)
    on_ranks(2, lambda rank: ranks[rank].gather(TIMEOUT_S))
    graphs: dict[int, GraphExec] = dict(enumerate(on_ranks(2, lambda rank: ranks[rank].captured())))
    for index, rank in enumerate(ranks):
        graphs[index].launch(rank.stream)
    assert [rank.gathered() for rank in ranks] == [expected(2)] * 2

    def end(part: str, index: int) -> str:
        rank = ranks[index]
        try:
            if part == "graph":
                del graphs[index]
            elif part == "window" and rank.window is not None:
                rank.communicator.deregister(rank.window)
            elif part == "communicator":
                assert rank.communicator.destroy(TIMEOUT_S)
            elif part == "memory":
                rank.window = rank.shard = None
        except NcclError as error:
            return str(error)
        return ""

    for part, told in zip(order, verdicts(order), strict=True):
        for answer in on_ranks(2, lambda index, part=part: end(part, index)):
            assert told in answer
            assert bool(told) == bool(answer)
    assert destroyed(ranks) == [True, True]
    ranks.clear()
    del rank
    assert drained(driver)
