"""A look at every ATen call of a warm-up: what no capture should hold is refused with the op's name, before one begins.

A capture itself only says that something was not permitted. Kernels that are launched past ATen are not seen.
"""

from __future__ import annotations

from typing import Any

from graphshard.core.errors import DeviceError
from graphshard.runtime.aten import AtenMode
from graphshard.runtime.cuda.torch_cuda import LEGACY_STREAMS, TorchCuda
from graphshard.runtime.refusals import refuse, why_not_random


class WarmUpWatch(AtenMode):  # type: ignore[no-untyped-call]
    """Refuses work on a legacy stream, and random numbers."""

    def __init__(self, torch_cuda: TorchCuda) -> None:
        super().__init__()
        self._torch = torch_cuda
        self.error: DeviceError | None = None
        """The first refusal: whoever swallows it has not got past it."""

    def on_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call, unless it is refused."""
        try:
            self._check(func, args, kwargs)
        except DeviceError as error:
            self.error = self.error or error
            raise
        return func(*args, **kwargs)

    def _check(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stream = self._torch.current_stream()
        if stream in LEGACY_STREAMS:
            refuse(
                str(func),
                f"it runs on a default stream (handle {stream}), which waits for all other streams; leave the current "
                "stream as the segment finds it, or use a torch.cuda.Stream that joins it again",
            )
        reason = why_not_random(func, args, kwargs)
        if reason is not None:
            refuse(str(func), reason)
