"""Windows and the memory under them: who keeps what, and in which order things end."""

from __future__ import annotations

import gc

import pytest
from device_helpers import TIMEOUT_S, drained
from fake_nccl import FakeNccl, open_communicator

from graphshard._core import Calls, Communicator, Driver, Graph, Memory, NcclError, NcclLibrary, OpList, Stream


def captured_gather(driver: Driver, communicator: Communicator, memory: Memory, stream: Stream) -> Graph:
    op = ("all_gather", 0, 0, memory.address, memory.address, 2048)
    return OpList(driver, [stream], 0, [op], [communicator]).capture(Calls([]))


def test_memory_of_the_library_is_memory(fake: FakeNccl, driver: Driver, communicator: Communicator) -> None:
    """Zeroed, known to the driver, in whole granules; freed by the library when the last one is done with it."""
    memory, stream = communicator.allocate(5000), Stream(driver)
    assert (memory.num_bytes, memory.address % 4096, memory.is_read_only) == (5000, 0, False)
    assert bytes(memory) == bytes(5000)
    stream.fill(memory.address, 3, 5000)
    assert stream.synchronize(TIMEOUT_S)
    assert bytes(memory) == b"\x03" * 5000
    with pytest.raises(RuntimeError, match=r"5001 bytes at .* run past the end of the memory of 5000 bytes"):
        stream.fill(memory.address, 3, 5001)
    with pytest.raises(RuntimeError, match="not exportable"):
        memory.export_fd()
    view = memoryview(memory)
    del memory
    assert drained(driver)
    assert "ncclMemFree" not in fake.names()
    del view
    assert drained(driver)
    assert fake.names().count("ncclMemFree") == 1


def test_memory_keeps_the_library_not_the_communicator(fake: FakeNccl, driver: Driver, library: NcclLibrary) -> None:
    communicator = open_communicator(library)
    memory = communicator.allocate(4096)
    assert communicator.destroy(TIMEOUT_S)
    del communicator
    assert fake.names()[-2:] == ["ncclCommFinalize", "ncclCommDestroy"]
    assert bytes(memory) == bytes(4096)
    del memory
    assert drained(driver)
    assert fake.names()[-1] == "ncclMemFree"


def test_allocation_errors_name_the_call(fake: FakeNccl, communicator: Communicator) -> None:
    """The next one may succeed, on a new communicator."""
    with pytest.raises(RuntimeError, match="memory of 0 bytes is refused"):
        communicator.allocate(0)
    fake.fail("ncclMemAlloc", 1)
    with pytest.raises(
        NcclError, match=r"^ncclMemAlloc failed: ncclUnhandledCudaError \(1\).*allocation of 8192 bytes"
    ):
        communicator.allocate(8000)
    assert communicator.is_broken


def test_windows_are_symmetric_and_whole(fake: FakeNccl, communicator: Communicator) -> None:
    memory = communicator.allocate(5000)
    communicator.register(memory, TIMEOUT_S)
    assert fake.calls()[-1] == "ncclCommWindowRegister bytes=8192 flags=1"
    communicator.deregister(memory)
    assert fake.calls()[-1] == f"ncclCommWindowDeregister {memory.address}"
    communicator.register(memory, TIMEOUT_S)


def test_a_null_window_is_an_error(fake: FakeNccl, communicator: Communicator) -> None:
    """Success is not enough. The memory has no window then."""
    memory = communicator.allocate(4096)
    fake.null_window(True)
    with pytest.raises(
        NcclError, match="answered ncclSuccess with a null window: symmetric support is missing"
    ) as null:
        communicator.register(memory, TIMEOUT_S)
    assert null.value.entry_point == "ncclCommWindowRegister"
    assert f"memory of 4096 bytes at {memory.address:#x}" in str(null.value)
    with pytest.raises(NcclError, match="has no window"):
        communicator.deregister(memory)


def test_what_cannot_be_a_window_is_refused(fake: FakeNccl, driver: Driver, communicator: Communicator) -> None:
    """Refused here, before the library sees it."""
    memory, exported = communicator.allocate(4096), Memory(driver, 4096, exportable=True)
    fake.misalign(256)
    crooked = communicator.allocate(4096)
    with open(exported.export_fd(), "rb") as file:
        peers = Memory.import_fd(driver, file.fileno(), 4096)
    communicator.register(memory, TIMEOUT_S)
    made = fake.calls()
    for refused, why in (
        (memory, "is registered already: a buffer has one window"),
        (crooked, "does not begin at a multiple of 4096 bytes"),
        (peers, "is imported read-only"),
    ):
        with pytest.raises(NcclError, match=f"ncclCommWindowRegister refused: .*{why}") as error:
            communicator.register(refused, TIMEOUT_S)
        assert error.value.code == 4
    assert fake.calls() == made
    assert not communicator.is_broken
    communicator.register(exported, TIMEOUT_S)  # a window of one's own making is fine


def test_a_window_keeps_its_memory(fake: FakeNccl, driver: Driver, communicator: Communicator) -> None:
    """Memory dropped before its window is harmless."""
    memory = communicator.allocate(4096)
    communicator.register(memory, TIMEOUT_S)
    del memory
    assert drained(driver)
    assert "ncclMemFree" not in fake.names()
    assert communicator.destroy(TIMEOUT_S)
    assert drained(driver)
    assert fake.names()[-4:] == [
        "ncclCommWindowDeregister",
        "ncclCommFinalize",
        "ncclCommDestroy",
        "ncclMemFree",
    ]


def test_destroy_takes_windows_in_reverse(fake: FakeNccl, communicator: Communicator) -> None:
    memories = [communicator.allocate(4096) for _ in range(3)]
    for memory in memories:
        communicator.register(memory, TIMEOUT_S)
    assert communicator.destroy(TIMEOUT_S)
    assert fake.calls()[-5:] == [
        *(f"ncclCommWindowDeregister {memory.address}" for memory in reversed(memories)),
        "ncclCommFinalize",
        "ncclCommDestroy",
    ]
    assert not communicator.is_broken
    assert communicator.destroy(TIMEOUT_S)
    assert communicator.abort(TIMEOUT_S)
    assert not communicator.is_broken
    assert "it was destroyed" in (communicator.async_error() or "")
    with pytest.raises(NcclError, match=r"^ncclMemAlloc refused: .* it was destroyed"):
        communicator.allocate(1)


def test_graphs_go_before_windows_and_communicator(fake: FakeNccl, driver: Driver, communicator: Communicator) -> None:
    """NCCL waits for graphs forever, so the wrong order is refused."""
    memory, stream = communicator.allocate(4096), Stream(driver)
    communicator.register(memory, TIMEOUT_S)
    graph = captured_gather(driver, communicator, memory, stream)
    assert fake.calls()[-1].startswith("ncclAllGather*")  # on the capturing thread
    graph_exec = graph.instantiate()
    for wrong in (lambda: communicator.deregister(memory), lambda: communicator.destroy(TIMEOUT_S)):
        with pytest.raises(NcclError, match="graphs with its collectives are alive"):
            wrong()
    del graph
    with pytest.raises(NcclError, match="graphs with its collectives are alive"):
        communicator.destroy(TIMEOUT_S)
    del graph_exec
    communicator.deregister(memory)
    assert communicator.destroy(TIMEOUT_S)


def test_lists_may_outlive_the_communicator(fake: FakeNccl, driver: Driver, communicator: Communicator) -> None:
    """They are refused then, by name and place."""
    memory, stream = communicator.allocate(4096), Stream(driver)
    ops = [("fill", 0, memory.address, 1, 4096), ("all_gather", 0, 0, memory.address, memory.address, 2048)]
    op_list = OpList(driver, [stream], 0, ops, [communicator])
    assert communicator.destroy(TIMEOUT_S)
    for use in (lambda: op_list.issue(Calls([])), lambda: op_list.capture(Calls([]))):
        with pytest.raises(NcclError, match=r"^ncclAllGather refused: .* it was destroyed, at op 1 of 2") as refused:
            use()
        assert (refused.value.entry_point, refused.value.code) == ("ncclAllGather", 5)
    assert stream.synchronize(TIMEOUT_S)


def test_captures_on_a_broken_communicator_are_refused(driver: Driver, communicator: Communicator) -> None:
    """Each replay of such a capture would wait forever."""
    memory, stream = communicator.allocate(4096), Stream(driver)
    assert communicator.abort(TIMEOUT_S)
    with pytest.raises(NcclError, match=r"^ncclAllGather refused: .* it is broken: it was aborted, at op 0 of 1"):
        captured_gather(driver, communicator, memory, stream)


@pytest.mark.parametrize("has_cycle", [False, True])
def test_a_dropped_communicator_is_aborted(
    fake: FakeNccl, driver: Driver, library: NcclLibrary, has_cycle: bool
) -> None:
    """By gc alone, with its window; nobody waits for it."""
    communicator, stream = open_communicator(library), Stream(driver)
    memory = communicator.allocate(4096)
    communicator.register(memory, TIMEOUT_S)
    graph = captured_gather(driver, communicator, memory, stream)
    cycle: list[object] = [communicator, graph]
    if has_cycle:
        cycle.append(cycle)
    del communicator, graph, memory, cycle
    gc.collect()
    assert drained(driver)
    assert fake.has_called("ncclCommAbort")
    assert fake.has_called("ncclMemFree")
    names = fake.names()
    assert names.index("ncclCommAbort") < len(names) - 1 - names[::-1].index("ncclMemFree")
    assert "ncclCommFinalize" not in names
