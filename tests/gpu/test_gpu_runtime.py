"""The runtime on a real card, ranks as threads on one GPU under pull: what `tests/runtime/test_cuda_*.py` play.

Bitwise equality throughout: the same kernels read the same bytes from equally aligned addresses.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import pytest
import torch
from ranks import run_on_ranks

import graphshard
from graphshard._core import Stream
from graphshard.comm.devices import probe_pull
from graphshard.comm.group import Group
from graphshard.core.errors import DeviceError
from graphshard.core.specs import StepShape
from graphshard.device import CudaDevice
from graphshard.models.config import LlamaConfig
from graphshard.models.llama import random_llama
from graphshard.runtime.bind import Hooks
from graphshard.runtime.device_bytes import device_bytes, read_bytes
from graphshard.runtime.model import StepState
from graphshard.runtime.runtime import Runtime

pytestmark = pytest.mark.gpu
TIMEOUT_S = 60.0
CONFIG = LlamaConfig(512, 256, 704, num_layers=4, num_heads=8, num_kv_heads=4, head_dim=32, dtype="bfloat16")
NOT_PERMITTED: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda logits: logits.sum().item(),
    "nonzero": lambda logits: logits.nonzero(),
}


def open_llama(group: Group, device: CudaDevice, **choices: object) -> Runtime:
    model, weights = random_llama(CONFIG, max_batch_size=4, cache_length=32)
    defaults: dict[str, object] = {"capture_sizes": [1, 4], "min_shard_bytes": 0, "timeout_s": TIMEOUT_S}
    if choices.get("plan") == "replicated":
        del defaults["min_shard_bytes"]
    return graphshard.compile(model, group, checkpoint=weights, device=device, **(defaults | choices))  # type: ignore[arg-type]


def decoded(runtime: Runtime, *, is_captured: bool, num_steps: int = 6, batch_size: int = 4) -> torch.Tensor:
    """The logits of a few steps, on the host."""
    shape = StepShape(batch_size)
    inputs = runtime.buffers(shape, "input")
    logits = []
    for step in range(num_steps):
        inputs["tokens"].copy_(torch.arange(batch_size)[:, None] * 7 + step)
        inputs["positions"].fill_(step)
        outputs = runtime.buffers(shape, "output")
        if is_captured:
            runtime.graph(batch_size).replay()
        else:
            runtime.run(batch_size)
        logits.append(outputs["logits"].cpu())  # ordered by the current stream alone
    return torch.stack(logits)


def test_memory_is_viewed_by_torch(cuda_device: CudaDevice) -> None:
    memory = cuda_device.allocate(4096)
    tensor = device_bytes(cuda_device, memory)
    assert tensor.is_cuda and tensor.data_ptr() == memory.address
    assert not bytes(read_bytes(tensor)).strip(b"\0")
    stream = Stream(cuda_device.driver)
    stream.fill(memory.address, 9, 4096)
    assert stream.synchronize(TIMEOUT_S)
    assert tensor.eq(9).all()


@pytest.mark.parametrize("world_size", [1, 2])
def test_windows_are_exported_mapped_and_copied(cuda_device: CudaDevice, world_size: int) -> None:
    run_on_ranks(lambda group: probe_pull(group, cuda_device, TIMEOUT_S), world_size)


@pytest.mark.parametrize("stream", ["default", "own"])
@pytest.mark.parametrize("choices", [{"prefetch_depth": 1}, {"prefetch_depth": 1, "num_copy_streams": 2}], ids=str)
def test_steps_equal_replicated_ones(cuda_device: CudaDevice, choices: dict[str, object], stream: str) -> None:
    def replicated(group: Group) -> torch.Tensor:
        with open_llama(group, cuda_device, plan="replicated") as runtime:
            return decoded(runtime, is_captured=False)

    def sharded(group: Group) -> list[torch.Tensor]:
        with open_llama(group, cuda_device, hooks=Hooks(poison=True), **choices) as runtime:
            used = torch.cuda.default_stream() if stream == "default" else torch.cuda.Stream()
            with torch.cuda.stream(used):
                return [decoded(runtime, is_captured=captured) for captured in (True, False, True)]

    (expected,) = run_on_ranks(replicated, 1)
    for rank in run_on_ranks(sharded, 2, timeout_s=120.0):
        for logits in rank:
            assert torch.equal(logits, expected)


def test_a_replay_returns_before_its_end(cuda_device: CudaDevice) -> None:
    def launch_s(group: Group) -> tuple[float, bool]:
        with open_llama(group, cuda_device) as runtime:
            graph = runtime.graph(1)
            graph.replay()
            torch.cuda.current_stream().synchronize()
            torch.cuda._sleep(200_000_000)  # cycles: about 0.1 s on the current stream
            begin = time.perf_counter()
            graph.replay()
            return time.perf_counter() - begin, torch.cuda.current_stream().query()

    seconds, is_done = run_on_ranks(launch_s, 1)[0]
    assert not is_done, f"the replay took {seconds:.3f} s of the host, and had ended"


def test_work_on_the_default_stream_is_refused(cuda_device: CudaDevice) -> None:
    def compile_it(group: Group) -> str:
        model, weights = random_llama(CONFIG, max_batch_size=1, cache_length=32)
        inner = model.segments[1].run

        def on_default(state: StepState) -> None:
            with torch.cuda.stream(torch.cuda.default_stream()):
                inner(state)

        object.__setattr__(model.segments[1], "run", on_default)
        with pytest.raises(DeviceError) as caught:
            graphshard.compile(model, group, checkpoint=weights, device=cuda_device)
        return str(caught.value)

    assert "runs on a default stream" in run_on_ranks(compile_it, 1)[0]


@pytest.mark.parametrize("call", NOT_PERMITTED)
def test_what_no_capture_permits_fails_and_leaves_nothing(cuda_device: CudaDevice, call: str) -> None:
    def fail_and_go_on(group: Group) -> bool:
        with open_llama(group, cuda_device, capture_sizes=()) as runtime:
            segment = runtime._compute.segments[-1]
            good = segment.run

            def bad(state: StepState) -> None:
                NOT_PERMITTED[call](state.buffer("logits"))

            free = []
            for _ in range(10):
                object.__setattr__(segment, "run", bad)
                with pytest.raises(DeviceError, match=r"segment head cannot be captured"):
                    runtime.capture()
                free.append(cuda_device.driver.free_bytes)
            object.__setattr__(segment, "run", good)
            runtime.capture()
            assert max(free[2:]) - min(free[2:]) <= 32 << 20
            return torch.isfinite(decoded(runtime, is_captured=True, batch_size=1)).all().item() is True

    assert run_on_ranks(fail_and_go_on, 1) == [True]


def test_memory_follows_the_graphs_that_live(cuda_device: CudaDevice) -> None:
    def counts(group: Group) -> tuple[bool, int]:
        with open_llama(group, cuda_device, capture_sizes=()) as runtime:
            bound, shape = runtime._bound[StepShape(1)], StepShape(1)
            cuda = runtime._cuda
            assert cuda is not None
            expected = decoded(runtime, is_captured=False, batch_size=1)
            first = cuda.capture(shape, bound)
            free = cuda_device.driver.free_bytes
            for _ in range(50):
                cuda.capture(shape, bound).close()  # and its workspace stays where `first` finds it
            gc.collect()
            torch.cuda.synchronize()
            lost = free - cuda_device.driver.free_bytes
            runtime.capture()
            same = torch.equal(decoded(runtime, is_captured=True, batch_size=1), expected)
            first.launch()
            torch.cuda.synchronize()
            return same, lost

    ((same, lost),) = run_on_ranks(counts, 1)
    assert same
    assert lost <= 32 << 20
