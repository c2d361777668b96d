"""A weight's right bytes between steps, whatever its slot holds: the weight, gathered, on private memory."""

from __future__ import annotations

from torch import Tensor

from graphshard.core.errors import SpecError
from graphshard.runtime.borrowing import private_copy
from graphshard.runtime.runtime import Runtime


def whole_weight(runtime: Runtime, name: str) -> Tensor:
    """A private copy of weight `name`, with its strides.

    Order:   after the last step.
    Blocks:  the host, bounded by the runtime's timeout. No other rank takes part under `pull`; under `nccl` all ranks
             ask for the same weights in the same order, or end in one named error.
    Capture: no.

    Raises:
        ProgramError: a step of this thread is open, or the runtime is closed.
        CommError: the weights are of no version, since an update did not end.
    """
    layout = runtime.layout
    with runtime.turn.lock:
        runtime.check_weights()
        runtime.turn.wait_until_free()
        if name in runtime.memory.borrowed:
            return private_copy(runtime.memory.borrowed[name])
        for view in layout.resident:
            if view.weight == name:
                return runtime.memory.private(view, None)
        for unit in layout.units:
            for view in unit.views:
                if view.weight == name:
                    slot = next(stay.slot for stay in runtime.plan.residencies if stay.unit == unit.unit)
                    runtime.gather_now(unit.unit, slot)
                    return runtime.memory.private(view, slot)
    raise SpecError(f"model {runtime.model.name} has no weight {name!r}")
