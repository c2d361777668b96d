"""Calls that wait for peers who never come: bounded, named, and left behind on threads of their own."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

import pytest
from device_helpers import TIMEOUT_S
from fake_nccl import FakeNccl, open_communicator

from graphshard._core import Communicator, Driver, Memory, NcclError, NcclLibrary, Stream

SHORT_S = 0.05  # for calls that are known not to return


def test_init_that_never_returns_is_bounded(fake: FakeNccl, library: NcclLibrary) -> None:
    fake.hang("ncclCommInitRankConfig")
    with pytest.raises(NcclError) as late:
        open_communicator(library, timeout_s=SHORT_S)
    assert (late.value.entry_point, late.value.code) == ("ncclCommInitRankConfig", 7)
    assert str(late.value).startswith(
        "ncclCommInitRankConfig did not return within 0.05 s: communicator 'weights', rank 1 of 2; a peer"
    )
    fake.release()
    assert fake.has_called("ncclCommAbort")  # it came up after all, for nobody


def calls_of(communicator: Communicator, driver: Driver) -> dict[str, Callable[[], object]]:
    own, other = communicator.allocate(4096), communicator.allocate(4096)
    communicator.register(other, TIMEOUT_S)
    stream = Stream(driver)
    address = own.address
    return {
        "ncclMemAlloc": lambda: communicator.allocate(1, SHORT_S),
        "ncclCommWindowRegister": lambda: communicator.register(own, SHORT_S),
        "ncclCommWindowDeregister": lambda: communicator.deregister(other, SHORT_S),
        "ncclAllGather": lambda: communicator.all_gather(address, address, 2048, stream, SHORT_S),
        "ncclReduceScatter": lambda: communicator.reduce_scatter(address, address, 512, "float32", stream, SHORT_S),
    }


def calls_for_peers(fake: FakeNccl) -> list[str]:
    """All calls but those that free memory, which dropped owners make when the streams are done."""
    return [call for call in fake.calls() if not call.startswith("ncclMemFree")]


BOUNDED = ("ncclMemAlloc", "ncclCommWindowRegister", "ncclCommWindowDeregister", "ncclAllGather", "ncclReduceScatter")


@pytest.mark.parametrize("entry_point", BOUNDED)
def test_every_call_with_a_limit_is_bounded(
    fake: FakeNccl, driver: Driver, communicator: Communicator, entry_point: str
) -> None:
    """Afterwards the communicator is broken, and every call is refused with the first reason."""
    calls = calls_of(communicator, driver)
    fake.hang(entry_point)
    with pytest.raises(NcclError, match=f"^{entry_point} did not return within 0.05 s") as late:
        calls[entry_point]()
    assert late.value.code == 7
    assert communicator.is_broken
    assert f"it is broken: {entry_point} did not return" in (communicator.async_error() or "")
    made = calls_for_peers(fake)
    for name, call in [*calls.items(), ("ncclCommDestroy", lambda: communicator.destroy(SHORT_S))]:
        with pytest.raises(NcclError, match=f"^{name} refused: .* it is broken: {entry_point} did not return"):
            call()
    assert calls_for_peers(fake) == made
    assert communicator.abort(TIMEOUT_S)  # although that call is stuck still


def test_limits_put_calls_on_other_threads(fake: FakeNccl, driver: Driver, communicator: Communicator) -> None:
    """Without one a collective is called here: a capture is its thread's."""
    memory, stream = communicator.allocate(4096), Stream(driver)
    communicator.all_gather(memory.address, memory.address, 2048, stream, TIMEOUT_S)
    communicator.all_gather(memory.address, memory.address, 2048, stream)
    communicator.reduce_scatter(memory.address, memory.address, 256, "bfloat16", stream, TIMEOUT_S)
    communicator.reduce_scatter(memory.address, memory.address, 256, "bfloat16", stream)
    assert fake.calls()[-4:] == [
        "ncclAllGather bytes=2048 type=1",
        "ncclAllGather* bytes=2048 type=1",
        "ncclReduceScatter count=256 type=9 op=0",
        "ncclReduceScatter* count=256 type=9 op=0",
    ]


def test_abort_that_never_returns_is_bounded(fake: FakeNccl, communicator: Communicator) -> None:
    fake.hang("ncclCommAbort")
    assert not communicator.abort(SHORT_S)
    assert communicator.is_broken
    assert not communicator.abort(SHORT_S)  # the same one: a communicator is freed once
    assert not communicator.destroy(SHORT_S)
    fake.release()
    assert communicator.abort(TIMEOUT_S)
    assert fake.names().count("ncclCommAbort") == 1
    assert "ncclCommDestroy" not in fake.names()


def test_aborts_run_in_parallel(fake: FakeNccl, library: NcclLibrary) -> None:
    """The first abort returns when the second has begun."""
    target, draft = open_communicator(library, "target"), open_communicator(library, "draft")
    fake.hang("ncclCommAbort", together=2)
    assert Communicator.abort_all([target, draft], TIMEOUT_S) == [True, True]
    assert (target.is_broken, draft.is_broken) == (True, True)


def test_aborts_in_parallel_share_one_limit(fake: FakeNccl, library: NcclLibrary) -> None:
    communicators = [open_communicator(library, name) for name in ("target", "draft")]
    fake.hang("ncclCommAbort")
    assert Communicator.abort_all(communicators, SHORT_S) == [False, False]
    fake.release()
    assert Communicator.abort_all(communicators, TIMEOUT_S) == [True, True]


def test_destroy_that_never_returns_is_bounded(fake: FakeNccl, communicator: Communicator) -> None:
    """A peer that is gone does not keep the others; an abort frees what waits for it."""
    fake.hang("ncclCommFinalize")
    assert not communicator.destroy(SHORT_S)
    assert communicator.is_broken
    assert communicator.abort(TIMEOUT_S)
    fake.release()
    assert fake.names()[-2:] == ["ncclCommFinalize", "ncclCommAbort"]


def test_destroy_is_asked_again(fake: FakeNccl, communicator: Communicator) -> None:
    fake.hang("ncclCommDestroy")
    assert not communicator.destroy(SHORT_S)
    assert not communicator.abort(SHORT_S)  # too late for one: it is being freed
    fake.release()
    assert communicator.destroy(TIMEOUT_S)
    assert "ncclCommAbort" not in fake.names()


def test_one_thread_at_a_time(fake: FakeNccl, driver: Driver, communicator: Communicator) -> None:
    memory, stream = communicator.allocate(4096), Stream(driver)
    fake.hang("ncclCommWindowRegister")
    thread = threading.Thread(target=communicator.register, args=(memory, TIMEOUT_S))
    thread.start()
    fake.await_stuck()
    with pytest.raises(NcclError, match="ncclCommWindowRegister is in progress in another thread") as refused:
        communicator.all_gather(memory.address, memory.address, 1, stream)
    assert refused.value.entry_point == "ncclAllGather"
    assert communicator.async_error() is None
    fake.release()
    thread.join(TIMEOUT_S)
    assert not communicator.is_broken
    communicator.all_gather(memory.address, memory.address, 1, stream)


def test_ctrl_c_ends_the_wait(fake: FakeNccl, communicator: Communicator) -> None:
    memory = communicator.allocate(4096)
    fake.hang("ncclCommWindowRegister")
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        fake.await_stuck()
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        communicator.register(memory, TIMEOUT_S)
    thread.join(TIMEOUT_S)
    assert "ncclCommWindowRegister was interrupted" in (communicator.async_error() or "")


def test_errors_of_the_library_break_it(fake: FakeNccl, driver: Driver, communicator: Communicator) -> None:
    """Arguments that are refused do not."""
    memory, stream = communicator.allocate(4096), Stream(driver)

    def gather() -> None:
        communicator.all_gather(memory.address, memory.address, 1, stream)

    fake.fail("ncclAllGather", 4)
    with pytest.raises(NcclError, match=r"^ncclAllGather failed: ncclInvalidArgument \(4\)"):
        gather()
    assert not communicator.is_broken
    fake.fail("ncclAllGather", 6)
    with pytest.raises(NcclError, match=r"^ncclAllGather failed: ncclRemoteError \(6\)"):
        gather()
    fake.fail("", 0)
    with pytest.raises(NcclError, match=r"^ncclAllGather refused: .* broken: ncclAllGather failed: ncclRemoteError"):
        gather()


def test_asynchronous_errors_are_told_and_break_it(fake: FakeNccl, communicator: Communicator) -> None:
    fake.set_async(7)
    assert communicator.async_error() is None
    fake.set_async(6)
    found = communicator.async_error()
    assert found is not None
    assert found.startswith("communicator 'weights', rank 1 of 2: asynchronous error ncclRemoteError (6)")
    assert found.endswith("last error: the fake was told to")
    fake.set_async(0)
    assert "broken: asynchronous error ncclRemoteError" in (communicator.async_error() or "")


def test_addresses_are_looked_up(driver: Driver, communicator: Communicator) -> None:
    memory, stream = Memory(driver, 4096), Stream(driver)
    address = memory.address
    for destination, source, num_bytes in ((address, address, 2049), (address, 64, 1), (address, address, 1 << 63)):
        with pytest.raises(RuntimeError, match=r"^ncclAllGather refused: "):
            communicator.all_gather(destination, source, num_bytes, stream)
    with pytest.raises(RuntimeError, match=r"^ncclReduceScatter refused: "):
        communicator.reduce_scatter(memory.address, memory.address, 513, "float32", stream)
    with pytest.raises(ValueError, match="dtype 'int8' is unknown"):
        communicator.reduce_scatter(memory.address, memory.address, 1, "int8", stream)
