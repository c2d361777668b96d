"""The yardstick of a captured step, with torch.cuda played by calls that run at once: does it do what the step does?"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

import graphshard
from graphshard.comm.group import Group
from graphshard.core.errors import ProgramError
from graphshard.core.specs import StepShape
from graphshard.gpu_check.naming import NamingModel, wrong
from graphshard.gpu_check.plain import PlainGraph
from graphshard.gpu_check.setup import on_threads
from graphshard.runtime.bind import Hooks
from graphshard.runtime.runtime import Runtime


class AtOnce:
    """A stream, an event and a graph whose work is done when it is asked for: a list's own order is one that holds."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self.is_recorded = False

    def record(self, stream: AtOnce) -> None:
        self.is_recorded = True

    def wait_event(self, event: AtOnce) -> None:
        assert event.is_recorded, "a wait for an event that nothing recorded"

    def instantiate(self) -> None:
        pass


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def capture(graph: AtOnce, stream: AtOnce, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        yield

    def view(self: PlainGraph, address: int, num_bytes: int) -> torch.Tensor:
        return torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=torch.uint8)

    for name in ("Stream", "Event", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, AtOnce)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(PlainGraph, "_view", view)


def compiled(group: Group, model: NamingModel, **choices: Any) -> Runtime:
    return graphshard.compile(
        model, group, checkpoint=model.tensors(), capture_sizes=(), min_shard_bytes=0, units="layer", **choices
    )


@pytest.mark.parametrize("choices", [{"prefetch_depth": 0}, {"prefetch_depth": 1, "num_copy_streams": 2}], ids=str)
def test_it_does_what_the_step_does(at_once: None, choices: dict[str, Any]) -> None:
    def rank(group: Group) -> list[str]:
        model = NamingModel()
        with compiled(group, model, **choices) as runtime:
            outputs = runtime.buffers(StepShape(1), "output")
            runtime.memory.slot(0).fill_(0xFF)
            for output in outputs.values():
                output.zero_()
            PlainGraph(runtime, StepShape(1), torch.device("cpu"))
            found = wrong(outputs, model.truth(torch.device("cpu")))
            group.barrier("read")
        return found

    assert on_threads(rank, 2) == [[], []]


def test_what_torch_has_no_call_for_is_refused(at_once: None) -> None:
    def rank(group: Group) -> str:
        model = NamingModel()
        with compiled(group, model, hooks=Hooks(poison=True)) as runtime:
            with pytest.raises(ProgramError) as caught:
                PlainGraph(runtime, StepShape(1), torch.device("cpu"))
            group.barrier("refused")
        return str(caught.value)

    assert all("is a fill, for which torch has no call" in text for text in on_threads(rank, 2))
