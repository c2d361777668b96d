"""Our declarations of NCCL's ABI, and the entry points we load, against the real wheel where one is installed."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest
from device_helpers import TIMEOUT_S
from fake_nccl import open_communicator

from graphshard._core import Driver, NcclError, NcclLibrary

CSRC = Path(__file__).parents[2] / "csrc"
# nccl.h needs these headers for a few names alone.
STUBS = {
    "cuda_runtime.h": "typedef struct CUstream_st* cudaStream_t;\ntypedef struct CUevent_st* cudaEvent_t;\n",
    "cuda_fp16.h": "",
    "cuda_bf16.h": "",
    "cuda_fp8.h": "",
}


@pytest.fixture(scope="module")
def wheel() -> Path:
    """The folder of the installed NCCL wheel; cu12 and cu13 share it."""
    spec = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    for folder in folders:
        if (folder / "include" / "nccl.h").exists():
            return folder
    pytest.skip("no nccl.h is installed: pip install nvidia-nccl-cu12 or nvidia-nccl-cu13")


def compiled(header: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """csrc/tests/nccl_abi.cpp against an nccl.h of this text."""
    for name, text in {**STUBS, "nccl.h": header}.items():
        (folder / name).write_text(text)
    command = ["c++", "-std=c++17", "-fsyntax-only", f"-I{folder}", f"-I{CSRC}", str(CSRC / "tests" / "nccl_abi.cpp")]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)


def test_declarations_are_those_of_the_header(wheel: Path, tmp_path: Path) -> None:
    done = compiled((wheel / "include" / "nccl.h").read_text(), tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("real", "other", "found"),
    [
        ("int CTAPolicy;", "int added; int CTAPolicy;", "offset of CTAPolicy"),
        ("const char *commName;", "long commName;", "type of commName"),
        ("#define NCCL_CTA_POLICY_ZERO 0x02", "#define NCCL_CTA_POLICY_ZERO 0x04", "kCtaPolicyZero"),
        ("ncclMemFree(void *ptr)", "ncclMemFree(void *ptr, int flags)", "signature of ncclMemFree"),
    ],
)
def test_the_check_can_fail(wheel: Path, tmp_path: Path, real: str, other: str, found: str) -> None:
    header = (wheel / "include" / "nccl.h").read_text()
    assert real in header
    done = compiled(header.replace(real, other), tmp_path)
    assert done.returncode != 0
    assert found in done.stderr


def test_the_real_library_says_what_it_can_without_a_gpu(wheel: Path, driver: Driver) -> None:
    """Its version and unique ids; everything else is a named error, not a crash and not a hang."""
    path = wheel / "lib" / "libnccl.so.2"
    library = NcclLibrary(str(path), driver)
    assert (library.path, library.missing) == (str(path), [])
    assert library.version >= 22803
    ids = {library.unique_id() for _ in range(2)}
    assert len(ids) == 2
    assert {len(id_) for id_ in ids} == {128}
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has an NVIDIA device: the rest is about machines that have none")
    with pytest.raises(NcclError, match=r"^ncclCommInitRankConfig failed: ncclUnhandledCudaError") as failed:
        open_communicator(library)
    assert (failed.value.entry_point, failed.value.code) == ("ncclCommInitRankConfig", 1)
    assert str(path) in str(failed.value)
