"""What tests on a real card need: the card, and a torch that was built for it; else the reason is printed.

Models of the runtime's tests are run here too.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from graphshard.core.errors import DeviceError
from graphshard.device import CudaDevice

sys.path.append(str(Path(__file__).parents[1] / "runtime"))


@pytest.fixture(scope="session")
def cuda_device() -> CudaDevice:
    """`cuda:0`, which ranks may share: one card is enough for all tests."""
    try:
        device = CudaDevice(0, same_gpu=True)
    except DeviceError as error:
        pytest.skip(str(error))
    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} does not see the GPU that the driver shows")
    return device
