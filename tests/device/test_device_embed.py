"""Embedding: the example against the installed package, and steps that Python captured, replayed and outlived by C."""

from __future__ import annotations

import ctypes
import gc
import runpy
import shlex
import subprocess
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
from census import no_growth
from device_helpers import TIMEOUT_S, Latch, drained, run_python
from embed_api import CALL, DRIVER, OK, PACKAGE, STATE, TIMEOUT, EmbeddedStep
from ranks import run_on_ranks

from graphshard._core import Calls, ControlPage, Driver, Memory, OpList, Step, StepOrder, Stream, Word
from graphshard.device.host import library_path

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "embed.cpp"


def compile_command(example: Path) -> list[str]:
    """The example's own line, as it stands in its comment."""
    lines = [line.removeprefix("//") for line in example.read_text().splitlines() if line.startswith("//   c++")]
    assert len(lines) == 1
    return shlex.split(lines[0].replace("<package>", str(PACKAGE)))


def test_the_example_builds_and_runs_against_the_installed_package(tmp_path: Path) -> None:
    (tmp_path / "embed.cpp").write_text(EXAMPLE.read_text())
    built = subprocess.run(compile_command(EXAMPLE), cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert built.returncode == 0 and built.stderr == "", built.stderr
    ran = subprocess.run(
        [str(tmp_path / "embed"), str(library_path())], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("10000 replays of 6 layers on 2 ranks, all bytes right, ")
    for bad in ("0", "-1", "many", "12x", "99999999999", ""):
        ran = subprocess.run(
            [str(tmp_path / "embed"), str(library_path()), bad], capture_output=True, text=True, timeout=TIMEOUT_S
        )
        assert ran.returncode == 2 and ran.stderr == f'embed: REPLAYS is "{bad}": give 1 to 999999999\n'
    needed = subprocess.run(["ldd", str(tmp_path / "embed")], capture_output=True, text=True, timeout=TIMEOUT_S).stdout
    assert f"libgraphshard.so => {PACKAGE}/lib/libgraphshard.so" in needed and "python" not in needed.split("/lib/")[0]
    libraries = [line.split()[0] for line in needed.splitlines()]
    assert not any("python" in Path(library).name for library in libraries)
    assert len(EXAMPLE.read_text().splitlines()) < 200


def test_the_example_of_a_captured_step_serves_what_python_decodes(tmp_path: Path) -> None:
    """C++ finds buffers by name and replays on the step's stream; two ranks."""
    source = EXAMPLE.with_name("serve_handle.cpp")
    (tmp_path / source.name).write_text(source.read_text())
    built = subprocess.run(compile_command(source), cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert built.returncode == 0 and built.stderr == "", built.stderr
    main = runpy.run_path(str(source.with_suffix(".py")))["main"]
    assert run_on_ranks(main, 2, str(tmp_path / "serve.so")) == [True, True]
    for file in (source, source.with_suffix(".py")):
        assert len(file.read_text().splitlines()) <= 50


class Pool:
    """Stands for torch's graph with its memory pool: an object that a step keeps."""


class Captured:
    """A step of Python's: slot = weights, output = slot + input, computed by a Python callable."""

    def __init__(self, driver: Driver, **parts: Any) -> None:
        self.weights, self.buffers = Memory(driver, 64), Memory(driver, 128)
        self.pool = Pool()
        self.stream, self.done = Stream(driver), Word(Memory(driver, 4))
        weights, buffers = memoryview(self.weights), memoryview(self.buffers)
        weights[:] = bytes(range(64))
        self.fails = [False]
        fails = self.fails

        def compute() -> None:
            if fails[0]:
                raise LookupError("no such token")
            buffers[64:] = bytes((weight + buffers[0]) % 256 for weight in weights)

        self.calls = Calls([compute])
        ops = [("call", 0, 0), ("write_value", 0, self.done.address, 1)]
        exec = OpList(driver, [self.stream], 0, ops).capture(self.calls).instantiate()
        base = self.buffers.address
        self.step = Step(
            exec,
            self.stream,
            (4, 1),
            [("tokens", base, 1)],
            [("logits", base + 64, 64)],
            calls=self.calls,
            done=self.done,
            keep=[self.buffers, self.weights, self.pool],
            **parts,
        )

    def open(self) -> EmbeddedStep:
        """What a server takes; this object may go then."""
        return EmbeddedStep(self.step.handle)


def right(value: int) -> bytes:
    return bytes((weight + value) % 256 for weight in range(64))


def replay_and_read(step: EmbeddedStep, value: int) -> bytes:
    ctypes.memset(step.buffer("input", "tokens").address, value, 1)
    assert step.replay() == OK, step.error
    assert step.wait() == OK, step.error
    logits = step.buffer("output", "logits")
    return ctypes.string_at(logits.address, logits.num_bytes)


def test_c_replays_what_python_captured_and_outlives_it(driver: Driver) -> None:
    captured = Captured(driver)
    alive = weakref.ref(captured.pool)
    step = captured.open()
    assert captured.step.num_references == 2
    assert (step.info.batch_size, step.info.tokens_per_sequence, step.info.stream) == (4, 1, captured.stream.handle)
    assert replay_and_read(step, 3) == right(3)
    del captured
    gc.collect()
    assert alive() is not None
    for value in range(100):
        assert replay_and_read(step, value) == right(value)
    step.release()
    gc.collect()
    while not drained(driver):
        pass
    assert alive() is None


def test_steps_leave_nothing_behind(driver: Driver) -> None:
    def use() -> None:
        captured = Captured(driver)
        step = captured.open()
        assert replay_and_read(step, 1) == right(1)
        del captured
        step.release()
        while not drained(driver):  # outputs come before the end of a replay
            pass

    use()
    with no_growth():
        for _ in range(50):
            use()


def test_threads_of_c_and_python_replay_side_by_side(driver: Driver) -> None:
    captured = Captured(driver)
    step = captured.open()
    statuses: list[int] = []

    def serve() -> None:
        statuses.extend(step.replay() or step.wait() for _ in range(50))

    threads = [threading.Thread(target=serve) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert statuses == [OK] * 150
    step.release()


def test_what_python_raised_is_an_error_of_the_wait(driver: Driver) -> None:
    captured = Captured(driver)
    step = captured.open()
    captured.fails[0] = True
    assert step.replay() == OK and step.wait() == CALL
    assert "a host function of the step failed: Traceback" in step.error
    assert step.error.endswith("LookupError: no such token")
    captured.fails[0] = False
    assert replay_and_read(step, 2) == right(2)
    step.release()


def test_weights_that_are_being_written_are_not_replayed(driver: Driver) -> None:
    page = ControlPage()
    step = Captured(driver, page=page).open()
    for epoch, status in ((1, STATE), (2, OK), (7, STATE)):
        page.set_epoch(epoch)
        assert step.replay() == status and step.epoch() == epoch
    assert "the weights are being written (epoch 7)" in step.error
    step.release()


def test_slots_are_filled_by_the_prefetch_list(driver: Driver) -> None:
    slot, shard, order = Memory(driver, 64), Memory(driver, 64), StepOrder(driver)
    memoryview(shard)[:] = b"\x05" * 64
    prefetch_stream = Stream(driver)
    prefetch = OpList(driver, [prefetch_stream], 0, [("copy", 0, slot.address, shard.address, 64)])
    captured = Captured(driver, prefetch=prefetch, prefetch_stream=prefetch_stream, slots=(7, 7), order=order)
    step = captured.open()
    assert step.info.has_prefetch == 1
    assert step.api.gs_step_prefetch(step.pointer) == OK
    assert step.api.gs_step_prefetch_wait(step.pointer, ctypes.c_double(TIMEOUT_S)) == OK
    assert bytes(slot) == b"\x05" * 64
    memoryview(shard)[:] = b"\x06" * 64
    for has_forgotten, byte in ((False, 5), (True, 6)):
        if has_forgotten:
            order.forget()
        assert replay_and_read(step, 1) == right(1) and bytes(slot) == bytes([byte]) * 64
    assert order.num_replays == 2
    step.release()


def test_waits_are_bounded_and_streams_of_others_are_ordered(driver: Driver, stream: Stream, latch: Latch) -> None:
    step = Captured(driver).open()
    latch.hold(stream)
    assert step.replay(stream.handle) == OK
    assert step.wait(0.02) == TIMEOUT
    assert step.replay() == OK and step.wait(0.02) == TIMEOUT  # on its own stream, behind the other
    latch.open()
    assert step.wait() == OK
    assert step.replay(1) == DRIVER and "default streams" in step.error
    step.release()


def test_the_interpreter_may_end_before_the_server_releases_its_step() -> None:
    ended = run_python(
        """
        import sys
        sys.path.insert(0, "tests/device"); sys.path.insert(0, "tests")
        import gc
        from test_device_embed import Captured, Driver, library_path
        step = Captured(Driver(str(library_path()))).open()
        gc.collect()
        assert step.replay() == 0
        print("ends")
        """
    )
    assert ended.returncode == 0 and ended.stdout == "ends\n" and ended.stderr == "", ended.stderr


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"shape": (0, 1)}, "step shape 0x1: both numbers start at 1"),
        ({"inputs": [("", 4096, 1)]}, "needs a name and an address"),
        ({"prefetch": True}, "a prefetch list's stream is the step's prefetch stream"),
        ({"prefetch_stream": True}, "a step with a prefetch list needs its stream, and the other way round"),
    ],
)
def test_steps_that_cannot_be_are_refused(driver: Driver, stream: Stream, change: dict[str, Any], reason: str) -> None:
    exec = OpList(driver, [stream], 0, []).capture(Calls([])).instantiate()
    if "prefetch_stream" in change:
        change = {"prefetch_stream": stream}
    if "prefetch" in change:
        change = {"prefetch": OpList(driver, [stream], 0, []), "prefetch_stream": Stream(driver)}
    with pytest.raises(ValueError, match=reason):
        Step(**{"exec": exec, "stream": stream, "shape": (1, 1), "inputs": [], "outputs": [], **change})
