"""A step that also holds a server's collectives: a tensor-parallel all-gather and reduce-scatter in every segment.

Segments enqueue on the current stream, as torch's do, so the server's calls lie on our compute stream, eagerly and in
the capture; weights are gathered by our communicator on another one. No pytest here: rank processes import this.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from fake_torch_cuda import FakeTorchCuda
from torch import Tensor

import graphshard
import graphshard.comm.nccl as nccl_transport
from graphshard._core import Calls, Communicator, Driver, Graph, Memory, NcclLibrary, OpList, Stream
from graphshard.comm.group import Group
from graphshard.comm.nccl_library import HOST_LIBRARY
from graphshard.core.errors import CommError
from graphshard.core.specs import BufferSpec, ModelSpec, SegmentSpec, StepShape, WeightSpec
from graphshard.device import CudaDevice
from graphshard.device.host import library_path
from graphshard.runtime.bind import Hooks
from graphshard.runtime.model import Segment, StepState
from graphshard.runtime.runtime import Runtime

NUM_LAYERS = 4
NUM_WEIGHTS = 3000
"""Elements of a layer's weight."""
SHARD = 64
"""Activations of a rank."""
TIMEOUT_S = 30.0
HOST_NCCL = library_path().parent / HOST_LIBRARY
_FLOAT, _SUM = 7, 0
_SIZE, _HANDLE = ctypes.c_size_t, ctypes.c_void_p


class UniqueId(ctypes.Structure):
    """ncclUniqueId."""

    _fields_ = (("bytes", ctypes.c_char * 128),)


class Server:
    """What the two kinds share."""

    num_left_out = 0
    """All-gathers to leave out from now on."""

    def drop_recorded(self) -> None:
        """The graph is gone, and the stream that its calls were recorded on is not yet."""

    def is_left_out(self) -> bool:
        self.num_left_out -= 1
        return self.num_left_out >= 0


class OrdinaryServer(Server):
    """A communicator as servers have it: NCCL called directly, default policy, buffers in no window."""

    def __init__(self, group: Group, driver: Driver) -> None:
        self._library = ctypes.CDLL(str(HOST_NCCL))
        driver.free_bytes  # noqa: B018 - makes the context current on this thread
        ident = UniqueId.from_buffer_copy(shared_id(group, driver))
        self._comm = _HANDLE()
        self.check(
            self._library.ncclCommInitRankConfig(ctypes.byref(self._comm), group.world_size, ident, group.rank, None)
        )
        self._memory = Memory(driver, 4 * SHARD * (1 + 2 * group.world_size))
        self.buffers = ServerBuffers(self._memory, group.world_size)

    @staticmethod
    def check(code: int) -> None:
        if code != 0:
            raise RuntimeError(f"NCCL error {code}")

    def all_gather(self, stream: Stream, is_capturing: bool) -> None:
        if self.is_left_out():
            return
        send, full, _ = self.buffers.addresses
        self.check(
            self._library.ncclAllGather(
                _HANDLE(send), _HANDLE(full), _SIZE(SHARD), _FLOAT, self._comm, _HANDLE(stream.handle)
            )
        )

    def reduce_scatter(self, stream: Stream, is_capturing: bool) -> None:
        send, _, scaled = self.buffers.addresses
        self.check(
            self._library.ncclReduceScatter(
                _HANDLE(scaled), _HANDLE(send), _SIZE(SHARD), _FLOAT, _SUM, self._comm, _HANDLE(stream.handle)
            )
        )

    def abort(self) -> None:
        self.check(self._library.ncclCommAbort(self._comm))

    def close(self) -> None:
        self.check(self._library.ncclCommDestroy(self._comm))


class SymmetricServer(Server):
    """A second communicator of our kind: zero-CTA policy, buffers in a window; captured through a recording."""

    def __init__(self, group: Group, driver: Driver) -> None:
        library = NcclLibrary(str(HOST_NCCL), driver)
        unique_id = shared_id(group, driver)
        self._driver = driver
        self.communicator = Communicator(library, unique_id, group.world_size, group.rank, "server", TIMEOUT_S)
        self._memory = self.communicator.allocate(4 * SHARD * (1 + 2 * group.world_size))
        self.communicator.register(self._memory, TIMEOUT_S)
        self.buffers = ServerBuffers(self._memory, group.world_size)
        self._recorded: list[object] = []

    def all_gather(self, stream: Stream, is_capturing: bool) -> None:
        if self.is_left_out():
            return
        send, full, _ = self.buffers.addresses
        if is_capturing:
            self._record(stream, ("all_gather", 0, 0, full, send, 4 * SHARD))
        else:
            self.communicator.all_gather(full, send, 4 * SHARD, stream)

    def reduce_scatter(self, stream: Stream, is_capturing: bool) -> None:
        send, _, scaled = self.buffers.addresses
        if is_capturing:
            self._record(stream, ("reduce_scatter", 0, 0, send, scaled, SHARD, "float32"))
        else:
            self.communicator.reduce_scatter(send, scaled, SHARD, "float32", stream)

    def _record(self, stream: Stream, op: tuple[object, ...]) -> None:
        ops = OpList(self._driver, [stream], 0, [op], [self.communicator])
        recording = ops.recording()
        recording.issue(Calls([]))
        self._recorded += [ops, recording]  # the graph points at them

    def drop_recorded(self) -> None:
        self._recorded.clear()

    def abort(self) -> None:
        assert self.communicator.abort(TIMEOUT_S)

    def close(self) -> None:
        assert self.communicator.destroy(TIMEOUT_S)


SERVERS: Mapping[str, Callable[[Group, Driver], OrdinaryServer | SymmetricServer]] = {
    "ordinary": OrdinaryServer,
    "symmetric": SymmetricServer,
}


class ServerBuffers:
    """One rank's shard of the activations, all of them, and all of them scaled; float32 in one memory."""

    def __init__(self, memory: Memory, world_size: int) -> None:
        floats = np.frombuffer(memory, dtype=np.float32)
        full = SHARD * world_size
        self.shard, self.full, self.scaled = floats[:SHARD], floats[SHARD:][:full], floats[SHARD + full :][:full]
        self.addresses = tuple(memory.address + 4 * offset for offset in (0, SHARD, SHARD + full))


class ServedModel:
    """Layer l: shard = weight + step + rank; gather; double; reduce-scatter; `out:l` = the shard."""

    def __init__(self, group: Group, driver: Driver, torch_cuda: FakeTorchCuda, server: Any) -> None:
        self._driver = driver
        self.rank, self.world_size = group.rank, group.world_size
        self._torch, self._server = torch_cuda, server
        self.weights = tuple(WeightSpec(f"w{layer}", (NUM_WEIGHTS,), "float32") for layer in range(NUM_LAYERS))
        self.segments = tuple(
            Segment(SegmentSpec("mlp", layer, (f"w{layer}",)), self._enqueuer(layer)) for layer in range(NUM_LAYERS)
        )

    def spec(self) -> ModelSpec:
        return ModelSpec("served", self.weights, tuple(segment.spec for segment in self.segments))

    def buffers(self, shape: StepShape) -> tuple[BufferSpec, ...]:
        outputs = (BufferSpec(f"out:w{layer}", (SHARD,), "float32", "output") for layer in range(NUM_LAYERS))
        return (BufferSpec("step", (shape.batch_size,), "float32", "input"), *outputs)

    def tensors(self) -> dict[str, Tensor]:
        return {
            weight.name: torch.arange(NUM_WEIGHTS, dtype=torch.float32) + 10_000 * layer
            for layer, weight in enumerate(self.weights)
        }

    def wrong(self, outputs: Mapping[str, Tensor], step: float) -> list[str]:
        """Small integers throughout, so sums are exact in any order."""
        found = []
        for name, weight in self.tensors().items():
            expected = 2 * self.world_size * (weight[:SHARD] + step + self.rank)
            if not torch.equal(outputs[f"out:{name}"], expected):
                found.append(f"{name} at step {step}: {outputs[f'out:{name}'][:3].tolist()}, not {expected[:3]}")
        return found

    def _enqueuer(self, layer: int) -> Callable[[StepState], None]:
        shard, full, scaled = self._server.buffers.shard, self._server.buffers.full, self._server.buffers.scaled

        def run(state: StepState) -> None:
            weight, step = state.weight(f"w{layer}").numpy(), state.buffer("step").numpy()
            output = state.buffer(f"out:w{layer}").numpy()
            stream = Stream.from_handle(self._driver, self._torch.current_stream())
            self._torch.kernel(lambda: np.add(weight[:SHARD], step[0] + self.rank, out=shard))
            self._server.all_gather(stream, self._torch.is_capturing)
            self._torch.kernel(lambda: np.multiply(full, 2, out=scaled))
            self._server.reduce_scatter(stream, self._torch.is_capturing)
            self._torch.kernel(lambda: np.copyto(output, shard))

        return run


class ServedRank:
    """This rank's runtime over a GPU that the host driver plays, and its server's communicator."""

    def __init__(self, group: Group, kind: str, **choices: Any) -> None:
        device = CudaDevice(0, library=str(library_path()), same_gpu=True)
        self.driver, self.torch_cuda = device.driver, FakeTorchCuda(device.driver)
        self.server = SERVERS[kind](group, device.driver)
        self.model = ServedModel(group, device.driver, self.torch_cuda, self.server)
        defaults: dict[str, Any] = {"min_shard_bytes": 0, "units": "layer", "prefetch_depth": 1, "transport": "nccl"}
        with patch.object(nccl_transport, "find_library", lambda device: HOST_NCCL):  # a GPU's is the vendor's
            self.runtime: Runtime = graphshard.compile(
                self.model,
                group,
                checkpoint=self.model.tensors(),
                device=device,
                timeout_s=TIMEOUT_S,
                hooks=Hooks(poison=True, torch_cuda=self.torch_cuda),
                **(defaults | choices),
            )

    def wrong_after(self, act: Callable[[], object], step: float) -> list[str]:
        """What the outputs are that they should not be, once `act` is done."""
        runtime = self.runtime
        shape = min(runtime.programs)
        runtime.buffers(shape, "input")["step"].fill_(step)
        outputs = runtime.buffers(shape, "output")
        for tensor in outputs.values():
            tensor.zero_()
        act()
        for stream in runtime._streams.values():
            assert stream.synchronize(TIMEOUT_S)
        return self.model.wrong(outputs, step)

    def in_order(self, seed: int) -> Callable[[], None]:
        """A launch of the captured step whose nodes run in the order of `seed`."""
        captured = self.runtime.graph(1)._captured
        assert captured is not None
        exec = Graph.from_handle(self.driver, captured.handle, captured).instantiate("cooperative", seed)
        return lambda: exec.launch(captured.bound.streams[0])

    def close(self) -> None:
        """Graphs first, as they point at the server's calls; those know our compute stream."""
        self.runtime.graph(1).close()
        self.server.drop_recorded()
        self.runtime.close()
        self.server.close()


def serve(group: Group, kind: str, choices: dict[str, Any], num_orders: int) -> dict[str, Any]:
    """Eager steps and replays in turn, then replays in seeded orders, other ones on each rank."""
    rank = ServedRank(group, kind, **choices)
    acts = {"eager": lambda: rank.runtime.run(1), "graph": rank.runtime.graph(1).replay}
    wrong = []
    for step, act in enumerate(("eager", "graph", "graph", "eager", "graph")):
        wrong += rank.wrong_after(acts[act], step)
    for number in range(num_orders):
        wrong += rank.wrong_after(rank.in_order((group.rank + 1) * 1000 + number), number)
    issued = issue_order(rank)
    rank.close()
    return {"wrong": wrong, "issued": issued}


def issue_order(rank: ServedRank) -> list[str]:
    """What lies in the captured step, in the order in which it was issued: `gather 3`, `server`."""
    captured = rank.runtime.graph(1)._captured
    assert captured is not None
    bound = captured.bound
    kinds = [kind for _, kind, *_ in bound.op_list.ops()]
    order: list[str] = []
    at = 0
    for op, _, begin, end in captured.spans():
        if begin > at:
            order.append("server")
        if kinds[op] == "all_gather":
            order.append(f"gather {bound.program.ops[bound.sources[op]].unit}")  # type: ignore[union-attr]
        at = end
    return order


def leave_one_out(group: Group, kind: str, limit_s: float) -> dict[str, Any]:
    """Rank 1's server skips one call of an eager step; what its ranks are told, and how both close."""
    rank = ServedRank(group, kind)
    runtime = rank.runtime
    wrong = rank.wrong_after(lambda: runtime.run(1), 1)
    group.barrier("all are right")
    runtime.timeout_s = limit_s
    rank.server.num_left_out = group.rank
    text = ""
    for _ in range(3):  # two may be in flight
        try:
            runtime.run(1)
        except CommError as error:
            text = str(error)
            break
    group.barrier("all were told")
    rank.server.abort()
    for stream in runtime._streams.values():
        assert stream.synchronize(TIMEOUT_S), "what waited for the server's call goes on"
    runtime.graph(1).close()
    rank.server.drop_recorded()
    runtime.close()
    return {"wrong": wrong, "text": text, "must_exit": runtime.must_exit}


def shared_id(group: Group, driver: Driver) -> bytes:
    """A unique id that rank 0 makes for all."""
    made = NcclLibrary(str(HOST_NCCL), driver).unique_id().hex() if group.rank == 0 else ""
    return bytes.fromhex(str(group.all_gather(made, name="the server's unique id")[0][0]))
