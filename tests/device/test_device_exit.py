"""The interpreter may end with everything alive and running: silently, at once, and with its own exit code."""

from __future__ import annotations

import textwrap

import pytest
from device_helpers import run_python

from graphshard._core import Driver

SETUP = """
    import sys, threading
    from graphshard._core import Calls, ControlPage, Driver, Event, Memory, OpList, Stream
    driver = Driver(sys.argv[1])
    streams = [Stream(driver) for _ in range(2)]
    memory, word, page, event = Memory(driver, 1 << 20, True), Memory(driver, 4), ControlPage(), Event(driver)
    view = memoryview(memory)
    count = [0]

    def work():
        count[0] += 1
        sum(range(2000))

    calls = Calls([work])
    ops = [("record", 0, 0), ("wait", 1, 0), ("fill", 1, memory.address, 1, 1 << 20), ("call", 1, 0), ("record", 1, 1),
           ("wait", 0, 1)]
    op_list = OpList(driver, streams, 2, ops)
    execs = [op_list.capture(calls).instantiate(executor) for executor in ("cooperative", "threaded")]
"""

ENDINGS = {
    "idle": "",
    "stalled stream": """
    streams[0].wait_value(word.address, 1)
    execs[0].launch(streams[0])
    op_list.issue(calls)
    """,
    "stalled in a graph": """
    stalled = OpList(driver, streams[:1], 0, [("call", 0, 0), ("wait_value", 0, word.address, 1), ("call", 0, 0)])
    stalled = stalled.capture(calls).instantiate("threaded")
    stalled.launch(streams[0])
    """,
    "calls in the queue": """
    for _ in range(20000):
        op_list.issue(calls)
        streams[0].call(work)
    """,
    "graphs in the queue": """
    for _ in range(5000):
        execs[0].launch(streams[0])
        execs[1].launch(streams[0])
    """,
    "a call that never ends": """
    started = threading.Event()
    streams[0].call(lambda: (started.set(), threading.Event().wait()))
    started.wait()
    """,
    "daemon threads": """
    def issue():
        while True:
            op_list.issue(calls)
            execs[0].launch(streams[0])
            streams[0].synchronize(60.0)
    for _ in range(3):
        threading.Thread(target=issue, daemon=True).start()
    while count[0] < 10:
        pass
    """,
    "a waiting daemon thread": """
    streams[0].wait_value(word.address, 1)
    waiting = threading.Event()
    threading.Thread(target=lambda: (waiting.set(), streams[0].synchronize(60.0)), daemon=True).start()
    waiting.wait()
    """,
    "an error that nobody asked for": """
    streams[0].call(lambda: 1 / 0)
    failing = Calls([lambda: 1 / 0])
    OpList(driver, streams[:1], 0, [("call", 0, 0)]).issue(failing)
    assert streams[0].synchronize(60.0)
    """,
    "a cycle": """
    class Runtime: pass
    runtime = Runtime()
    runtime.calls = Calls([lambda: runtime])
    runtime.execs, runtime.streams, runtime.view = execs, streams, view
    """,
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_interpreter_ends_silently(driver: Driver, ending: str) -> None:
    code = "\n".join([*map(textwrap.dedent, (SETUP, ENDINGS[ending])), "print('done')", "sys.exit(7)"])
    done = run_python(code, driver.path)
    assert (done.returncode, done.stdout, done.stderr) == (7, "done\n", "")


def test_use_after_the_exit_handler_is_refused(driver: Driver) -> None:
    code = """
    import atexit, sys
    def late():
        try:
            driver.total_bytes
        except Exception as error:
            print(error)
    atexit.register(late)  # runs after the extension's own handler, which is registered later
    from graphshard._core import Driver
    driver = Driver(sys.argv[1])
    """
    done = run_python(code, driver.path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "is closed: the interpreter is exiting" in done.stdout
