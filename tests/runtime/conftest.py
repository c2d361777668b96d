"""Both transports; helpers of other rooms' tests are used here too; collections that do not take long."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TRANSPORTS = ("pull", "nccl")

for folder in ("load", "robust", "verify"):
    sys.path.append(str(Path(__file__).parents[1] / folder))


@pytest.fixture
def few_objects() -> Iterator[None]:
    """Collections look only at what the test makes: torch's own objects take 0.2 s each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    """What holds under one transport holds under the other, or is refused there with a reason."""
    return str(request.param)
