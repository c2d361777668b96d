"""What graphs see may not move: a buffer, a weight's view or an arena that did is found, and fails closed."""

from __future__ import annotations

import gc
import operator
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from byte_model import ByteModel
from ranks import run_on_ranks
from update_programs import LAYERS, raised, refusals, try_update, updating, version_of, version_seen

from graphshard.comm.group import Group
from graphshard.core.specs import StepShape
from graphshard.runtime.memory import BufferRow
from graphshard.runtime.runtime import Runtime
from graphshard.runtime.update.visible import moved_rows, moved_text

SHAPE = StepShape(1)
OUTPUT = "layers.0.s0:bytes.0.w0"


def move_buffer(runtime: Runtime, name: str = "step") -> Callable[[], None]:
    """A step has another tensor in a buffer's place; what is returned puts it back."""
    return _exchange(runtime.state(SHAPE)._buffers, name)  # type: ignore[arg-type]


def move_view(runtime: Runtime) -> Callable[[], None]:
    return _exchange(runtime.state(SHAPE)._weights["layers.1.s0"], "bytes.1.w0")  # type: ignore[arg-type]


def move_arena(runtime: Runtime) -> Callable[[], None]:
    return _exchange(runtime._compute._arena._blocks, 0)


def move_resident(runtime: Runtime) -> Callable[[], None]:
    return _exchange(runtime.memory.__dict__, "_resident_bytes")


def _exchange(holder: Any, key: Any) -> Callable[[], None]:
    put = dict.__setitem__ if isinstance(holder, dict) else operator.setitem  # buffers refuse it by themselves
    old = holder[key]
    put(holder, key, old.clone())

    def back() -> None:
        put(holder, key, old)

    return back


MOVES: dict[str, Callable[[Runtime], Callable[[], None]]] = {
    "buffer 1x1:step was 8 B of int64[1]": move_buffer,
    "weight layers.1.s0:bytes.1.w0 was 1501 B of uint8[1501]": move_view,
    "arena arena 0 was ": move_arena,
    "memory resident was ": move_resident,
}


@pytest.mark.parametrize("row", MOVES)
def test_whatever_moved_is_found_before_anything_is_written(row: str, transport: str) -> None:
    """All ranks keep the old weights and are told what moved, and where; that rank's graphs are closed."""

    def go(group: Group) -> list[Any]:
        model = ByteModel(LAYERS, temporaries=True)
        runtime, _ = updating(group, model, transport=transport, min_shard_bytes=500)
        with runtime:
            graph = runtime.graph(1)
            back = MOVES[row](runtime) if group.rank == 1 else lambda: None
            said = raised(lambda: runtime.update(model.tensors(1)))
            back()
            is_closed = graph.is_closed
            if is_closed:
                assert "is closed; capture again with Runtime.capture" in raised(graph.replay)
            runtime.capture()
            seen = [runtime.epoch, version_of(runtime, model, (0, 1))]
            runtime.update(model.tensors(1))
            return [said, is_closed, *seen, version_of(runtime, model, (0, 1))]

    first, second = run_on_ranks(go, 2)
    assert first[0] == second[0] and row in first[0], first[0]
    assert "update: on rank 1 1 of the buffers that graphs see moved since capture" in first[0]
    assert "nothing was written" in first[0] and "call Runtime.capture" in first[0]
    assert [first[1], second[1]] == [transport == "nccl", True]  # under nccl all ranks capture alike
    assert first[2:] == second[2:] == [0, 0, 1]


def test_capturing_again_sees_what_moved_and_frees_the_old_graph() -> None:
    def go(group: Group) -> list[Any]:
        model = ByteModel(LAYERS)
        runtime, _ = updating(group, model)
        with runtime:
            old = weakref.ref(runtime.graph(1)._captured)
            move_buffer(runtime, OUTPUT)
            runtime.capture()
            gc.collect()
            assert old() is None
            runtime.update(model.tensors(1))
            moved = runtime.state(SHAPE).buffer(OUTPUT)
            runtime.graph(1).replay()
            return model.wrong({OUTPUT: moved}, 1)

    assert run_on_ranks(go, 2) == [[], []]


def test_what_moves_while_weights_are_written_leaves_no_version() -> None:
    """A complete update and a capture on that rank are the way out."""

    def go(group: Group) -> list[Any]:
        model = ByteModel(LAYERS)
        runtime, stage = updating(group, model)
        with runtime:
            graph = runtime.graph(1)
            back: list[Callable[[], None]] = []
            if group.rank == 1:
                stage.arm("written", lambda: back.append(move_buffer(runtime)))
            said = raised(lambda: runtime.update(model.tensors(1)))
            assert runtime.epoch == 1 and graph.is_closed == (group.rank == 1)
            if group.rank == 0:
                assert all("on rank 1 1 of the buffers" in text for text in refusals(runtime))
            assert "the weights are of no version" in raised(runtime.capture)
            assert try_update(runtime, model.tensors(2)) == ""
            if group.rank == 1:
                runtime.capture()
            return [said, runtime.epoch, version_seen(runtime, model, runtime.graph(1).replay, (0, 1, 2))]

    first, second = run_on_ranks(go, 2)
    assert first == second and first[1:] == [2, 2]


def test_rows_are_compared_by_all_that_they_say() -> None:
    row = BufferRow("a", "weight", 64, 32, "float32", (2, 4), (4, 1))
    for other in (
        BufferRow("a", "weight", 128, 32, "float32", (2, 4), (4, 1)),
        BufferRow("a", "weight", 64, 64, "float32", (4, 4), (4, 1)),
        BufferRow("a", "weight", 64, 32, "int32", (2, 4), (4, 1)),
        BufferRow("a", "weight", 64, 32, "float32", (2, 4), (1, 2)),
        BufferRow("a", "buffer", 64, 32, "float32", (2, 4), (4, 1)),
    ):
        assert len(moved_rows([row], [other])) == 1
    assert moved_rows([row], [row, BufferRow("b", "weight", 0, 0)]) == []
    assert moved_text(moved_rows([row], [])) == (
        "1 of the buffers that graphs see moved since capture: weight a was 32 B of float32[2, 4] strides (4, 1) at "
        "0x40, is gone"
    )
