"""A runtime in small, without torch, so that its process starts fast: loads, binds, captures and replays gathers.

Each stage goes through the package's own layers, and calls `at(point)` in its middle.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from windows_model import chunk, flat_layout

from graphshard._core import Calls, GraphExec, OpList, Stream
from graphshard.comm.certificate import Certificate, exchange
from graphshard.comm.checksums import checksum_of
from graphshard.comm.control import CLOSED, ControlTable
from graphshard.comm.doors import own_record
from graphshard.comm.group import Group
from graphshard.comm.pull import PullTransport
from graphshard.comm.rejoin import Newcomer, Welcome, open_door
from graphshard.core.errors import CommError
from graphshard.device import open_device

CHUNK_SIZES = (256, 4096, 512, 12_800, 70_000)
TIMEOUT_S = 30.0


class Mini:
    """One rank. `model` names its certificate, `version` its bytes; both are equal on all ranks, unless a test lies."""

    def __init__(
        self,
        group: Group,
        at: Callable[[str], None] = lambda point: None,
        *,
        model: str = "mini",
        version: int = 0,
    ) -> None:
        self.group, self.version = group, version
        self.layout = flat_layout(group.world_size, CHUNK_SIZES)
        self.wrong: list[str] = []
        self._truth: dict[tuple[int, int], bytes] = {}
        self.num_steps = 0
        self.device = open_device("host", num_ranks=group.world_size)
        self.stream = Stream(self.device.driver)
        welcome = group.meet() if isinstance(group, Newcomer) else None
        try:
            self._build(welcome, model, at)
        finally:
            if welcome is not None:
                welcome.close()

    def _build(self, welcome: Welcome | None, model: str, at: Callable[[str], None]) -> None:
        group, layout = self.group, self.layout
        at("met")
        certificate = Certificate(model, "one plan", layout.digest, {}, {"transport": "pull"})
        if welcome is None:
            exchange(group, certificate)
        else:
            welcome.check_certificate(certificate)
        checksums = group.agree("load", lambda: self._load(at))
        if welcome is not None:
            welcome.check_checksums(checksums)
            self.control = ControlTable.join(group, bytes(32), welcome.peers)
        else:
            self.control = ControlTable.exchange(group, bytes(32))
        peers = None if welcome is None else welcome.records
        self.transport = PullTransport(self.device, group, layout, self.window, checksums, peers)
        at("bind")
        group.agree("check", self.check)
        offer: dict[str, Any] = {"certificate": certificate.told(group.world_size), "device": {}}
        own = own_record(group, self.control.mine, self.window, checksums)
        self.doorkeeper = open_door(group, own, offer, certificate.digest(group.world_size), welcome)
        at("capture")
        self.capture()

    def _load(self, at: Callable[[str], None]) -> list[int]:
        self.window = self.device.allocate(self.layout.shard_bytes, exportable=True)
        checksums = []
        for unit in self.layout.units:
            data = self.truth(self.group.rank, unit.unit)
            memoryview(self.window)[unit.chunk_offset : unit.chunk_offset + unit.chunk_bytes] = data
            checksums.append(checksum_of(data))
            if unit.unit == 2:
                at("load")
        self.whole = self.device.allocate(sum(unit.num_bytes for unit in self.layout.units))
        return checksums

    def truth(self, rank: int, unit: int) -> bytes:
        if (rank, unit) not in self._truth:
            named = rank + 1000 * self.version
            self._truth[rank, unit] = chunk(named, unit, self.layout.units[unit].chunk_bytes)
        return self._truth[rank, unit]

    def capture(self) -> None:
        """Bind and capture a step: every unit is gathered, over poison."""
        ops: list[tuple[object, ...]] = [("fill", 0, self.whole.address, 0xFF, self.whole.num_bytes)]
        begin = self.whole.address
        for unit in self.layout.units:
            ops += [copy.bound(0) for copy in self.transport.copies(unit.unit, begin)]
            begin += unit.num_bytes
        self.graph: GraphExec = (
            OpList(self.device.driver, [self.stream], 0, ops).capture(Calls([]), (), TIMEOUT_S).instantiate()
        )

    def check(self, rank: int | None = None) -> None:
        """Compare what is mapped with what its owners told."""
        for unit in self.layout.units:
            copies = self.transport.copies(unit.unit, self.whole.address)
            OpList(self.device.driver, [self.stream], 0, [copy.bound(0) for copy in copies]).issue(Calls([]))
            assert self.stream.synchronize(TIMEOUT_S)
            self.transport.verify_unit(unit.unit, memoryview(self.whole)[: unit.num_bytes], rank)

    def admit(self) -> list[int]:
        """What a runtime's admission does."""
        admitted = []
        if self.doorkeeper is not None and self.doorkeeper.has_news:
            for rank, record in self.doorkeeper.take().items():
                assert record.window_fd is not None
                self.transport.remap(rank, record.window_fd)
                try:
                    self.check(rank)
                    self.control.replace(rank, record.page, record.process)
                    admitted.append(rank)
                except CommError:
                    self.transport.undo_remap(rank)
                self.doorkeeper.settle(rank, is_accepted=rank in admitted)
            self.capture()
            self.transport.drop_retired()
        return admitted

    def step(self) -> None:
        self.graph.launch(self.stream)
        assert self.stream.synchronize(TIMEOUT_S)
        begin = 0
        for unit in self.layout.units:
            for rank in range(self.group.world_size):
                if memoryview(self.whole)[begin : begin + unit.chunk_bytes] != self.truth(rank, unit.unit):
                    self.wrong.append(f"unit {unit.unit}, chunk of rank {rank}, at step {self.num_steps}")
                begin += unit.chunk_bytes
        self.num_steps += 1
        self.control.mine.set_progress(self.num_steps, 0)

    def close(self) -> None:
        if self.doorkeeper is not None:
            self.doorkeeper.close()
        self.control.mine.set_state(CLOSED)
        self.transport.close()


def held() -> dict[str, int]:
    """Windows mapped and descriptors open in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {
        "windows": sum("memfd:graphshard " in line for line in lines),
        "pages": sum("memfd:graphshard-" in line for line in lines),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
    }
