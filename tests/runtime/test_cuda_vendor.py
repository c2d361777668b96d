"""The seam over torch.cuda itself, with a torch.cuda that is played: which calls it makes, and what it puts back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from graphshard.runtime.cuda.torch_cuda import LEGACY_STREAMS, VendorTorchCuda

DEFAULT, OURS = 0, 0xABC0


class PlayedStream:
    def __init__(self, handle: int, device: Any = None) -> None:
        self.cuda_stream, self.device = handle, device

    def __repr__(self) -> str:
        return f"stream {self.cuda_stream:#x}"


class PlayedGraph:
    def __init__(self, keep_graph: bool = False) -> None:
        self.keep_graph = keep_graph


class PlayedTorch:
    """What `torch.cuda` is replaced by, attribute by attribute; `log` is in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = PlayedStream(DEFAULT)
        self.device_index = 1  # not the runtime's
        self.fails_at_end = False
        self.graph_arguments: dict[str, Any] = {}

    def install(self, patch: pytest.MonkeyPatch) -> None:
        played = self

        class Event:
            def record(self, stream: PlayedStream) -> None:
                played.log.append(f"record on {stream}")

            def wait(self, stream: PlayedStream) -> None:
                played.log.append(f"{stream} waits")

        @contextmanager
        def device(wanted: torch.device) -> Iterator[None]:
            before, played.device_index = played.device_index, wanted.index
            try:
                yield
            finally:
                played.device_index = before

        @contextmanager
        def stream(wanted: PlayedStream) -> Iterator[None]:
            before, played.current = played.current, wanted
            try:
                yield
            finally:
                played.current = before

        names = {
            "Event": Event, "CUDAGraph": PlayedGraph, "ExternalStream": PlayedStream,
            "graph": partial(PlayedCapture, self), "device": device, "stream": stream,
            "graph_pool_handle": lambda: (0, 7), "current_stream": lambda device: played.current,
            "set_stream": lambda stream: setattr(played, "current", stream),
        }  # fmt: skip
        for name, value in names.items():
            patch.setattr(torch.cuda, name, value)

    def end_allocating(self, index: int, pool: tuple[int, int]) -> None:
        if "allocator captures" not in self.log:
            raise RuntimeError("not currently recording to this pool")
        self.log.remove("allocator captures")
        self.log.append(f"allocator of {index} ends {pool}")


class PlayedCapture:
    """As torch.cuda.graph: if the capture cannot be ended, its stream stays the current one."""

    def __init__(self, played: PlayedTorch, graph: PlayedGraph, **arguments: Any) -> None:
        self._played = played
        played.graph_arguments = {"graph": graph, **arguments}

    def __enter__(self) -> None:
        played = self._played
        self._before, played.current = played.current, played.graph_arguments["stream"]
        played.log += ["begin", "allocator captures"]

    def __exit__(self, *_: object) -> None:
        played = self._played
        played.log.append("end")
        if played.fails_at_end:
            raise RuntimeError("capture was lost")
        played.log.remove("allocator captures")
        played.current = self._before


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> PlayedTorch:
    played = PlayedTorch()
    played.install(monkeypatch)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", played.end_allocating, raising=False)
    return played


@pytest.fixture
def seam(played: PlayedTorch) -> VendorTorchCuda:
    return VendorTorchCuda(0)


def test_current_stream_is_a_handle(played: PlayedTorch, seam: VendorTorchCuda) -> None:
    assert seam.current_stream() in LEGACY_STREAMS
    with seam.on_stream(OURS):
        assert (seam.current_stream(), played.device_index) == (OURS, 0)
    assert (seam.current_stream(), played.device_index) == (DEFAULT, 1)


def test_streams_are_joined_by_events(played: PlayedTorch, seam: VendorTorchCuda) -> None:
    seam.wait_for_current(OURS)
    seam.continue_after(OURS)
    assert played.log == ["record on stream 0x0", "stream 0xabc0 waits", "record on stream 0xabc0", "stream 0x0 waits"]


def test_captures_are_thread_local_and_share_a_pool(played: PlayedTorch, seam: VendorTorchCuda) -> None:
    graph = seam.new_graph()
    assert graph.keep_graph  # type: ignore[attr-defined]
    with seam.capture(graph, seam.new_pool(), OURS):
        assert (seam.current_stream(), played.device_index) == (OURS, 0)
    arguments = played.graph_arguments
    assert (arguments["graph"], arguments["pool"]) == (graph, (0, 7))
    assert arguments["capture_error_mode"] == "thread_local"
    assert arguments["stream"].cuda_stream == OURS and arguments["stream"].device == torch.device("cuda", 0)
    assert (seam.current_stream(), played.device_index) == (DEFAULT, 1)


@pytest.mark.parametrize("fails_inside", [False, True])
def test_a_lost_capture_gives_the_current_stream_back(
    played: PlayedTorch, seam: VendorTorchCuda, fails_inside: bool
) -> None:
    played.fails_at_end = True
    with pytest.raises(RuntimeError, match="capture was lost") as caught, seam.capture(seam.new_graph(), None, OURS):
        if fails_inside:
            raise KeyError("first")
    assert isinstance(caught.value.__context__, KeyError) is fails_inside
    assert (seam.current_stream(), played.device_index) == (DEFAULT, 1)


def test_a_lost_capture_ends_for_the_allocator_too(
    played: PlayedTorch, seam: VendorTorchCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[object] = []
    monkeypatch.setattr("graphshard.runtime.cuda.torch_cuda._lost", lost)
    graph = seam.new_graph()
    played.fails_at_end = True
    with pytest.raises(RuntimeError, match="capture was lost"), seam.capture(graph, seam.new_pool(), OURS):
        pass
    assert played.log == ["begin", "end", "allocator of 0 ends (0, 7)"]
    assert lost == [graph]  # the allocator asks it until the process ends


def test_an_error_in_a_capture_that_was_ended_leaves_nothing(
    played: PlayedTorch, seam: VendorTorchCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[object] = []
    monkeypatch.setattr("graphshard.runtime.cuda.torch_cuda._lost", lost)
    with pytest.raises(KeyError), seam.capture(seam.new_graph(), seam.new_pool(), OURS):
        raise KeyError("of the segment")
    assert played.log == ["begin", "end"] and lost == []


def test_a_stream_is_wrapped_once(played: PlayedTorch, seam: VendorTorchCuda) -> None:
    with seam.on_stream(OURS):
        first = played.current
    with seam.on_stream(OURS):
        assert played.current is first


def test_torch_has_what_the_seam_calls() -> None:
    """Names and arguments, in the torch that is installed here, whatever it was built for."""
    import inspect

    graph = inspect.signature(torch.cuda.graph.__init__).parameters
    assert {"cuda_graph", "pool", "stream", "capture_error_mode"} <= set(graph)
    assert "keep_graph" in inspect.signature(torch.cuda.CUDAGraph.__new__).parameters
    for method in ("instantiate", "replay", "reset", "raw_cuda_graph"):
        assert callable(getattr(torch.cuda.CUDAGraph, method))
    assert list(inspect.signature(torch.cuda.ExternalStream.__new__).parameters)[1:3] == ["stream_ptr", "device"]
    for name in ("current_stream", "set_stream", "stream", "device", "graph_pool_handle", "Event"):
        assert callable(getattr(torch.cuda, name))
