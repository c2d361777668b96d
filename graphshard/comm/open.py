"""Opening the transport that a plan names."""

from __future__ import annotations

from graphshard.comm.group import Group
from graphshard.comm.nccl import NcclOpening
from graphshard.comm.pull import PullOpening
from graphshard.comm.transport import TransportOpening
from graphshard.core.errors import CommError
from graphshard.device.base import Device


def open_transport(
    name: str, device: Device, group: Group, timeout_s: float, *, progress: bool = False
) -> TransportOpening:
    """What the transport `name` needs before memory is reserved. Local.

    Args:
        name: as the plan says it.
        device: the device of this rank.
        group: the ranks that share one copy of the weights.
        timeout_s: the longest that this rank waits for the others.
        progress: gathers write how far they are (collective transports only; others have peers' progress anyway).

    Raises:
        CommError: it is not available here, and why.
    """
    if name == "pull":
        return PullOpening(device, group)
    if name == "nccl":
        return NcclOpening(device, group, timeout_s=timeout_s, progress=progress)
    raise CommError(f"transport {name} is unknown; known are pull, nccl")
