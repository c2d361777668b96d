"""A step that is issued op by op each time, with the face of a captured one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from graphshard.core.specs import StepShape

if TYPE_CHECKING:
    from graphshard.runtime.runtime import Runtime


class EagerStep:
    """`Runtime.run` of one step shape, as a `StepGraph` is used; `inputs` and `outputs` are static tensors."""

    def __init__(self, runtime: Runtime, shape: StepShape) -> None:
        self.shape = shape
        self.inputs: dict[str, Tensor] = runtime.buffers(shape, "input")
        self.outputs: dict[str, Tensor] = runtime.buffers(shape, "output")
        self._runtime = runtime

    def replay(self) -> None:
        """Run the step: the list that a graph would be captured from, with the order and the errors of its replay."""
        self._runtime.run(self.shape.batch_size, self.shape.tokens_per_sequence)
