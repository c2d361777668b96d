"""Runs the steps of `bench/gpu_check.sh`, each in a process group of its own and within its limit.

Results are written after every step, so a run that is cut short leaves what it has. A step that fails stops no other.
Needs the standard library alone: nothing is built when it begins.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from needs import lacking
from summary import StepResult, outcome, write_results

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIMIT_S = 465.0
"""Of the whole run: under the 8 minutes that it may take."""
DRY_RUN_FACTOR = 4.0
"""A dry run may take this many times longer: the host builds with few cores, and nobody pays for it."""
MIN_STEP_S = 5.0
"""A step that would have less is not begun."""


@dataclass
class Run:
    """One run of the command."""

    device: str
    out: Path
    work: Path
    is_built: bool
    deadline: float
    results: list[StepResult] = field(default_factory=list)

    @property
    def patience(self) -> float:
        """By how much limits are stretched."""
        return DRY_RUN_FACTOR if self.device == "host" else 1.0

    @property
    def tree(self) -> Path:
        """Where the package lies beside its tests: what was built, or the checkout itself."""
        return self.work / "tree" if self.is_built else ROOT

    def json(self, step: str) -> Path:
        """The file that a step writes."""
        return self.work / "steps" / f"{step}.json"


def _probe(run: Run) -> list[str]:
    library = _driver_library(run)
    return [str(HERE / "probe.py"), "--library", library, "--json", str(run.json("probe"))]


def _build(run: Run) -> list[str]:
    return [str(HERE / "build.py"), "--work", str(run.work), "--json", str(run.json("build"))]


def _tests(suite: str) -> Callable[[Run], list[str]]:
    def command(run: Run) -> list[str]:
        what = [suite, "--tree", str(run.tree), "--device", run.device, "--evidence", str(run.out / "copy_engine.json")]
        return [str(HERE / "run_tests.py"), *what, "--json", str(run.json(suite))]

    return command


def _checks(step: str) -> Callable[[Run], list[str]]:
    return lambda run: ["-m", "graphshard.gpu_check", step, "--device", run.device, "--json", str(run.json(step))]


STEPS: dict[str, tuple[Callable[[Run], list[str]], float]] = {
    "probe": (_probe, 30.0),
    "build": (_build, 150.0),
    "gpu-tests": (_tests("gpu-tests"), 90.0),
    "ranks": (_checks("ranks"), 120.0),
    "llama": (_checks("llama"), 120.0),
    "numbers": (_checks("numbers"), 120.0),
    "faults": (_checks("faults"), 90.0),
    "litmus": (_tests("litmus"), 120.0),
    "nccl": (_checks("nccl"), 60.0),
}
"""By name: the interpreter's arguments, and the limit in seconds. What may hang in a library comes last."""


def _driver_library(run: Run) -> str:
    if run.device == "cuda":
        return "libcuda.so.1"
    name = Path("lib") / "libgraphshard_hostcuda.so"
    places = [run.tree / "graphshard"]  # of an earlier run
    with contextlib.suppress(ModuleNotFoundError):
        found = importlib.util.find_spec("graphshard._core")
        places += [Path(found.origin).parent] if found is not None and found.origin is not None else []
    for place in places:
        if (place / name).is_file():
            return str(place / name)
    raise LookupError("graphshard was neither installed nor built here before, so there is no host driver to probe")


def _environment(run: Run) -> dict[str, str]:
    """Of the steps: the tree first; on the host its driver under the name by which cuda-python finds one."""
    path = os.pathsep.join(filter(None, [str(run.tree), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    environment.setdefault("OMP_NUM_THREADS", "1" if run.device == "host" else "4")
    environment.setdefault("NCCL_SOCKET_IFNAME", "lo")  # all ranks are here, and there may be no other interface
    if run.device == "host" and run.tree.is_dir():
        ask = "from graphshard.device import host_driver_environment as e; print(e()['LD_LIBRARY_PATH'])"
        done = subprocess.run(
            [sys.executable, "-c", ask], cwd=run.tree, env=environment, capture_output=True, text=True, timeout=60
        )
        if done.returncode == 0:
            environment["LD_LIBRARY_PATH"] = done.stdout.strip()
    return environment


def run_step(run: Run, name: str, log: Callable[[str], None]) -> StepResult:
    """Run one step to its end or its limit."""
    command_of, limit_s = STEPS[name]
    limit_s = min(limit_s * run.patience, run.deadline - time.monotonic())
    if limit_s < MIN_STEP_S:
        return StepResult(name, run.json(name), reason="not begun: the run's time was up", seconds=0.0)
    try:
        command = [sys.executable, *command_of(run)]
    except LookupError as error:
        return StepResult(name, run.json(name), reason=str(error), is_skipped=True, seconds=0.0)
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=run.tree if run.tree.is_dir() else ROOT,
        env=_environment(run),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    reader = threading.Thread(target=_follow, args=(process, log), daemon=True)
    reader.start()
    reason = ""
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        reason = f"cut short after {limit_s:.0f} s"
    _end_group(process)
    reader.join(5.0)
    if not reason and process.returncode not in (0, 1):
        reason = f"ended with {process.returncode}"
    return StepResult(name, run.json(name), reason=reason, seconds=round(time.monotonic() - began, 1))


def _follow(process: subprocess.Popen[str], log: Callable[[str], None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        log(line.rstrip("\n"))


def _end_group(process: subprocess.Popen[str]) -> None:
    """End the step and whatever it has left running: the group is the step's own."""
    with contextlib.suppress(ProcessLookupError):  # all of it has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


CARD_FACTS = ("name", "driver_version", "memory.total", "clocks.max.sm", "clocks.max.memory", "power.limit")


def card_facts(device: str) -> dict[str, str]:
    """What nvidia-smi says of the first card; nothing where there is none."""
    smi = shutil.which("nvidia-smi") if device == "cuda" else None
    if smi is None:
        return {}
    query = [smi, f"--query-gpu={','.join(CARD_FACTS)}", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30)
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return dict(zip(CARD_FACTS, map(str.strip, lines[0].split(",")), strict=False)) if lines else {}


def folder_name(device: str, facts: dict[str, str]) -> str:
    """`2026-12-01-nvidia-h200`."""
    card = re.sub(r"[^a-z0-9]+", "-", facts.get("name", device).lower()).strip("-")
    return f"{time.strftime('%Y-%m-%d')}-{card}"


def lock_folder(stack: contextlib.ExitStack, option: str, folder: Path) -> None:
    """Keep other runs out of `folder` until `stack` is left: they would replace each other's files.

    Raises:
        BlockingIOError: another run is in it.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    stack.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BlockingIOError(f"another run uses {folder}: wait for it, or give another folder by {option}") from None


def _default_out(device: str, facts: dict[str, str]) -> Path:
    """What a card did is kept in the repository; a dry run is not."""
    parent = ROOT / "build" / "gpu_check" if device == "host" else ROOT / "bench" / "results"
    return parent / folder_name(device, facts)


def _steps(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in STEPS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown steps {', '.join(unknown)}; known: {', '.join(STEPS)}")
    return names


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/gpu_check.sh", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "host"), default="cuda")
    parser.add_argument(
        "--out",
        type=Path,
        default=os.environ.get("OUT"),
        help="folder of the results (default $OUT; else bench/results, dry runs build/gpu_check)",
    )
    parser.add_argument("--steps", type=_steps, default=list(STEPS), help=f"some of {','.join(STEPS)}")
    parser.add_argument(
        "--no-build",
        action="store_true",
        help="leave out the build, minutes on few cores: take the installed package, and the tests of this checkout",
    )
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="of the whole run, in seconds")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "gpu_check", help="folder for what is built")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """All steps; 1 if one failed, 2 if the run cannot begin."""
    options = _options(arguments)
    steps = [name for name in options.steps if not (options.no_build and name == "build")]
    missing = lacking(steps, not options.no_build)
    if missing:
        refusal = f"{sys.executable} lacks {', '.join(missing)}: activate .venv, or set PYTHON=..."
        print(f"bench/gpu_check.sh: {refusal}", file=sys.stderr)
        return 2
    facts = card_facts(options.device)
    out, work = Path(options.out or _default_out(options.device, facts)).resolve(), options.work.resolve()
    with contextlib.ExitStack() as stack:
        try:
            for option, folder in {"--work": work, "--out": out}.items():
                folder.mkdir(parents=True, exist_ok=True)
                lock_folder(stack, option, folder)
        except OSError as error:
            print(f"bench/gpu_check.sh: {error}", file=sys.stderr)
            return 2
        shutil.rmtree(work / "steps", ignore_errors=True)
        (work / "steps").mkdir()
        config = {"device": options.device, "steps": steps, "limit_s": options.limit_s, "card": facts}
        return _run_all(Run(options.device, out, work, not options.no_build, 0.0), config)


def _run_all(run: Run, config: dict[str, Any]) -> int:
    """The chosen steps in turn, and what they said as it is said; 1 if one failed."""
    began = time.monotonic()
    run.deadline = began + config["limit_s"] * run.patience
    steps: list[str] = config["steps"]
    has_failed = False
    with (run.out / "log.txt").open("w", encoding="utf-8") as file:

        def log(line: str) -> None:
            print(line, flush=True)
            file.write(line + "\n")
            file.flush()

        for number, name in enumerate(steps, 1):
            log(f"== {name} ({number} of {len(steps)}), {time.monotonic() - began:.0f} s after the start")
            run.results.append(run_step(run, name, log))
            table, has_failed = write_results(run.out, config, run.results, time.monotonic() - began)
            log(f"== {name}: {outcome(run.results[-1])}")
        log(f"\n{table}\n{run.out}")
    return 1 if has_failed else 0


if __name__ == "__main__":
    sys.exit(main())
