"""The interpreter may end with communicators alive, stuck or half gone: silently and at once."""

from __future__ import annotations

import textwrap

import pytest
from device_helpers import run_python
from fake_nccl import FakeNccl

from graphshard._core import Driver
from graphshard.device.host import library_path

SETUP = """
    import ctypes, sys, threading
    from graphshard._core import Calls, Communicator, Driver, Memory, NcclError, NcclLibrary, OpList, Stream
    driver, library = Driver(sys.argv[1]), None
    library = NcclLibrary(sys.argv[2], driver)
    fake = ctypes.CDLL(sys.argv[2])
    stream = Stream(driver)
    communicator = Communicator(library, library.unique_id(), 1, 0, "weights", 60.0)
    memory = communicator.allocate(4096)
    communicator.register(memory, 60.0)
    op_list = OpList(driver, [stream], 0, [("all_gather", 0, 0, memory.address, memory.address, 1)], [communicator])
    graph_exec = op_list.capture(Calls([])).instantiate()
    graph_exec.launch(stream)
"""

ENDINGS = {
    "everything alive": "",
    "destroyed in order": """
    graph_exec = op_list = None
    assert stream.synchronize(60.0)
    assert communicator.destroy(60.0)
    """,
    "destroyed out of order": """
    try:
        communicator.destroy(60.0)
    except NcclError as error:
        assert "graphs with its collectives are alive" in str(error)
    """,
    "dropped": "communicator = graph_exec = op_list = memory = None",
    "dropped while an abort would hang": """
    fake.fake_hang(b"ncclCommAbort", 0)
    communicator = graph_exec = op_list = memory = None
    assert stream.synchronize(60.0)
    driver.num_retired
    fake.fake_await_stuck()
    """,
    "an abort that hangs": """
    fake.fake_hang(b"ncclCommAbort", 0)
    assert not communicator.abort(0.01)
    """,
    "a destroy that hangs": """
    graph_exec = None
    assert stream.synchronize(60.0)
    fake.fake_hang(b"ncclCommFinalize", 0)
    assert not communicator.destroy(0.01)
    """,
    "a first gather that hangs": """
    fake.fake_hang(b"ncclAllGather", 0)
    try:
        communicator.all_gather(memory.address, memory.address, 1, stream, 0.01)
    except NcclError as error:
        assert "did not return" in str(error)
    """,
    "a daemon thread in an init that hangs": """
    fake.fake_hang(b"ncclCommInitRankConfig", 0)
    threading.Thread(
        target=lambda: Communicator(library, library.unique_id(), 2, 1, "draft", 60.0), daemon=True
    ).start()
    fake.fake_await_stuck()
    """,
    "a cycle": """
    class Runtime: pass
    runtime = Runtime()
    runtime.self, runtime.parts = runtime, (communicator, memory, op_list, graph_exec)
    """,
}


RANKS = """
    import sys, threading
    from graphshard._core import Calls, Communicator, Driver, NcclLibrary, OpList, Stream
    driver = Driver(sys.argv[1])
    library = NcclLibrary(sys.argv[2], driver)
    unique_id, world_size, ranks, goes_on = library.unique_id(), 3, {}, threading.Event()

    def run(rank):
        stream = Stream(driver)
        communicator = Communicator(library, unique_id, world_size, rank, "weights", 60.0)
        memory = communicator.allocate(8192)
        communicator.register(memory, 60.0)
        gather = (memory.address, memory.address + 4096, 1024)
        communicator.all_gather(*gather, stream, 60.0)
        op_list = OpList(driver, [stream], 0, [("all_gather", 0, 0, *gather)], [communicator])
        graph_exec = op_list.capture(Calls([]), lock_timeout_s=60.0).instantiate()
        assert stream.synchronize(60.0)
        ranks[rank] = communicator, memory, op_list, graph_exec, stream
        goes_on.wait()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    while len(ranks) < world_size:
        assert all(thread.is_alive() for thread in threads)
"""

RANK_ENDINGS = {
    "everything alive": "",
    "a gather without peers": "ranks[0][2].issue(Calls([]))",
    "a captured gather without peers": "ranks[0][3].launch(ranks[0][4])",
    "an abort under a captured gather": """
    ranks[0][3].launch(ranks[0][4])
    Communicator.abort_all([ranks[rank][0] for rank in range(world_size)], 0.05)  # late, or before the gather
    """,
    "dropped": """
    goes_on.set()
    for thread in threads:
        thread.join()
    ranks.clear()
    """,
}


@pytest.mark.parametrize("ending", RANK_ENDINGS)
def test_interpreter_ends_silently_over_the_host_nccl(driver: Driver, ending: str) -> None:
    """Three ranks; a gather whose peers never come holds nobody up."""
    path = library_path().with_name("libgraphshard_hostnccl.so")
    code = "\n".join([*map(textwrap.dedent, (RANKS, RANK_ENDINGS[ending])), "print('done')", "sys.exit(7)"])
    done = run_python(code, driver.path, str(path))
    assert (done.returncode, done.stdout, done.stderr) == (7, "done\n", "")


@pytest.mark.parametrize("ending", ENDINGS)
def test_interpreter_ends_silently(fake: FakeNccl, driver: Driver, ending: str) -> None:
    code = "\n".join([*map(textwrap.dedent, (SETUP, ENDINGS[ending])), "print('done')", "sys.exit(7)"])
    done = run_python(code, driver.path, fake.path)
    assert (done.returncode, done.stdout, done.stderr) == (7, "done\n", "")
