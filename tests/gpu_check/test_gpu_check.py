"""`bench/gpu_check.sh`: the dry run on the host, and what is left of runs that fail, hang or are cut short."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "bench" / "gpu_check.sh"
sys.path.append(str(ROOT / "bench" / "gpu"))

import check  # noqa: E402
import needs  # noqa: E402
import pip_output  # noqa: E402
import summary  # noqa: E402


def run_check(out: Path, *arguments: str, timeout_s: float) -> tuple[int, dict[str, Any], str]:
    """Exit code, results.json and what was printed."""
    command = ["bash", str(SCRIPT), "--device", "host", "--no-build", "--out", str(out), "--work", str(out / "work")]
    done = subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**check.os.environ, "PYTHON": sys.executable},
    )
    return done.returncode, json.loads((out / "results.json").read_text()), done.stdout + done.stderr


def test_the_probe_dry_runs(tmp_path: Path) -> None:
    code, results, printed = run_check(tmp_path, "--steps", "probe", timeout_s=60)
    assert code == 0, printed
    rows = {row["check"]: row for row in results["rows"]}
    assert rows["device memory to another process"]["is_equal"] is True
    assert rows["driver"]["attributes"]["descriptors"] == 1
    assert "| probe | driver | passed |" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "log.txt").read_text().startswith("== probe")


@pytest.mark.slow
def test_all_steps_dry_run(tmp_path: Path) -> None:
    code, results, printed = run_check(tmp_path, timeout_s=900)
    assert code == 0, printed
    assert {row["step"] for row in results["rows"]} == set(check.STEPS) - {"build"}
    assert all(row["reason"] for row in results["rows"] if row["status"] == "skipped")
    assert sum(file.is_file() for file in tmp_path.iterdir()) <= 8


def _run(tmp_path: Path, deadline_s: float) -> check.Run:
    (tmp_path / "steps").mkdir()
    return check.Run("cuda", tmp_path, tmp_path, False, time.monotonic() + deadline_s)


def _step(monkeypatch: pytest.MonkeyPatch, program: str, limit_s: float) -> None:
    monkeypatch.setitem(check.STEPS, "faults", (lambda run: ["-c", program], limit_s))


@pytest.mark.slow
def test_a_step_that_hangs_is_ended_with_its_children_and_keeps_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = '{"rows": [{"check": "a", "status": "passed"}, {"check": "b", "status": "running"}]}'
    program = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open({str(tmp_path / "steps" / "faults.json")!r}, "w").write({rows!r})
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
time.sleep(60)
"""
    _step(monkeypatch, program, check.MIN_STEP_S)
    run = _run(tmp_path, 60)
    result = check.run_step(run, "faults", print)
    assert [row["status"] for row in result.rows()] == ["passed", "cut short"]
    assert "cut short after 5 s" in result.rows()[1]["reason"]
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while _runs(pid):
        assert time.monotonic() < deadline, "the step's child is still there"
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_step_that_crashes_has_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _step(monkeypatch, "import os; os.abort()", 30.0)
    result = check.run_step(_run(tmp_path, 60), "faults", print)
    table, has_failed = summary.write_results(tmp_path, {}, [result], 1.0)
    assert has_failed and "ended with -6" in table
    assert json.loads((tmp_path / "results.json").read_text())["counts"]["not run"] == 1


def test_what_the_time_does_not_suffice_for_has_not_run(tmp_path: Path) -> None:
    result = check.run_step(_run(tmp_path, check.MIN_STEP_S / 2), "faults", print)
    assert result.rows()[0]["status"] == "not run" and "time was up" in result.rows()[0]["reason"]


def test_a_host_driver_that_is_not_there_is_not_probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(check.importlib.util, "find_spec", nothing)
    run = check.Run("host", tmp_path, tmp_path, True, time.monotonic() + 60)
    assert check.run_step(run, "probe", print).rows() == [
        {
            "step": "probe",
            "check": "all",
            "status": "skipped",
            "reason": "graphshard was neither installed nor built here before, so there is no host driver to probe",
        }
    ]


def test_a_second_run_is_refused_by_the_name_of_the_folder(tmp_path: Path) -> None:
    """It would take the first one's results away."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "kept").touch()
    for option, folder in {"--work": tmp_path / "work", "--out": tmp_path}.items():
        with contextlib.ExitStack() as stack:
            check.lock_folder(stack, option, folder)
            command = ["--device", "host", "--steps", "probe", "--out", str(tmp_path), "--work", str(tmp_path / "work")]
            done = subprocess.run(
                ["bash", str(SCRIPT), *command],
                capture_output=True,
                text=True,
                timeout=60,
                env={**check.os.environ, "PYTHON": sys.executable},
            )
        assert done.returncode == 2
        refusal = f"another run uses {folder}: wait for it, or give another folder by {option}"
        assert done.stderr == f"bench/gpu_check.sh: {refusal}\n"
    assert not (tmp_path / "log.txt").exists()


def test_what_is_missing_is_said_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(needs, "is_there", lambda module: module not in ("torch", "nanobind"))
    assert check.main(["--device", "host", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]) == 2
    said = capsys.readouterr().err
    assert f"{sys.executable} lacks nanobind, torch" in said and "activate .venv, or set PYTHON=..." in said
    assert not (tmp_path / "out").exists()
    assert needs.lacking(["probe"], builds=True) == []
    monkeypatch.setattr(needs, "is_there", lambda module: module != "graphshard._core")
    assert "--no-build" in needs.lacking(["ranks"], builds=False)[0]


def test_pips_last_error_is_the_reason() -> None:
    said = [
        "[1/2] cc",
        "  a.cpp:3:1: error: no such type",
        "ERROR: first",
        "  ERROR: Failed building wheel",
        "note: bye",
    ]
    assert pip_output.error_of(said) == "ERROR: Failed building wheel; a.cpp:3:1: error: no such type"
    assert pip_output.error_of(["a", "b"]) == "a b" and pip_output.error_of([]) == "it said nothing"
    assert pip_output.PROGRESS.match("  [3/96] Building CXX object") and not pip_output.PROGRESS.match(
        "  -- Found Python"
    )


def test_rows_of_a_dry_run_say_so(tmp_path: Path) -> None:
    file = tmp_path / "nccl.json"
    file.write_text('{"rows": [{"check": "a", "status": "passed", "version": "2.32.3"}]}')
    results = [summary.StepResult(step, file, seconds=1.0) for step in ("ranks", "nccl")]
    table, _ = summary.write_results(tmp_path, {"device": "host"}, results, 1.0)
    assert "graphshard's host driver: " in table and "graphshard's host NCCL: it says that it is NCCL 2.32.3" in table
    table, _ = summary.write_results(tmp_path, {"device": "cuda"}, results, 1.0)
    assert "host" not in table and "| NCCL 2.32.3 |" in table
    assert summary.outcome(results[0]) == "1 passed in 1.0 s"


def test_folders_are_named_after_the_card() -> None:
    assert check._default_out("host", {}).parent == ROOT / "build" / "gpu_check"
    assert check.folder_name("cuda", {"name": "NVIDIA H200"}).endswith("-nvidia-h200")
    assert check.folder_name("host", check.card_facts("host")).endswith("-host")


def test_unknown_steps_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        check.main(["--steps", "probe,nonsense"])
    assert caught.value.code == 2
    assert "unknown steps nonsense; known: probe, build" in capsys.readouterr().err


def test_limits_of_the_steps_that_matter_fit_the_whole_run() -> None:
    """What comes last may be left out; what the results are wanted for may not, should all of it take its limit."""
    needed = ("probe", "build", "ranks", "llama")
    assert sum(check.STEPS[name][1] for name in needed) <= check.LIMIT_S
    assert check.LIMIT_S < 8 * 60
