"""What lies in memory while a module is loaded and finalized, measured by the system in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import rank_environment

MIB = 1 << 20
NUM_RANKS, WHOLE_BYTES, LAYER_BYTES = 4, 64 * MIB, 8 * MIB
SLACK_BYTES = 12 * MIB  # what allocators, stacks of threads and code that is loaded late take


@pytest.mark.slow  # a process that loads torch; what is freed is measured in test_engine_finalize too
def test_no_rank_holds_whole_weights_at_any_time_and_rows_are_gone_afterwards() -> None:
    program = Path(__file__).with_name("engine_memory.py")
    environment = {**os.environ, **rank_environment(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    slots, window = NUM_RANKS * found["slots"], LAYER_BYTES // NUM_RANKS
    assert found["slots"] == LAYER_BYTES and NUM_RANKS * found["chunks"] == WHOLE_BYTES
    assert found["prepared"] <= SLACK_BYTES, "placeholders have no memory to speak of"
    assert found["loaded"] <= WHOLE_BYTES + SLACK_BYTES, "all ranks together hold each row once"
    assert found["peak"] <= 2 * WHOLE_BYTES + slots + NUM_RANKS * window + SLACK_BYTES, "rows, chunks, slots, windows"
    assert found["finalized"] <= WHOLE_BYTES + slots + SLACK_BYTES, "rows and windows are gone"
    assert found["freed"] == WHOLE_BYTES // NUM_RANKS and found["peak_beside"] == found["freed"] + window
    falling = found["samples"][:: 2 * NUM_RANKS]
    assert falling[0] - falling[-1] >= WHOLE_BYTES // 2, f"rows are given up weight by weight: {falling}"
