"""Containers give 64 MiB of /dev/shm or less. Nothing here uses it: windows are memfds, reserved up front."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import shm_program
from ranks import rank_environment

SIZE_BYTES = 8 << 20
MOUNT = f"mount -t tmpfs -o size={SIZE_BYTES} small /dev/shm"


def namespace() -> list[str]:
    """The command that runs a shell command line with mounts of its own; skips where none is allowed."""
    why = "unshare is not installed"
    if shutil.which("unshare"):
        for flags in (["-m"], ["-r", "-m"]):
            command = ["unshare", *flags, "sh", "-c"]
            tried = subprocess.run([*command, MOUNT], capture_output=True, text=True, timeout=60, check=False)
            if tried.returncode == 0:
                return command
            why = tried.stderr.strip()
    pytest.skip(f"no mount namespace here: {why}")


def test_everything_works_with_a_small_and_full_dev_shm(tmp_path: Path) -> None:
    """Two ranks whose windows are larger; one is killed, and comes back."""
    line = f'{MOUNT} && exec "$0" "$@"'
    command = [*namespace(), line, sys.executable, shm_program.__file__, str(tmp_path)]
    done = subprocess.run(
        command, env={**os.environ, **rank_environment()}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["size"], report["free"], report["during"]) == (SIZE_BYTES, 0, ["full"])
    for told in report["told"]:
        assert told["wrong"] == [] and told["used"] == [] and told["steps"] >= 2
        assert told["window"] > SIZE_BYTES
