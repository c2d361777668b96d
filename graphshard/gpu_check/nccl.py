"""NCCL on one GPU. One rank shows that calls and structures fit the library; it says nothing of copy engines."""

from __future__ import annotations

import torch

from graphshard._core import Calls, Communicator, Driver, Memory, NcclError, NcclLibrary, OpList, Stream
from graphshard.comm.nccl_gates import version_text
from graphshard.comm.nccl_library import find_library
from graphshard.core.errors import CommError
from graphshard.device import Device
from graphshard.gpu_check.naming import naming_bytes
from graphshard.gpu_check.ranks import CHOICES, in_processes, judge, naming_rank
from graphshard.gpu_check.recorder import Recorder, Row
from graphshard.gpu_check.setup import TIMEOUT_S, Setup, on_threads
from graphshard.runtime.device_bytes import device_bytes

ABI_ONLY = "ABI only"
HOST_NCCL = "host NCCL, ABI only"
"""Of the host's stand-in even that is said of graphshard alone."""
NO_WINDOW = "null window"
"""What a library without symmetric support answers, as errors of communicators say it."""
SHARED_GPU = 23000
"""The first version whose ranks may share a GPU, experimentally."""
SHARED_GPU_ENVIRONMENT = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}
NUM_BYTES = 1 << 20


def check_nccl(recorder: Recorder, setup: Setup) -> None:
    """One rank by hand and in a runtime; two ranks where the library lets them share a GPU."""
    label = _label(setup)
    recorder.run(f"1 rank, calls ({label})", lambda row: _check_calls(row, setup))
    recorder.run(f"1 rank, transport ({label})", lambda row: _check_transport(row, setup))
    recorder.run(f"2 ranks on one {'GPU' if setup.is_card else 'host device'}", lambda row: _check_shared(row, setup))


def _label(setup: Setup) -> str:
    return ABI_ONLY if setup.is_card else HOST_NCCL


def _library(setup: Setup, device: Device) -> NcclLibrary:
    if setup.is_card:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch's copy of NCCL is the one to be used
    return NcclLibrary(str(find_library(device)), device.driver)


def _check_calls(row: Row, setup: Setup) -> None:
    device = setup.device()
    library = _library(setup, device)
    row.add(label=_label(setup), path=library.path, version=version_text(library.version), missing=library.missing)
    row.require(not library.missing, f"the library lacks {', '.join(library.missing)}")
    if library.missing:
        return
    communicator = Communicator(library, library.unique_id(), 1, 0, "gpu_check", TIMEOUT_S)
    try:
        _gather_alone(row, device, communicator)
    finally:
        if not communicator.is_broken and communicator.destroy(TIMEOUT_S):
            row.add(end="destroyed")
        else:
            row.add(end="aborted" if communicator.abort(TIMEOUT_S) else "stuck")
            row.require(not row.values.get("are_windows_symmetric", True), f"the communicator was {row.values['end']}")


def _gather_alone(row: Row, device: Device, communicator: Communicator) -> None:
    source, destination = communicator.allocate(NUM_BYTES), communicator.allocate(NUM_BYTES)
    row.add(are_windows_symmetric=True)
    try:
        for memory in (source, destination):
            communicator.register(memory, TIMEOUT_S)
    except NcclError as error:
        if NO_WINDOW not in str(error):
            raise
        row.add(are_windows_symmetric=False)
        row.skip(f"one rank has nobody to be symmetric with, and gets no window: {error}")
    expected = naming_bytes("nccl", NUM_BYTES)
    device_bytes(device, source).copy_(expected)
    if device.kind == "cuda":
        torch.cuda.synchronize()
    stream = Stream(device.driver)
    communicator.all_gather(destination.address, source.address, NUM_BYTES, stream, timeout_s=TIMEOUT_S)
    row.require(stream.synchronize(TIMEOUT_S), "the eager all-gather did not end")
    row.require(_holds(device, destination, expected), "the eager all-gather brought other bytes")
    device_bytes(device, destination).zero_()
    if device.kind == "cuda":
        torch.cuda.synchronize()
    _gather_captured(row, device.driver, communicator, destination, source, stream)
    row.require(_holds(device, destination, expected), "the captured all-gather brought other bytes")


def _gather_captured(
    row: Row, driver: Driver, communicator: Communicator, destination: Memory, source: Memory, stream: Stream
) -> None:
    op = ("all_gather", 0, 0, destination.address, source.address, NUM_BYTES)
    graph = OpList(driver, [stream], 0, [op], [communicator]).capture(Calls([]))
    row.add(nodes=graph.num_nodes())
    launcher = graph.instantiate()
    launcher.launch(stream)
    row.require(stream.synchronize(TIMEOUT_S), "the captured all-gather did not end")


def _holds(device: Device, memory: Memory, expected: torch.Tensor) -> bool:
    return bool(torch.equal(device_bytes(device, memory).cpu()[: expected.numel()], expected))


def _check_transport(row: Row, setup: Setup) -> None:
    row.add(label=_label(setup))
    try:
        told = on_threads(lambda group: naming_rank(group, setup.kind, [{"transport": "nccl"}]), 1)
    except CommError as error:
        if NO_WINDOW not in str(error):
            raise
        row.skip(f"one rank has nobody to be symmetric with, and gets no window: {error}")
    judge(row, told)


def _check_shared(row: Row, setup: Setup) -> None:
    version = _library(setup, setup.device()).version
    row.add(version=version_text(version), environment=SHARED_GPU_ENVIRONMENT)
    if version < SHARED_GPU:
        row.skip(
            f"NCCL {version_text(version)} is loaded; NCCL_MULTI_RANK_GPU_ENABLE, by which ranks share a GPU, came "
            f"with {version_text(SHARED_GPU)}"
        )
    choices = [{**choice, "transport": "nccl"} for choice in (CHOICES[0], {"prefetch_depth": 1})]
    in_processes(row, 2, [setup.kind, choices], timeout_s=60.0, env=SHARED_GPU_ENVIRONMENT)
