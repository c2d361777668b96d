"""Seeing every ATen call of a thread: the base of the dispatch modes that record, refuse or check them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class AtenMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, `on_call` makes the calls of its thread; calls inside that are not seen."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports torch._dynamo, a second and 70 MiB in every process, to disable it here

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def on_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `func(*args, **kwargs)` gives; or raise."""
        raise NotImplementedError

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See `on_call`."""
        return self.on_call(func, args, kwargs or {})
