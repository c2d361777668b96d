"""What must hold before NCCL carries gathers: versions, environment and capabilities, judged from facts alone.

Sources: NCCL's release notes and documentation for 2.28 to 2.32, and public reports that are named at each rule.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from graphshard.core.errors import CommError

VerdictKind = Literal["refuse", "warn", "set"]

OLDEST = 22803
"""Symmetric windows and copy-engine collectives: 2.28.3."""
OLDEST_DRIVER = 12050
"""As `cuDriverGetVersion` counts: 12.5."""
VARIABLES = (
    "CUDA_LAUNCH_BLOCKING",
    "NCCL_CTA_POLICY",
    "NCCL_CUMEM_ENABLE",
    "NCCL_GRAPH_MIXING_SUPPORT",
    "NCCL_MULTI_RANK_GPU_ENABLE",
    "NCCL_NVLS_ENABLE",
    "NCCL_WIN_ENABLE",
)
"""Environment variables that a rule looks at; ranks compare them."""
_POLICIES = {"DEFAULT": 0, "EFFICIENCY": 1, "ZERO": 2}
_WHOLE = re.compile(r"\s*[+-]?(0|[1-9][0-9]{0,17})\s*")
"""What Python and C read as one and the same number."""


@dataclass(frozen=True, slots=True)
class NcclFacts:
    """What is known before a communicator is made."""

    version: int
    """X*10000 + Y*100 + Z, as the loaded library says."""
    path: str
    """The file that is mapped."""
    missing: Sequence[str] = ()
    """Entry points that it lacks."""
    world_size: int = 1
    num_nodes: int = 1
    driver_version: int = OLDEST_DRIVER
    wants_capture: bool = True
    windows_per_allocation: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """`libnccl 2.28.9 (from /usr/lib/libnccl.so.2)`."""
        return f"libnccl {version_text(self.version)} (from {self.path})"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One rule's outcome; `set` means: put `variable` to `value` before NCCL reads it."""

    kind: VerdictKind
    reason: str
    variable: str = ""
    value: str = ""


def judge(facts: NcclFacts) -> list[Verdict]:
    """Every rule's verdict on `facts`; none: nothing to say. Reads nothing but its argument."""
    malformed = list(_malformed(facts.environment))
    if malformed:
        return malformed
    return [verdict for rule in _RULES for verdict in rule(facts)]


def raise_if_refused(verdicts: Sequence[Verdict]) -> None:
    """CommError with all refusals."""
    refused = [verdict.reason for verdict in verdicts if verdict.kind == "refuse"]
    if refused:
        raise not_available("; ".join(refused))


def not_available(reason: str) -> CommError:
    """The error of a transport that cannot be used here."""
    return CommError(f"transport nccl is not available: {reason}; available here: pull")


def version_text(version: int) -> str:
    """`2.28.9` for 22809."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def _malformed(environment: Mapping[str, str]) -> Iterator[Verdict]:
    for name in VARIABLES:
        text = environment.get(name)
        if text is not None and _number(name, text) is None:
            known = ", DEFAULT, EFFICIENCY or ZERO" if name == "NCCL_CTA_POLICY" else ""
            yield Verdict("refuse", f"{name}={text!r} is malformed: give a whole number{known}, or unset it", name)


def _number(name: str, text: str) -> int | None:
    if name == "NCCL_CTA_POLICY" and text.strip().upper() in _POLICIES:
        return _POLICIES[text.strip().upper()]
    return int(text) if _WHOLE.fullmatch(text) else None


def _value(facts: NcclFacts, name: str) -> int | None:
    """The variable's number, None if it is not set."""
    text = facts.environment.get(name)
    return None if text is None else _number(name, text)


def _version(facts: NcclFacts) -> Iterator[Verdict]:
    if facts.version < OLDEST:
        yield Verdict("refuse", f"{facts.name} is loaded, symmetric windows need {version_text(OLDEST)}")
    elif facts.missing:
        yield Verdict("refuse", f"{facts.name} is loaded and lacks {', '.join(facts.missing)}: it is another build")


def _driver(facts: NcclFacts) -> Iterator[Verdict]:
    if facts.driver_version < OLDEST_DRIVER:
        found = f"{facts.driver_version // 1000}.{facts.driver_version % 1000 // 10}"
        yield Verdict("refuse", f"the driver speaks CUDA {found}, copy-engine collectives need 12.5: update the driver")


def _nodes(facts: NcclFacts) -> Iterator[Verdict]:
    """Captured collectives across nodes deadlock with 2.28.9, and not with 2.30.4 (vllm-project/vllm#52504)."""
    if facts.num_nodes == 1 or not facts.wants_capture:
        return
    found = f"captured collectives over {facts.num_nodes} nodes"
    if facts.version <= 22809:
        yield Verdict("refuse", f"{facts.name} is loaded, {found} deadlock up to 2.28.9: use 2.30.4, or one node")
    elif facts.version < 23004:
        yield Verdict(
            "warn", f"{found} deadlocked with 2.28.9 and are known good from 2.30.4 on; {facts.name} is loaded"
        )


def _two_ranks(facts: NcclFacts) -> Iterator[Verdict]:
    """The first copy-engine gather of two ranks hangs over multicast before 2.31.2 (NVIDIA/nccl#2241)."""
    if facts.world_size != 2 or facts.version >= 23102:
        return
    yield from _without_nvls(
        facts,
        f"the first copy-engine gather of exactly two ranks hangs over multicast before 2.31.2; {facts.name} is loaded",
    )


def _shared_gpu(facts: NcclFacts) -> Iterator[Verdict]:
    if not _value(facts, "NCCL_MULTI_RANK_GPU_ENABLE"):
        return
    if facts.version < 23000:
        yield Verdict("refuse", f"NCCL_MULTI_RANK_GPU_ENABLE is set and needs 2.30, {facts.name} is loaded: unset it")
    else:
        yield from _without_nvls(facts, "ranks that share a GPU (NCCL_MULTI_RANK_GPU_ENABLE) cannot use multicast")


def _without_nvls(facts: NcclFacts, reason: str) -> Iterator[Verdict]:
    """Multicast must be off: unset is put to 0, another value is somebody's wish that cannot be had."""
    name = "NCCL_NVLS_ENABLE"
    value = _value(facts, name)
    if value is None:
        yield Verdict("set", f"{name}=0 is set: {reason}", name, "0")
    elif value != 0:
        yield Verdict("refuse", f"{name}={value} is set, and {reason}: unset it, or set it to 0", name)


def _windows(facts: NcclFacts) -> Iterator[Verdict]:
    """Several windows in one allocation corrupted data before 2.31.2 (NVIDIA/nccl#2198)."""
    if facts.windows_per_allocation > 1 and facts.version < 23102:
        found = f"{facts.windows_per_allocation} windows in one allocation corrupt data before 2.31.2"
        yield Verdict("refuse", f"{found}, {facts.name} is loaded: register each allocation once")


def _switched_off(facts: NcclFacts) -> Iterator[Verdict]:
    needs = {
        "NCCL_CUMEM_ENABLE": "symmetric windows need memory from cuMem*",
        "NCCL_WIN_ENABLE": "it switches symmetric windows off",
    }
    for name, why in needs.items():
        if _value(facts, name) == 0:
            yield Verdict("refuse", f"{name}=0 is set and {why}: unset it", name)


def _blocking(facts: NcclFacts) -> Iterator[Verdict]:
    """Launches that wait for their end deadlock: a rank's first launch would wait for a peer's (NVIDIA/nccl#750)."""
    if _value(facts, "CUDA_LAUNCH_BLOCKING"):
        name = "CUDA_LAUNCH_BLOCKING"
        yield Verdict("refuse", f"{name} is set: launches that block deadlock beside collectives, unset it", name)


def _mixing(facts: NcclFacts) -> Iterator[Verdict]:
    if facts.wants_capture and _value(facts, "NCCL_GRAPH_MIXING_SUPPORT") == 0:
        name = "NCCL_GRAPH_MIXING_SUPPORT"
        why = "graphshard drains between eager and captured gathers, other users of NCCL in this process may not"
        yield Verdict("warn", f"{name}=0 is set: {why}", name)


def _policy(facts: NcclFacts) -> Iterator[Verdict]:
    """The variable overrides what a communicator asks for."""
    value = _value(facts, "NCCL_CTA_POLICY")
    if value is not None and value != _POLICIES["ZERO"]:
        name = "NCCL_CTA_POLICY"
        why = "overrides the zero-CTA policy of the weight gathers, which would run as SM kernels"
        yield Verdict("refuse", f"{name}={facts.environment[name]} is set and {why}: unset it, or set it to 2", name)


_RULES: tuple[Callable[[NcclFacts], Iterator[Verdict]], ...] = (
    _version,
    _driver,
    _nodes,
    _two_ranks,
    _shared_gpu,
    _windows,
    _switched_off,
    _blocking,
    _mixing,
    _policy,
)
