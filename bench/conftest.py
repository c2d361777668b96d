"""One thread a rank, before torch is imported."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
