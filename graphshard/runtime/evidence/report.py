"""What a captured graph is shown to be: nodes by kind for each gather, and what may be said because of them.

A walk shows that a gather has no kernel nodes. That its copies run on copy engines is another claim: copies inside one
device may be carried out by kernels which no graph shows. It is made only with a `CopyEngineEvidence`: on that machine
a gather has finished beside a kernel that kept every SM busy (tests/gpu/test_copy_engine.py).
"""

from __future__ import annotations

import json
import statistics
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from graphshard.core.errors import DeviceError, SpecError
from graphshard.core.sizes import format_bytes
from graphshard.runtime.evidence.attribution import GatherNodes
from graphshard.runtime.evidence.walk import Node


@dataclass(frozen=True, slots=True)
class GatherRow:
    """One gather of a captured graph."""

    op: int
    """The program's op."""
    unit: int
    slot: int
    nodes: Mapping[str, int]
    """By kind."""
    num_copies: int
    num_bytes: int

    @property
    def num_nodes(self) -> int:
        """Of all kinds."""
        return sum(self.nodes.values())

    @property
    def num_kernels(self) -> int:
        """Kernel nodes: each has an SM work for the gather."""
        return self.nodes.get("kernel", 0)


@dataclass(frozen=True, slots=True)
class LaunchCost:
    """How long the host was busy with launches of one graph, in microseconds."""

    median_us: float
    p10_us: float
    p90_us: float
    n: int

    @staticmethod
    def of(samples_s: Sequence[float]) -> LaunchCost:
        """From at least one duration in seconds."""
        us = [seconds * 1e6 for seconds in samples_s]
        deciles = statistics.quantiles(us, n=10, method="inclusive") if len(us) > 1 else us * 9
        return LaunchCost(statistics.median(us), deciles[0], deciles[8], len(us))


@dataclass(frozen=True, slots=True)
class CopyEngineEvidence:
    """On `device` a gather of `num_bytes` over `transport` finished while a kernel occupied all SMs."""

    device: str
    driver_version: int
    transport: str
    num_bytes: int
    num_sms: int

    def save(self, path: Path) -> None:
        """Keep it as JSON, for `load`."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def load(path: Path) -> CopyEngineEvidence:
        """What `save` wrote.

        Raises:
            SpecError: the file is not there or holds something else.
        """
        try:
            values: dict[str, Any] = json.loads(path.read_text())
            return CopyEngineEvidence(**values)
        except (OSError, ValueError, TypeError) as error:
            raise SpecError(f"{path} holds no copy-engine evidence: {error}; tests/gpu writes it") from error


@dataclass(frozen=True)
class GraphReport:
    """What one rank's captured step is; printable."""

    rank: int
    world_size: int
    step_shape: str
    transport: str
    device: str
    driver: str
    """Path of the library that captured it."""
    driver_version: int
    nodes: Mapping[str, int]
    """The whole graph's, by kind."""
    gathers: tuple[GatherRow, ...]
    problems: tuple[str, ...] = ()
    """Kernels in gathers and the like, a line each; none where `strict` was asked for."""
    launch: LaunchCost | None = None
    copy_engine: CopyEngineEvidence | None = None

    @property
    def num_nodes(self) -> int:
        """Of all kinds."""
        return sum(self.nodes.values())

    @property
    def num_copies(self) -> int:
        """Copies of chunks, over all gathers."""
        return sum(gather.num_copies for gather in self.gathers)

    @property
    def num_bytes(self) -> int:
        """Bytes that all gathers copy."""
        return sum(gather.num_bytes for gather in self.gathers)

    @property
    def num_kernels(self) -> int:
        """Kernel nodes in gathers."""
        return sum(gather.num_kernels for gather in self.gathers)

    @property
    def claim(self) -> str:
        """What may be said of the gathers: about their nodes, and about engines if there is evidence for it."""
        with_kernels = [str(gather.unit) for gather in self.gathers if gather.num_kernels]
        if with_kernels:
            return (
                f"kernel nodes in {len(with_kernels)} of {len(self.gathers)} gathers: units {', '.join(with_kernels)}"
            )
        captured = sum(gather.num_nodes > 0 for gather in self.gathers)
        claim = f"no kernel nodes in {captured} gathers"
        if captured < len(self.gathers):
            claim += f"; {len(self.gathers) - captured} of the program's gathers are not in the graph"
        if self.copy_engine is None or self.problems:
            return claim
        shown = self.copy_engine
        return (
            f"{claim}; copy engine: on {shown.device} a gather of {format_bytes(shown.num_bytes)} finished beside a "
            f"kernel on all {shown.num_sms} SMs"
        )

    def text(self) -> str:
        """A few lines for people, then one for each gather."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.nodes.items())
        lines = [
            f"graph of step shape {self.step_shape} on rank {self.rank} of {self.world_size}: {self.num_nodes} nodes "
            f"({kinds})",
            f"{len(self.gathers)} gathers over {self.transport}: {self.num_copies} copies, "
            f"{format_bytes(self.num_bytes)}; {self.device}, driver {self.driver_version} of {self.driver}",
            self.claim,
        ]
        if self.launch is not None:
            cost = self.launch
            lines.append(
                f"launch {cost.median_us:.1f} us (p10 {cost.p10_us:.1f}, p90 {cost.p90_us:.1f}, n={cost.n}) on the host"
            )
        lines += self.problems
        lines.append(f"{'op':>4} {'unit':>5} {'slot':>4} {'copies':>6} {'bytes':>12}  nodes")
        for row in self.gathers:
            kinds = ", ".join(f"{count} {kind}" for kind, count in row.nodes.items()) or "none"
            lines.append(f"{row.op:>4} {row.unit:>5} {row.slot:>4} {row.num_copies:>6} {row.num_bytes:>12,}  {kinds}")
        return "\n".join(lines) + "\n"

    __str__ = text


def rows_of(gathers: Sequence[GatherNodes]) -> tuple[GatherRow, ...]:
    """The report's rows."""
    return tuple(
        GatherRow(one.op, one.launch.unit, one.launch.slot, one.kinds, one.num_copies, one.num_bytes) for one in gathers
    )


def kinds_of(nodes: Sequence[Node]) -> dict[str, int]:
    """Nodes by kind."""
    return dict(sorted(Counter(node.kind for node in nodes).items()))


def judge(report: GraphReport, strict: bool) -> GraphReport:
    """`report`, unless something is wrong with its gathers: then it is refused, or warned of.

    Raises:
        DeviceError: `strict`, and something is wrong; names each unit, op and node.
    """
    where = f"rank {report.rank}, step shape {report.step_shape}"
    if report.problems and strict:
        advice = "look at the transport's settings; strict=False reports it as a warning"
        raise DeviceError("\n".join([f"{where}: {problem}" for problem in report.problems] + [advice]))
    if report.problems:
        warnings.warn(f"{where}: " + "; ".join(report.problems), stacklevel=3)
    return report


def check_copy_engine(shown: CopyEngineEvidence, device: str, driver_version: int, transport: str) -> None:
    """SpecError unless `shown` speaks of this device, driver and transport."""
    here, there = (device, driver_version, transport), (shown.device, shown.driver_version, shown.transport)
    if here != there:
        raise SpecError(
            f"the copy-engine evidence is of device, driver and transport {there}, the graph runs on {here}: "
            "run tests/gpu/test_copy_engine.py on this machine"
        )
