"""`python -m graphshard.bench.gpu STEP --device cuda|host --json FILE`: one step of bench/gpu_check.sh."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from graphshard.bench.gpu.faults import check_faults
from graphshard.bench.gpu.llama import check_llama
from graphshard.bench.gpu.nccl import check_nccl
from graphshard.bench.gpu.numbers import check_numbers
from graphshard.bench.gpu.ranks import check_ranks
from graphshard.bench.gpu.recorder import Recorder
from graphshard.bench.gpu.setup import Setup

STEPS: dict[str, Callable[[Recorder, Setup], None]] = {
    "ranks": check_ranks,
    "llama": check_llama,
    "numbers": check_numbers,
    "faults": check_faults,
    "nccl": check_nccl,
}


def main(arguments: list[str] | None = None) -> int:
    """Make the step's checks; 1 if one failed."""
    parser = argparse.ArgumentParser(prog="graphshard.bench.gpu", description=__doc__)
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("--device", choices=("cuda", "host"), required=True)
    parser.add_argument("--json", type=Path, required=True, help="the file that results are written to")
    options = parser.parse_args(arguments)
    recorder = Recorder(options.json, options.step)
    STEPS[options.step](recorder, Setup(options.device))
    return 1 if recorder.has_failed else 0


if __name__ == "__main__":
    sys.exit(main())
