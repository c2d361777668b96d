"""Small models and programs of the other tests are run here too."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in ("comm", "runtime"):
    sys.path.append(str(Path(__file__).parents[1] / folder))
