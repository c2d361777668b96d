"""Speculation on a CUDA device that the host driver plays: calls return at once, and streams alone keep the order."""

from __future__ import annotations

from typing import Any

import pytest
from cuda_rig import TIMEOUT_S, KernelModel, Plot
from fake_torch_cuda import FakeTorchCuda
from fault_tools import Latch, gemms_of, until
from ranks import run_on_ranks
from speculative_rig import DRAFT_LAYERS, TARGET_LAYERS

import graphshard
from graphshard.comm.group import Group
from graphshard.core.specs import DeviceSpec
from graphshard.device import CudaDevice
from graphshard.device.host import library_path
from graphshard.runtime.bind import Hooks
from graphshard.runtime.runtime import Runtime
from graphshard.runtime.speculative import Speculation, SpeculativeStep


class CudaPair:
    """Target and draft on one GPU, as far as they can tell; the target's last segment may be made to stand still."""

    def __init__(self, group: Group, transport: str, run: str) -> None:
        self.device = CudaDevice(0, library=str(library_path()), same_gpu=True)
        self.torch_cuda, self.latch = FakeTorchCuda(self.device.driver), Latch(is_open=True)
        self.models = {
            name: KernelModel(self.torch_cuda, Plot(), layers, name)
            for name, layers in (("target", TARGET_LAYERS), ("draft", DRAFT_LAYERS))
        }
        self.transport = transport
        target = self._compile(group, "target", stalls=self.latch.stalls(self._last_gemm(group)))
        draft = self._compile(group, "draft", head="outside")
        self.spec: Speculation = graphshard.speculate(target, draft, run=run)

    def _compile(self, group: Group, name: str, stalls: dict[int, int] | None = None, **choices: Any) -> Runtime:
        model, hooks = self.models[name], Hooks(poison=True, torch_cuda=self.torch_cuda, stalls=stalls or {})
        defaults = {"units": "layer", "prefetch_depth": 1, "min_shard_bytes": 0, "transport": self.transport}
        return graphshard.compile(
            model,
            group,
            checkpoint=model.tensors(),
            device=self.device,
            hooks=hooks,
            timeout_s=TIMEOUT_S,
            **(defaults | choices),
        )

    def _last_gemm(self, group: Group) -> int:
        spec, device = self.models["target"].spec(), DeviceSpec("cuda", "any", memory_bytes=1 << 40)
        options: dict[str, Any] = {"units": "layer", "prefetch_depth": 1, "min_shard_bytes": 0}
        plan = graphshard.make_plan(spec, group.world_size, device, transport=self.transport, **options)
        return gemms_of(graphshard.emit(spec, plan))[-1]

    def seen(self, step: SpeculativeStep) -> list[str]:
        """What segments saw that was not theirs, as work on the current stream finds it."""
        found: list[str] = []
        for name, piece in (("draft", step.draft()), ("target", step.target)):
            self.torch_cuda.kernel(lambda n=name, p=piece: found.extend(self.models[n].wrong(p.outputs)))
        self.torch_cuda.synchronize(self.torch_cuda.current_stream())
        return found


def under_a_target(group: Group, transport: str, run: str) -> dict[str, Any]:
    pair = CudaPair(group, transport, run)
    with pair.spec as spec:
        step = spec.graph(1)
        wrong: list[str] = []
        for _ in range(2):
            step.propose()
            step.verify()
            step.commit()
            wrong += pair.seen(step)
        spec.target.synchronize()
        spec.draft.synchronize()
        prefetching = spec.draft._streams["prefetch"]
        until(prefetching.is_idle, "the draft's unit has come")
        pair.latch.close()
        step.propose()
        step.verify()  # returns while the target stands still
        step.commit()
        slot, unit = next((s, u) for s, u in enumerate(spec.draft.programs[step.shapes.drafts[0]].entry) if u == 0)
        held = [spec.draft.held[slot] == unit, prefetching.is_idle()]
        group.barrier("all stand still")
        pair.latch.open()
        until(prefetching.is_idle, "the draft's unit comes once the target has ended")
        wrong += pair.seen(step)
        step.propose()
        step.verify()
        step.commit()
        wrong += pair.seen(step)
        group.barrier("all are through")
    return {"wrong": wrong, "held": held, "must_exit": spec.must_exit}


@pytest.mark.parametrize("run", ["graph", "eager"])
def test_the_prefetch_begins_when_the_target_has_ended(transport: str, run: str) -> None:
    """It is issued at once, and does not take bandwidth from the target's own gathers."""
    for found in run_on_ranks(under_a_target, 2, transport, run):
        assert found == {"wrong": [], "held": [True, False], "must_exit": None}
