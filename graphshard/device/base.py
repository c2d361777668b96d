"""What the runtime needs of a device."""

from __future__ import annotations

from typing import Literal, Protocol

from graphshard._core import Driver, DriverError, Memory
from graphshard.core.errors import DeviceError
from graphshard.core.specs import DeviceSpec

DeviceKind = Literal["host", "cuda"]


class Device(Protocol):
    """A driver with a name and limits. Thread-safe; everything allocated on it may outlive it."""

    @property
    def kind(self) -> DeviceKind:
        """`host` or `cuda`."""

    @property
    def name(self) -> str:
        """As errors and tables print it: `host`, `cuda:0`."""

    @property
    def driver(self) -> Driver:
        """The driver below, for streams, op lists and graphs."""

    def spec(self) -> DeviceSpec:
        """What a plan may know of this device."""

    def allocate(self, num_bytes: int, exportable: bool = False) -> Memory:
        """Zeroed memory of `num_bytes`; a window that peers may map if `exportable`.

        Order:   none; it can be used at once.
        Blocks:  the host, until the memory is zero.
        Capture: no.
        """

    def import_memory(self, fd: int, num_bytes: int, read_only: bool = True) -> Memory:
        """Map the window of `num_bytes` that a peer exported as `fd`, which stays the caller's.

        Order:   none; bytes are the peer's as they change.
        Blocks:  never.
        Capture: no.
        """

    def why_not(self, feature: str) -> str | None:
        """Why this device lacks `feature`, or None if it has it."""


def device_error(device: str, what: str, error: DriverError) -> DeviceError:
    """A driver's refusal as a DeviceError of `device`, saying `what` was tried."""
    return DeviceError(f"{device}: {what} failed - {error}")
