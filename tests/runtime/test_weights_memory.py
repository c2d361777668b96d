"""What ranks hold while they load is what they keep, and a few pieces: never the checkpoint, never a whole layer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import load_memory
from ranks import rank_environment


def test_four_ranks_hold_a_quarter_each_while_they_load(tmp_path: Path) -> None:
    load_memory.write(tmp_path)
    ended = subprocess.run(
        [sys.executable, load_memory.__file__, str(tmp_path)],
        env={**os.environ, **rank_environment()},
        stdout=subprocess.PIPE,
        check=True,
        timeout=120,
    )
    found = json.loads(ended.stdout)
    checkpoint_bytes = load_memory.NUM_LAYERS * load_memory.LAYER_BYTES + load_memory.RESIDENT_BYTES
    assert found["first"] == [9] * 4
    assert found["kept"] == checkpoint_bytes + 3 * load_memory.RESIDENT_BYTES
    assert found["most"] >= 0.9 * (found["kept"] + found["slots"]), "it was looked at too early to tell"
    # 16 threads' stacks and Python's own; one layer read whole by one rank would be 12 MiB, all by all 384
    assert found["most"] <= found["kept"] + found["slots"] + (8 << 20), found
