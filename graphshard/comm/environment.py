"""What torchrun's environment variables say about this rank."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from graphshard.core.errors import SpecError


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_RUN_ID and _RESTART_COUNT, checked."""

    rank: int
    world_size: int
    local_rank: int
    master_port: int
    run_id: str
    """The run and its restart: ranks of one job have equal ones."""

    @staticmethod
    def read(environ: Mapping[str, str] = os.environ) -> RankEnvironment:
        """From `environ`.

        Raises:
            SpecError: a variable is missing, malformed, or speaks of more than one node.
        """
        world_size = _integer(environ, "WORLD_SIZE", 1, 1 << 16)
        rank = _integer(environ, "RANK", 0, world_size - 1)
        local_rank = _integer(environ, "LOCAL_RANK", 0, world_size - 1)
        run_id = environ.get("TORCHELASTIC_RUN_ID", "") + "/" + environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if world_size == 1:
            return RankEnvironment(rank, world_size, local_rank, 0, run_id)
        if "LOCAL_WORLD_SIZE" in environ:
            local_world_size = _integer(environ, "LOCAL_WORLD_SIZE", 1, world_size)
            if local_world_size != world_size:
                raise SpecError(
                    f"LOCAL_WORLD_SIZE={local_world_size} of WORLD_SIZE={world_size}: ranks of one group must be on "
                    "one node, as they map each other's memory; start one group a node"
                )
        address = _text(environ, "MASTER_ADDR")
        reason = why_not_this_host(address)
        if reason:
            raise SpecError(
                f"MASTER_ADDR={address!r} {reason}: ranks of one group must be on one node, as they map each other's "
                "memory; use 127.0.0.1"
            )
        return RankEnvironment(rank, world_size, local_rank, _integer(environ, "MASTER_PORT", 0, 65535), run_id)


def why_not_this_host(address: str) -> str | None:
    """Why `address` is not an address of this machine, or None if it is."""
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as error:
        return f"cannot be resolved ({error})"
    for family, kind, protocol, _, place in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind((place[0], 0))  # only own addresses can be bound
            return None
    return f"is {found[0][4][0]}, which is not an address of this machine"


def _text(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise SpecError(
            f"{name} is not set: start ranks with torchrun (it sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and "
            "MASTER_PORT), or use LocalGroup(n) for ranks that are threads"
        )
    return environ[name]


def _integer(environ: Mapping[str, str], name: str, lowest: int, highest: int) -> int:
    text = _text(environ, name)
    try:
        value = int(text)
    except ValueError:
        raise SpecError(f"{name}={text!r} is not a whole number: use {lowest} to {highest}") from None
    if not lowest <= value <= highest:
        raise SpecError(f"{name}={value} is out of range: use {lowest} to {highest}")
    return value
