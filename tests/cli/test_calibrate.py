"""`graphshard calibrate` on a tiny model: a file that loads, that `bench step` and `trace` predict by. Never speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_runner import Answer, apart, here
from small_llama import CONFIG, write_small_llama

from graphshard.cost.hardware import HardwareSpec
from graphshard.cost.hardware_file import load_hardware
from graphshard.cost.host_step import THREADED_PULL
from graphshard.models.llama import load_llama
from graphshard.report.perfetto import PREDICTED_PID

SEGMENTS = {"embed", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "head"}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_llama(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="module")
def calibrated(small: Path) -> tuple[Answer, Path]:
    path = small.parent / "host.json"
    options = ["--batch-sizes", "1,3", "--repeats", 2, "--json", "-"]
    answer = apart("calibrate", "--out", path, "--model", small, *options)
    assert answer.code == 0, answer.err
    return answer, path


@pytest.fixture(scope="module")
def machine(calibrated: tuple[Answer, Path]) -> HardwareSpec:
    return load_hardware(calibrated[1])


@pytest.mark.slow
def test_the_file_has_every_segment_at_every_batch_size(machine: HardwareSpec, small: Path) -> None:
    digest = load_llama(small, 1).spec().digest
    for what in ("segment", "segment_cached"):
        keys = {one.key for one in machine.measured if one.what == what}
        assert keys == {(digest, name, batch, 1) for name in SEGMENTS for batch in (1, 3)}
    assert all(one.us >= 0 for one in machine.measured)
    gathers = {one.key[0] for one in machine.measured if one.what == "gather"}
    assert gathers == {"pull", THREADED_PULL}


@pytest.mark.slow
def test_every_number_says_where_it_comes_from(calibrated: tuple[Answer, Path], machine: HardwareSpec) -> None:
    for name in ("memory_bytes_per_s", "links", "derate", "peak_flops", "launch_us", "overlap_compute", "measured"):
        assert "calibrated on 2 ranks at once" in machine.source(name)
    assert "by copy streams: 1:" in machine.source("links")
    told = calibrated[0].json
    assert told["path"] == str(calibrated[1]) and all(row["value"] > 0 for row in told["rows"])
    assert json.loads(calibrated[1].read_text()) == told["hardware"]


@pytest.mark.slow
def test_a_bench_says_what_is_predicted_beside_what_is_measured(calibrated: tuple[Answer, Path], small: Path) -> None:
    plans = ["--plans", "weight/0/cooperative,weight/1/threaded", "--batch-sizes", "1,3", "--cache-length", 64]
    few = ["--launches", 1, "--steps", 2, "--peers", "replicated", "--no-reference"]
    answer = apart("bench", "step", "--model", small, "--predict", calibrated[1], *plans, *few, "--json", "-")
    assert answer.code == 0, answer.err
    rows = answer.json["rows"]
    for row in rows:
        assert row["spread"] == 0.0  # one launch
        if row["run"] == "eager":
            assert row["predicted_ms"] is None
        else:
            assert row["predicted_ms"] > 0
            assert row["predicted_ratio"] == pytest.approx(row["predicted_ms"] / row["median_ms"])
    assert "within 20% of the measured time" in answer.err


@pytest.mark.slow
def test_a_trace_holds_measured_and_predicted_lanes(calibrated: tuple[Answer, Path], small: Path) -> None:
    path = small.parent / "trace.json"
    plan = ["--units", "layer", "--prefetch-depth", 1, "--executor", "threaded"]
    answer = apart("trace", "--model", small, *plan, "--predict", calibrated[1], "--out", path, "--json", "-")
    assert answer.code == 0, answer.err
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1", PREDICTED_PID: "rank 0 predicted"}
    predicted = [e for e in events if e["ph"] == "X" and e["pid"] == PREDICTED_PID]
    assert {e["cat"] for e in predicted} >= {"compute", "copy"}
    copied = [e["args"]["unit"] for e in predicted if e["cat"] == "copy"]
    assert sorted(set(copied)) == list(range(CONFIG.num_layers))
    assert len(answer.json["predicted"]) == len(predicted)


def test_an_unreadable_file_is_refused_before_ranks_are_started(tmp_path: Path) -> None:
    for command in (["bench", "step"], ["trace"]):
        answer = here(*command, "--predict", tmp_path / "none.json")
        assert answer.code == 2 and "cannot read the hardware file" in answer.err


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    answer = here("calibrate", "--out", tmp_path / "no" / "host.json")
    assert answer.code == 2 and "--out" in answer.err
