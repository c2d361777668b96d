"""A whole runtime on a CUDA device that the host driver plays: compile, warm up, run, capture, replay, close.

Kernels are host functions, see `fake_torch_cuda`; ranks are threads.
"""

from __future__ import annotations

import pytest
import torch
from cuda_rig import TIMEOUT_S, Rank
from fault_tools import Latch
from ranks import run_on_ranks

import graphshard
from graphshard.comm.group import Group
from graphshard.core.errors import CommError, DeviceError
from graphshard.device import CudaDevice
from graphshard.device.host import library_path
from graphshard.runtime.cuda.compute import NUM_WARM_UPS
from graphshard.runtime.cuda.in_flight import MAX_STEPS
from graphshard.runtime.runtime import Runtime

FIRST = "layers.0.s0"


def steps_of_all_kinds(group: Group, choices: dict[str, object]) -> list[str]:
    rank = Rank(group, **choices)
    with rank.runtime as runtime:
        graph = runtime.graph(batch_size=1)
        eager, replay = (lambda: runtime.run(1)), graph.replay
        acts = (replay, eager, eager, replay, replay, eager, replay)
        wrong = [line for act in acts for line in rank.wrong_after(act)]
        assert runtime.num_steps == len(acts)
        assert not graph.is_closed
        with rank.torch_cuda.on_stream(rank.torch_cuda.new_stream()):
            wrong += rank.wrong_after(replay)
    assert graph.is_closed and rank.torch_cuda.log.count("reset") == 1
    return wrong


@pytest.mark.parametrize(
    "choices",
    [
        {"prefetch_depth": 0},
        {"prefetch_depth": 1},
        {"prefetch_depth": 1, "head": "outside"},
        {"prefetch_depth": 1, "head": "tail"},
        {"num_copy_streams": 2},
        {"prefetch_depth": 1, "transport": "nccl"},
    ],
    ids=str,
)
def test_steps_eager_and_captured_on_each_rank(choices: dict[str, object]) -> None:
    assert run_on_ranks(steps_of_all_kinds, 2, choices) == [[], []]


def test_kernels_are_loaded_before_the_first_gather() -> None:
    def first_runs(group: Group) -> tuple[list[str], int]:
        order: list[str] = []
        check = Runtime.check_gathers

        def checked(self: Runtime, rank: int | None = None) -> None:
            order.append("gathers")
            check(self, rank)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Runtime, "check_gathers", checked)
            rank = Rank(group, capture_sizes=())
        with rank.runtime as runtime:
            return order, len(rank.plot.runs) // len(rank.model.segments) + runtime.num_steps

    assert run_on_ranks(first_runs, 1) == [(["gathers"], NUM_WARM_UPS)]


def test_warm_ups_and_captures_leave_buffers_as_they_were() -> None:
    def held(group: Group) -> bool:
        rank = Rank(group, capture_sizes=())
        with rank.runtime as runtime:
            shape = min(runtime.programs)
            buffers = runtime.state(shape)._buffers
            for tensor in buffers.values():
                tensor.fill_(3)
            before = {name: tensor.clone() for name, tensor in buffers.items()}
            runtime.capture()
            return all(buffers[name].equal(value) for name, value in before.items())

    assert run_on_ranks(held, 2) == [True, True]


def test_the_host_waits_only_for_a_third_step() -> None:
    def launched(group: Group) -> tuple[int, int]:
        latch = Latch()
        rank = Rank(group, stalls=latch.stalls(0), timeout_s=0.5, capture_sizes=())
        with rank.runtime as runtime:
            for _ in range(MAX_STEPS):
                runtime.run(1)  # returns while its first gather stands still
            with pytest.raises(CommError, match=r"rank 0 waited 0\.5 s for step 1 of shape 1x1 \(eager\)"):
                runtime.run(1)
            with pytest.raises(DeviceError, match="still running"):
                runtime.run(1)
            num_steps = runtime.num_steps
            latch.open()
            for stream in runtime._streams.values():
                assert stream.synchronize(TIMEOUT_S)
            assert rank.wrong_after(lambda: runtime.run(1)) == []
            return num_steps, runtime.num_steps

    assert run_on_ranks(launched, 1) == [(MAX_STEPS, MAX_STEPS + 1)]


def test_loops_are_ordered_on_the_callers_stream() -> None:
    def loop(group: Group) -> list[str]:
        rank = Rank(group, units="layer", prefetch_depth=1, capture_sizes=())
        with rank.runtime as runtime:

            def step() -> None:
                with runtime.begin_step(1) as step:
                    for layer in range(3):
                        step.before_layer(layer)
                        segments = [s for s in rank.model.segments if s.spec.layer == layer]
                        step.state.run(segments)  # kernels on the caller's stream
                        step.after_layer(layer)

            return [line for _ in range(5) for line in rank.wrong_after(step)]

    assert run_on_ranks(loop, 2) == [[], []]


def test_a_kernel_that_cannot_be_loaded_fails_compile_on_every_rank() -> None:
    def compile_it(group: Group) -> str:
        def refuse() -> None:
            raise RuntimeError("no kernel image")

        with pytest.raises(DeviceError) as caught:
            Rank(group, before={FIRST: refuse} if group.rank == 1 else {})
        return str(caught.value)

    for text in run_on_ranks(compile_it, 2):
        assert f"segment {FIRST} cannot be warmed up: no kernel image" in text
        assert "rank 1" in text or text.startswith("segment")


def test_modules_are_attached_on_the_host_only() -> None:
    def attach_it(group: Group) -> None:
        device = CudaDevice(0, library=str(library_path()), same_gpu=True)
        layers = torch.nn.ModuleList([torch.nn.Linear(4, 4)])
        before = [parameter.clone() for parameter in layers.parameters()]
        with pytest.raises(DeviceError, match="modules cannot be attached on cuda:0"):
            graphshard.attach(layers, group, device=device)
        assert all(map(torch.equal, layers.parameters(), before))

    run_on_ranks(attach_it, 2)
