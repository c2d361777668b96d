"""graphshard: 1/N of the weights on each of N ranks, gathered just before they are used, inside a captured graph.

Names are imported when they are first used: plans and programs need neither torch nor the extension.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphshard import formats, recipes
    from graphshard.api import attach, compile, prepare
    from graphshard.comm.group import Group, LocalGroup
    from graphshard.comm.rejoin import rejoin_group
    from graphshard.comm.rendezvous import init_group
    from graphshard.core.errors import CommError, DeviceError, GraphshardError, LoadError, ProgramError, SpecError
    from graphshard.core.plan import Plan
    from graphshard.core.program import Program
    from graphshard.core.specs import BufferSpec, ModelSpec, SegmentSpec, StepShape, WeightSpec
    from graphshard.device import open_device
    from graphshard.runtime.attach import Attached
    from graphshard.runtime.engine import Prepared
    from graphshard.runtime.graphs import StepGraph
    from graphshard.runtime.loop import StepLoop
    from graphshard.runtime.model import Segment, SegmentedModel, StepState
    from graphshard.runtime.runtime import Runtime
    from graphshard.runtime.speculative import Speculation, SpeculativeStep, speculate
    from graphshard.schedule.auto import make_plan
    from graphshard.schedule.emit import emit
    from graphshard.verify import verify

_HOMES = {
    "graphshard.api": ("attach", "compile", "prepare"),
    "graphshard.comm.group": ("Group", "LocalGroup"),
    "graphshard.comm.rejoin": ("rejoin_group",),
    "graphshard.comm.rendezvous": ("init_group",),
    "graphshard.core.errors": (
        "CommError",
        "DeviceError",
        "GraphshardError",
        "LoadError",
        "ProgramError",
        "SpecError",
    ),
    "graphshard.core.plan": ("Plan",),
    "graphshard.core.program": ("Program",),
    "graphshard.core.specs": ("BufferSpec", "ModelSpec", "SegmentSpec", "StepShape", "WeightSpec"),
    "graphshard.device": ("open_device",),
    "graphshard.runtime.attach": ("Attached",),
    "graphshard.runtime.engine": ("Prepared",),
    "graphshard.runtime.graphs": ("StepGraph",),
    "graphshard.runtime.loop": ("StepLoop",),
    "graphshard.runtime.model": ("Segment", "SegmentedModel", "StepState"),
    "graphshard.runtime.runtime": ("Runtime",),
    "graphshard.runtime.speculative": ("Speculation", "SpeculativeStep", "speculate"),
    "graphshard.schedule.auto": ("make_plan",),
    "graphshard.schedule.emit": ("emit",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_MODULES = ("formats", "recipes", "verify")

__all__ = [
    "Attached",
    "BufferSpec",
    "CommError",
    "DeviceError",
    "GraphshardError",
    "Group",
    "LoadError",
    "LocalGroup",
    "ModelSpec",
    "Plan",
    "Prepared",
    "Program",
    "ProgramError",
    "Runtime",
    "Segment",
    "SegmentSpec",
    "SegmentedModel",
    "SpecError",
    "Speculation",
    "SpeculativeStep",
    "StepGraph",
    "StepLoop",
    "StepShape",
    "StepState",
    "WeightSpec",
    "attach",
    "compile",
    "emit",
    "formats",
    "init_group",
    "make_plan",
    "open_device",
    "prepare",
    "recipes",
    "rejoin_group",
    "speculate",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"graphshard.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'graphshard' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
