"""One thread a rank, before torch is imported; the small checkpoints of the command line's tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests" / "cli")]
