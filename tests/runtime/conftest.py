"""Both transports; helpers of other rooms' tests are used here too; collections that do not take long."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

TRANSPORTS = ("pull", "nccl")

for folder in ("load", "robust", "verify"):
    sys.path.append(str(Path(__file__).parents[1] / folder))


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    """What holds under one transport holds under the other, or is refused there with a reason."""
    return str(request.param)
