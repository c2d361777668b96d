"""`graphshard doctor`: every no has its reason, and windows whose owner died are found."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from cli_runner import apart, here
from window_programs import hold_a_peers_window

from graphshard.cli import doctor
from graphshard.cli.doctor_checks import Check, machine_checks
from graphshard.cli.doctor_memory import Window, scan_windows
from graphshard.comm.launch import RankProcesses

EXPECTED = ("rank processes", "eager list", "executor cooperative", "executor threaded", "host device", "libcuda")


def test_json_of_this_machine() -> None:
    answer = apart("doctor", "--json", "-")
    assert answer.code == 0, answer.err
    told = answer.json
    rows = {row["check"]: row for row in told["rows"]}
    assert set(EXPECTED) <= set(rows) and told["works"] is True
    assert all(rows[name]["can"] for name in EXPECTED if name != "libcuda")
    for row in told["rows"]:
        assert row["can"] == (row["why_not"] is None) and (row["can"] or row["why_not"]), row
        assert row["found"] or not row["can"], row
    assert {"windows", "self_test_s", "machine"} <= set(told) and "never seen" in told["windows"]["blind_spots"]


def test_spare_cores_are_a_no_with_its_reason() -> None:
    cores = len(os.sched_getaffinity(0))
    found = {check.check: check for check in machine_checks(world_size=cores)}
    assert not found["spare cores"].can and f"{cores} cores for {cores} ranks" in str(found["spare cores"].why_not)
    if cores > 1:
        assert {check.check: check for check in machine_checks(cores - 1)}["spare cores"].can


def test_a_runtime_that_does_not_work_is_code_3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "self_test", lambda: [Check("rank processes", "", "no sockets here")])
    answer = here("doctor")
    assert answer.code == 3
    assert "DeviceError: the host runtime does not work on this machine - rank processes: no sockets" in answer.err
    assert "Traceback" not in answer.err


def test_a_self_test_that_fails_names_rank_and_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ENTRY", "graphshard.cli.doctor_rank:no_such_function")
    (check,) = doctor.self_test()
    assert not check.can and "[rank 0/2] SpecError" in str(check.why_not)


def test_a_window_whose_owner_was_killed_is_found(tmp_path: Path) -> None:
    """Rank 1 is killed while rank 0 maps its window: only rank 0 keeps it alive."""
    fifo = tmp_path / "held"
    os.mkfifo(fifo)
    entry = f"{Path(__file__).parent / 'window_programs.py'}:{hold_a_peers_window.__name__}"
    with RankProcesses(entry, 2, arguments=[str(fifo)]) as ranks:
        pids = ranks.pids
        with open(fifo) as said:
            assert said.read() == "held"
        before = {w.inode for w in scan_windows().pinned if set(pids) & {*w.owner_pids, *w.reader_pids}}
        assert before == set()
        ranks.signal(1, signal.SIGKILL)
        os.waitid(os.P_PID, pids[1], os.WEXITED | os.WNOWAIT)
        pinned = [window for window in scan_windows().pinned if pids[0] in window.reader_pids]
        assert [window.num_bytes for window in pinned] == [8192]
        answer = apart("doctor")
        assert answer.code == 0 and f"8.0 KiB of a rank that ended is held by pid {pids[0]}" in answer.out


def test_the_hosts_nccl_is_not_taken_for_nvidias() -> None:
    found = {check.check: check for check in machine_checks(world_size=2)}
    told = found["transport nccl"].found
    assert told.startswith("on host: graphshard's host NCCL, acting as 2.")
    assert ("no NVIDIA NCCL here" in told) != found["libnccl"].can


def test_lines_are_wrapped_between_words() -> None:
    path = "/a-very/long/path-of-hyphens/lib/libgraphshard_hostnccl.so"
    lines = doctor.check_lines([Check("libnccl", "", f"{path} cannot be loaded: no such file")], width=40)
    assert lines[0].split() == ["what", "here", "found,", "or", "why", "not"]
    assert lines[1] == f"libnccl  no    {path}" and [line.strip() for line in lines[2:]] == [
        "cannot be loaded: no such file"
    ]


def test_what_a_process_holds_is_one_line() -> None:
    windows = [Window(inode, 8192, reader_pids=[7], holder_pids=[7]) for inode in range(6)]
    windows.append(Window(6, 4096, reader_pids=[9]))
    assert doctor.holder_lines(windows) == [
        "48.0 KiB in 6 windows of ranks that ended is held by pid 7",
        "4.0 KiB of a rank that ended is held by pid 9",
    ]
