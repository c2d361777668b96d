"""Runs tests/gpu, or the litmus tests over the driver that is really there; a row a test, as soon as it has ended."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

OUTCOME = re.compile(r"^(?P<test>\S+::\S.*?) (?P<outcome>PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)(?: \((?P<why>.*)\))?")
STATUS = {"PASSED": "passed", "SKIPPED": "skipped", "XFAIL": "passed"}
SUITES = {"gpu-tests": "tests/gpu", "litmus": "tests/conformance/test_litmus.py"}
LITMUS = {"cuda": "test_cuda", "host": "test_host"}


def command(suite: str, device: str, evidence: Path) -> list[str]:
    """Litmus tests over one of the two drivers; tests/gpu says itself what it needs."""
    pytest = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--tb=short", SUITES[suite]]
    if suite == "gpu-tests":
        return [*pytest, "--evidence", str(evidence)]
    others = " or ".join(name for kind, name in LITMUS.items() if kind != device)
    return [*pytest, "-k", f"not ({others})"]


def main() -> int:
    """pytest's verdict."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--tree", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "host"), required=True)
    parser.add_argument("--evidence", type=Path, required=True, help="where what is shown of copy engines is kept")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    environment = {**os.environ, "COLUMNS": "400"}  # reasons of skips whole
    process = subprocess.Popen(
        command(options.suite, options.device, options.evidence),
        cwd=options.tree,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    began = time.perf_counter()
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        found = OUTCOME.match(line)
        if found is None:
            continue
        now = time.perf_counter()
        row = {
            "check": found["test"],
            "status": STATUS.get(found["outcome"], "failed"),
            "seconds": round(now - began, 2),
        }
        began = now
        rows.append(row | ({"reason": found["why"]} if found["why"] else {}))
        options.json.write_text(json.dumps({"step": options.suite, "rows": rows}, indent=1) + "\n")
    code = process.wait()
    if code not in (0, 1, 5):
        rows.append({"check": "pytest", "status": "failed", "reason": f"pytest ended with {code}"})
        options.json.write_text(json.dumps({"step": options.suite, "rows": rows}, indent=1) + "\n")
    return 0 if code in (0, 5) else 1


if __name__ == "__main__":
    sys.exit(main())
