"""The checks themselves can fail: wrong bytes, wrong logits and exceptions become rows that say so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from graphshard.gpu_check.decoding import first_unlike_step
from graphshard.gpu_check.naming import NamingModel, naming_bytes, wrong
from graphshard.gpu_check.nccl import SHARED_GPU, check_nccl
from graphshard.gpu_check.ranks import CHOICES, judge, naming_rank
from graphshard.gpu_check.recorder import Recorder, Row
from graphshard.gpu_check.setup import Setup, on_threads


def rows_of(tmp_path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((tmp_path / "step.json").read_text())["rows"]
    return rows


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(tmp_path / "step.json", "step")


def test_every_byte_says_whose_it_is() -> None:
    one, other = naming_bytes("a", 4096), naming_bytes("b", 4096)
    assert not torch.equal(one, other) and not torch.equal(one[:2048], one[2048:])
    assert torch.equal(naming_bytes("a", 100), one[:100])
    assert one.unique().numel() > 250


def test_wrong_bytes_are_named() -> None:
    model = NamingModel([[100, 7]])
    truth = model.truth(torch.device("cpu"))
    outputs = {name: tensor.clone() for name, tensor in truth.items()}
    assert wrong(outputs, truth) == []
    outputs["seen:layers.0.w0"][42] ^= 1
    assert len(wrong(outputs, truth)) == 1 and "layers.0.w0: byte 42 of 100" in wrong(outputs, truth)[0]


@pytest.mark.parametrize("pinned_windows", [False, True])
def test_ranks_see_their_bytes(pinned_windows: bool) -> None:
    told = on_threads(lambda group: naming_rank(group, "host", CHOICES, pinned_windows), 3)
    assert [one["num_wrong"] for one in told] == [0, 0, 0]
    assert all(one["num_steps"] == 8 * len(CHOICES) for one in told)


def test_ranks_that_saw_wrong_bytes_fail_the_check(recorder: Recorder, tmp_path: Path) -> None:
    told = [{"num_steps": 3, "num_wrong": 0, "wrong": []}, {"num_steps": 3, "num_wrong": 1, "wrong": ["byte 5"]}]
    recorder.run("check", lambda row: judge(row, told))
    assert rows_of(tmp_path)[0]["status"] == "failed"
    assert "rank 1 saw wrong bytes: byte 5" in rows_of(tmp_path)[0]["reason"]


def test_a_check_that_raises_ends_alone_and_keeps_what_it_found(recorder: Recorder, tmp_path: Path) -> None:
    def breaks(row: Row) -> None:
        row.add(found=1)
        assert rows_of(tmp_path)[0]["status"] == "running"  # as a run that is cut short leaves it
        raise ValueError("no such card")

    recorder.run("breaks", breaks)
    recorder.run("skips", lambda row: row.skip("needs a card"))
    recorder.run("passes", lambda row: row.require(True, "never said"))
    rows = rows_of(tmp_path)
    assert [row["status"] for row in rows] == ["failed", "skipped", "passed"]
    assert (
        rows[0]["found"] == 1 and rows[0]["reason"] == "ValueError: no such card" and "breaks" in rows[0]["traceback"]
    )
    assert recorder.has_failed


def test_logits_that_differ_in_a_bit_are_found() -> None:
    expected = torch.randn(3, 4).bfloat16()
    found = expected.clone()
    assert first_unlike_step(found, expected) is None
    found[2, 1] = torch.nextafter(found[2, 1], torch.tensor(torch.inf, dtype=torch.bfloat16))
    assert first_unlike_step(found, expected) == 2
    zeros = torch.zeros(2, 2, dtype=torch.bfloat16)
    assert first_unlike_step(-zeros, zeros) == 0


def test_ranks_share_a_gpu_only_where_the_library_lets_them(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphshard.gpu_check.nccl.SHARED_GPU", 99_00_00)
    check_nccl(recorder, Setup("host"))
    rows = {row["check"]: row for row in rows_of(tmp_path)}
    assert [row["label"] for row in rows.values() if "label" in row] == ["host NCCL, ABI only"] * 2
    assert rows["2 ranks on one host device"]["status"] == "skipped"
    assert "NCCL_MULTI_RANK_GPU_ENABLE" in rows["2 ranks on one host device"]["reason"]
    assert SHARED_GPU == 23000
    assert not recorder.has_failed
