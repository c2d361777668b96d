"""When NCCL may carry gathers: one row a rule, with versions, environments and machines that are not here."""

from __future__ import annotations

import re
from typing import Any

import pytest

from graphshard.comm.nccl_gates import NcclFacts, judge, raise_if_refused
from graphshard.core.errors import CommError

PATH = "/usr/lib/libnccl.so.2"
GOOD: dict[str, Any] = {"version": 23203, "path": PATH, "world_size": 8, "driver_version": 13000}

REFUSED = [
    # what the loaded library is
    (
        {"version": 22602},
        r"libnccl 2\.26\.2 \(from /usr/lib/libnccl\.so\.2\) is loaded, symmetric windows need 2\.28\.3",
    ),
    ({"version": 22802}, r"2\.28\.2 .* need 2\.28\.3"),
    ({"missing": ["ncclCommWindowRegister", "ncclMemAlloc"]}, "lacks ncclCommWindowRegister, ncclMemAlloc"),
    ({"driver_version": 12040}, r"the driver speaks CUDA 12\.4, copy-engine collectives need 12\.5"),
    # captured collectives across nodes
    ({"version": 22809, "num_nodes": 2}, r"captured collectives over 2 nodes deadlock up to 2\.28\.9: use 2\.30\.4"),
    ({"version": 22803, "num_nodes": 4, "world_size": 2}, "captured collectives over 4 nodes"),
    # exactly two ranks, and somebody wants multicast
    ({"version": 23101, "world_size": 2, "environment": {"NCCL_NVLS_ENABLE": "1"}}, "NCCL_NVLS_ENABLE=1 is set, and"),
    # several windows in one allocation
    ({"version": 23101, "windows_per_allocation": 2}, r"2 windows in one allocation corrupt data before 2\.31\.2"),
    ({"environment": {"NCCL_CUMEM_ENABLE": "0"}}, r"NCCL_CUMEM_ENABLE=0 is set and symmetric windows need memory from"),
    ({"environment": {"NCCL_WIN_ENABLE": "0"}}, "NCCL_WIN_ENABLE=0 is set and it switches symmetric windows off"),
    # launches that block behind a collective that waits
    ({"environment": {"CUDA_LAUNCH_BLOCKING": "1"}}, "CUDA_LAUNCH_BLOCKING is set: launches that block deadlock"),
    # the policy that would bring SM kernels
    ({"environment": {"NCCL_CTA_POLICY": "1"}}, "NCCL_CTA_POLICY=1 is set and overrides the zero-CTA policy"),
    ({"environment": {"NCCL_CTA_POLICY": "efficiency"}}, "NCCL_CTA_POLICY=efficiency is set"),
    ({"version": 22809, "environment": {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}}, r"needs 2\.30"),
    ({"environment": {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "2"}}, "cannot use multicast"),
    # malformed values are errors, not defaults
    ({"environment": {"NCCL_CUMEM_ENABLE": "yes"}}, "NCCL_CUMEM_ENABLE='yes' is malformed: give a whole number"),
    ({"environment": {"CUDA_LAUNCH_BLOCKING": ""}}, "CUDA_LAUNCH_BLOCKING='' is malformed"),
    *[({"environment": {"NCCL_NVLS_ENABLE": text}}, "is malformed") for text in ("1_0", "010", "0x1", "\u0663")],
    ({"environment": {"NCCL_CTA_POLICY": "none"}}, "DEFAULT, EFFICIENCY or ZERO"),
]

SET = [
    ({"version": 22809, "world_size": 2}, "exactly two ranks"),
    ({"version": 23101, "world_size": 2}, "exactly two ranks"),
    ({"environment": {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}}, "ranks that share a GPU"),
]

WARNED = [
    ({"environment": {"NCCL_GRAPH_MIXING_SUPPORT": "0"}}, "graphshard drains between eager and captured gathers"),
    ({"version": 23000, "num_nodes": 2}, r"deadlocked with 2\.28\.9"),
]

FINE = [
    {},
    {"version": 22803},
    {"version": 22809, "num_nodes": 1},
    {"version": 23004, "num_nodes": 2},
    {"version": 22809, "num_nodes": 2, "wants_capture": False},
    {"version": 23102, "world_size": 2},
    {"version": 22809, "world_size": 4},
    {"version": 22809, "world_size": 2, "environment": {"NCCL_NVLS_ENABLE": "0"}},
    {"version": 23102, "windows_per_allocation": 3},
    {"driver_version": 12050},
    {"environment": {"NCCL_CTA_POLICY": "2", "NCCL_CUMEM_ENABLE": "1", "CUDA_LAUNCH_BLOCKING": "0"}},
    {"environment": {"NCCL_CTA_POLICY": "ZERO", "NCCL_DEBUG": "WARN"}},
    {"environment": {"NCCL_GRAPH_MIXING_SUPPORT": "0"}, "wants_capture": False},
]


def facts(changes: dict[str, Any]) -> NcclFacts:
    return NcclFacts(**(GOOD | changes))


@pytest.mark.parametrize(("changes", "reason"), REFUSED)
def test_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(CommError, match=r"^transport nccl is not available: .*; available here: pull$") as caught:
        raise_if_refused(judge(facts(changes)))
    caught.match(reason)


@pytest.mark.parametrize(("changes", "reason"), SET)
def test_multicast_is_switched_off(changes: dict[str, Any], reason: str) -> None:
    (verdict,) = judge(facts(changes))
    assert (verdict.kind, verdict.variable, verdict.value) == ("set", "NCCL_NVLS_ENABLE", "0")
    assert reason in verdict.reason
    raise_if_refused([verdict])


@pytest.mark.parametrize(("changes", "reason"), WARNED)
def test_warned_of(changes: dict[str, Any], reason: str) -> None:
    (verdict,) = judge(facts(changes))
    assert verdict.kind == "warn"
    assert re.search(reason, verdict.reason)
    raise_if_refused([verdict])


@pytest.mark.parametrize("changes", FINE)
def test_fine(changes: dict[str, Any]) -> None:
    assert judge(facts(changes)) == []


def test_all_reasons_are_said_at_once() -> None:
    environment = {"NCCL_CUMEM_ENABLE": "0", "CUDA_LAUNCH_BLOCKING": "1"}
    verdicts = judge(facts({"version": 22602, "environment": environment}))
    with pytest.raises(CommError, match=r"2\.26\.2.*; NCCL_CUMEM_ENABLE=0.*; CUDA_LAUNCH_BLOCKING"):
        raise_if_refused(verdicts)
