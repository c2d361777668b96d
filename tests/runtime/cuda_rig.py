"""Ranks whose compute is torch's on CUDA, as far as the runtime can see: `FakeTorchCuda` over the host driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from byte_model import ByteModel
from fake_torch_cuda import FakeTorchCuda
from ranks import run_on_ranks

import graphshard
from graphshard.comm.group import Group
from graphshard.core.plan import Plan
from graphshard.core.specs import SegmentSpec, StepShape
from graphshard.device import CudaDevice, open_device
from graphshard.device.host import library_path
from graphshard.runtime.bind import BoundProgram, Hooks
from graphshard.runtime.cuda.compute import CudaCompute
from graphshard.runtime.cuda.step import CapturedStep
from graphshard.runtime.model import Segment, StepState
from graphshard.runtime.runtime import Runtime
from graphshard.schedule.auto import make_plan

TIMEOUT_S = 30.0
LAYERS = ((300, 5000), (4096,), (1, 77, 800))


@dataclass
class Plot:
    """What tests let segments do besides: `before[path]` is called on the host when that segment is run."""

    before: dict[str, Callable[[], object]] = field(default_factory=dict)
    runs: list[str] = field(default_factory=list)


class KernelModel(ByteModel):
    """Byte segments that enqueue a kernel on the current stream, as torch's do, instead of computing at once."""

    def __init__(
        self, torch_cuda: FakeTorchCuda, plot: Plot, layers: Sequence[Sequence[int]] = LAYERS, name: str = "kernels"
    ) -> None:
        super().__init__(layers, name=name)
        self.segments = tuple(Segment(s.spec, self._enqueuer(s.spec, torch_cuda, plot)) for s in self.segments)

    @staticmethod
    def _enqueuer(spec: SegmentSpec, torch_cuda: FakeTorchCuda, plot: Plot) -> Callable[[StepState], None]:
        def run(state: StepState) -> None:
            plot.runs.append(spec.path)
            plot.before.get(spec.path, lambda: None)()
            pairs = [(state.buffer(f"{spec.path}:{name}"), state.weight(name)) for name in spec.reads]
            views = [(out.numpy().data, weight.numpy().data) for out, weight in pairs]

            def kernel() -> None:
                for out, weight in views:
                    out[:] = weight

            torch_cuda.kernel(kernel)

        return run


class Rig:
    """A runtime with all its memory and lists, and the CUDA compute beside the host's."""

    def __init__(self, runtime: Runtime, model: KernelModel, torch_cuda: FakeTorchCuda, plot: Plot) -> None:
        self.runtime, self.model, self.torch_cuda, self.plot = runtime, model, torch_cuda, plot
        self.shapes = sorted(runtime.programs, reverse=True)
        self.streams = tuple(runtime._streams.values())
        self.compute = CudaCompute(runtime._compute, torch_cuda, self.streams, timeout_s=TIMEOUT_S)
        plot.runs.clear()

    @property
    def shape(self) -> StepShape:
        return self.shapes[0]

    def bound(self, shape: StepShape | None = None) -> BoundProgram:
        return self.runtime._bound[shape or self.shape]

    def capture(self, shape: StepShape | None = None) -> CapturedStep:
        return self.compute.capture(shape or self.shape, self.bound(shape))

    def wrong_after(self, act: Callable[[], object]) -> list[str]:
        """What the segments saw that was not theirs, when `act` and all that it enqueued is done."""
        outputs = self.runtime.buffers(self.shape, "output")
        for tensor in outputs.values():
            tensor.zero_()
        act()
        self.synchronize()
        return self.model.wrong(outputs)

    def synchronize(self) -> None:
        for stream in self.streams:
            assert stream.synchronize(TIMEOUT_S)


class Rank:
    """This rank's runtime on a GPU of its own, as far as it can tell."""

    def __init__(self, group: Group, **choices: Any) -> None:
        """`stalls` and `look_s` are `Hooks`, `before` is the plot; the rest is for `graphshard.compile`."""
        self.device = CudaDevice(0, library=str(library_path()), same_gpu=True)
        self.torch_cuda, self.plot = FakeTorchCuda(self.device.driver), Plot()
        self.model = KernelModel(self.torch_cuda, self.plot)
        stalls = choices.pop("stalls", {})
        self.plot.before.update(choices.pop("before", {}))
        look_s = choices.pop("look_s", 0.05)
        defaults = {"min_shard_bytes": 0, "capture_sizes": [1], "timeout_s": TIMEOUT_S}
        self.runtime: Runtime = graphshard.compile(
            self.model,
            group,
            checkpoint=self.model.tensors(),
            device=self.device,
            hooks=Hooks(poison=True, torch_cuda=self.torch_cuda, stalls=stalls, look_s=look_s),
            **(defaults | choices),
        )

    def wrong_after(self, act: Callable[[], object]) -> list[str]:
        """As a caller sees it: outputs are read by work on the current stream, behind the step."""
        outputs = self.runtime.buffers(min(self.runtime.programs), "output")
        seen: list[str] = []
        for tensor in outputs.values():
            tensor.zero_()
        act()
        self.torch_cuda.kernel(lambda: seen.extend(self.model.wrong(outputs)))
        self.torch_cuda.synchronize(self.torch_cuda.current_stream())
        return seen


@contextmanager
def open_rig(batch_sizes: Sequence[int] = (1,), **choices: Any) -> Iterator[Rig]:
    """Rank 0 of two, nothing captured; rank 1 has lent its window and does nothing."""
    device = open_device()
    torch_cuda, plot = FakeTorchCuda(device.driver), Plot()
    model = KernelModel(torch_cuda, plot)
    shapes = [StepShape(size) for size in batch_sizes]
    defaults: dict[str, Any] = {"min_shard_bytes": 0, "prefetch_depth": 1, "units": "layer"}
    plan = make_plan(model.spec(), 2, device.spec(), step_shapes=shapes, **(defaults | choices))
    runtimes: list[Runtime] = run_on_ranks(_compile, 2, model, plan)
    try:
        yield Rig(runtimes[0], model, torch_cuda, plot)
    finally:
        for runtime in runtimes:
            runtime.close()


def raiser(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def nth(number: int, act: Callable[[], object]) -> Callable[[], None]:
    """`act`, but only at the `number`-th call, from 1 on."""
    count = iter(range(1, 1 << 30))

    def call() -> None:
        if next(count) == number:
            act()

    return call


def _compile(group: Group, model: KernelModel, plan: Plan) -> Runtime:
    return graphshard.compile(
        model, group, checkpoint=model.tensors(), plan=plan, capture_sizes=(), hooks=Hooks(poison=True)
    )
