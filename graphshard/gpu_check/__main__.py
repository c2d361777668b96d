"""`python -m graphshard.gpu_check STEP --device cuda|host --json FILE`: one step of bench/gpu_check.sh."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from graphshard.gpu_check.faults import check_faults
from graphshard.gpu_check.llama import check_llama
from graphshard.gpu_check.nccl import check_nccl
from graphshard.gpu_check.numbers import check_numbers
from graphshard.gpu_check.ranks import check_ranks
from graphshard.gpu_check.recorder import Recorder
from graphshard.gpu_check.setup import Setup

STEPS: dict[str, Callable[[Recorder, Setup], None]] = {
    "ranks": check_ranks,
    "llama": check_llama,
    "numbers": check_numbers,
    "faults": check_faults,
    "nccl": check_nccl,
}


def main(arguments: list[str] | None = None) -> int:
    """Make the step's checks; 1 if one failed."""
    parser = argparse.ArgumentParser(prog="graphshard.gpu_check", description=__doc__)
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("--device", choices=("cuda", "host"), required=True)
    parser.add_argument("--json", type=Path, required=True, help="the file that results are written to")
    options = parser.parse_args(arguments)
    recorder = Recorder(options.json, options.step)
    STEPS[options.step](recorder, Setup(options.device))
    return 1 if recorder.has_failed else 0


if __name__ == "__main__":
    sys.exit(main())
