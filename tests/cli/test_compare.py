"""`graphshard compare` on rank processes: what is equal, what differs first, what it costs; exit codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli_runner import Answer, apart, here
from small_llama import write_small_llama

from graphshard.cli import compare
from graphshard.cli.compare_stage import Staged
from graphshard.core.errors import DeviceError
from graphshard.device.as_libcuda import why_not_as_libcuda

pytestmark = pytest.mark.skipif(why_not_as_libcuda() is not None, reason=str(why_not_as_libcuda()))
STEPS = 3


SLOW = pytest.mark.slow


def run(*options: object) -> Answer:
    return here("compare", "--layers", 4, "--steps", STEPS, *options, "--json", "-")


def gathers(told: dict[str, Any], rank: int, run: str) -> list[dict[str, Any]]:
    return [row for row in told["rows"] if (row["kind"], row.get("rank"), row["run"]) == ("gather", rank, run)]


@pytest.mark.parametrize(
    ("transport", "world_size", "nodes"), [("pull", 2, 2), ("nccl", 2, 6), pytest.param("nccl", 3, 7, marks=SLOW)]
)
def test_eager_and_captured_steps_do_the_same(transport: str, world_size: int, nodes: int) -> None:
    answer = run("--transport", transport, "--world-size", world_size)
    assert answer.code == 0, answer.err
    told = answer.json
    assert told["sequences_equal"] is True and told["first_difference"] is None
    assert told["outputs_equal"] is True and told["ran"] is True and told["problems"] == []
    assert told["claims"] == ["no kernel nodes in 4 gathers"] * world_size
    for rank in range(world_size):
        eager, graph = gathers(told, rank, "eager"), gathers(told, rank, "graph")
        assert [row["unit"] for row in eager] == [0, 1, 2, 3]
        assert [{**row, "run": None} for row in eager] == [{**row, "run": None} for row in graph]
        assert all(row["bytes"] > 0 and row["stream"] == "copy" for row in eager)
        orders = [row["order"] for row in told["rows"] if row.get("rank") == rank and row["run"] == "graph"]
        assert orders == list(range(len(orders)))
        assert {sum(row["nodes"].values()) for row in told["reports"][rank]["gathers"]} == {nodes}
    summary = {row["run"]: row for row in told["rows"] if row["kind"] == "summary"}
    for row in summary.values():
        assert 0 < row["p50_ms"] == row["median_ms"] <= row["p99_ms"]
        assert 0 < row["launch_us"] <= row["host_us"] <= row["p99_ms"] * 1e3
        assert row["n"] == STEPS * world_size == sum(len(rank[row["run"]]["step_ms"]) for rank in told["samples"])
    assert summary.keys() == {"eager", "graph"}
    assert f"sequences equal: eager and captured, on {world_size} ranks" in answer.err


@pytest.mark.parametrize("transport", ["nccl", pytest.param("pull", marks=SLOW)])
def test_a_rank_that_lacks_a_gather_is_found_before_anything_runs(transport: str) -> None:
    answer = run("--transport", transport, "--stage", "skip:rank=1,unit=3")
    assert answer.code == 1, answer.err
    told = answer.json
    assert told["sequences_equal"] is False and told["ran"] is False and told["outputs_equal"] is None
    difference = told["first_difference"]
    assert (difference["rank"], difference["field"]) == (1, "kind")
    assert difference["one"].startswith("gather unit=3 ") and difference["other"].startswith("compute ")
    row = next(row for row in gathers(told, 0, "graph") if row["unit"] == 3)
    assert row["order"] == difference["position"]
    assert [row["unit"] for row in gathers(told, 1, "graph")] == [0, 1, 2]
    assert [row["unit"] for row in gathers(told, 1, "eager")] == [0, 1, 2], "as bound"
    assert not [row for row in told["rows"] if row["kind"] == "summary"] and told["samples"] == [{}, {}]
    assert f"sequences DIFFER at {difference['text']}" in answer.err and "nothing was run" in answer.err
    assert told["claims"][1] == "no kernel nodes in 3 gathers; 1 of the program's gathers are not in the graph"


def test_a_fall_back_to_kernels_is_told_with_unit_and_node() -> None:
    answer = run("--transport", "nccl", "--stage", "sm_kernel")
    assert answer.code == 1, answer.err
    told = answer.json
    assert told["claims"] == ["kernel nodes in 4 of 4 gathers: units 0, 1, 2, 3"] * 2
    assert told["problems"][0].startswith("rank 0: unit 0 (op 1 ag_launch unit=0 slot=0 stream=copy): node ")
    assert told["outputs_equal"] is True, "right bytes, by other means"
    assert told["sequences_equal"] is False and told["first_difference"]["field"] == "unit"
    assert told["first_difference"]["other"].startswith("gather by a kernel, no copy that names a unit: stream=copy")
    assert "None" not in answer.err
    assert "ranks 0 1: kernel nodes in 4 of 4 gathers" in answer.err and "UserWarning" not in answer.err


@pytest.mark.slow
def test_a_library_that_leaves_out_a_captured_gather_is_found_before_anything_runs() -> None:
    """The list is whole: only the graph shows it. Calls 1 to 9 warm up, check and record, 10 to 13 are captured."""
    answer = run("--transport", "nccl", "--stage", "skip:rank=1,call=12")
    assert answer.code == 1, answer.err
    told = answer.json
    assert told["ran"] is False and told["first_difference"]["rank"] == 1
    assert len(gathers(told, 1, "eager")) == 4 and len(gathers(told, 1, "graph")) == 3


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        pytest.param("null_window", "answered ncclSuccess with a null window", marks=SLOW),
        ("skip:rank=1,call=16", "rank 1's communicator failed while it waited for step"),
    ],
)
def test_staged_faults_of_the_library_end_in_their_named_error(stage: str, said: str) -> None:
    answer = run("--transport", "nccl", "--stage", stage, "--timeout-s", 10)
    assert answer.code == 1, answer.err
    told = answer.json
    assert told["sequences_equal"] is None and told["rows"] == [] and told["error"].startswith("CommError: ")
    assert said in told["error"] or said.replace("rank 1", "rank 0") in told["error"]
    assert told["error"] in answer.err and told["never_met"] == []


def test_a_staged_call_that_never_comes_is_no_success() -> None:
    answer = run("--transport", "nccl", "--stage", "version=23203;skip:rank=1,call=99999")
    assert answer.code == 1, answer.err
    assert answer.json["sequences_equal"] is True and answer.json["never_met"] == ["skip"]
    assert "the staged fault was never met: skip" in answer.err


def test_an_error_that_is_none_of_communication_is_not_taken_for_the_staged_fault(tmp_path: Path) -> None:
    folder = write_small_llama(tmp_path / "small")
    (folder / "model.safetensors").unlink()
    answer = here("compare", "--model", folder, "--transport", "nccl", "--stage", "sm_kernel")
    assert answer.code == 2, answer.err
    assert answer.err.startswith("LoadError: [ranks 0 1] ")


def test_a_fault_that_no_rank_met_is_told_only_if_all_ranks_could_say(tmp_path: Path) -> None:
    staged = Staged(library="null_window;skip:rank=1,call=3")
    (tmp_path / "0").write_text('{"met": ["null_window"], "error_type": "CommError"}')
    assert staged.never_met(tmp_path, 2) == [] and staged.may_explain(tmp_path)
    (tmp_path / "1").write_text('{"met": [], "error_type": "KeyError"}')
    assert staged.never_met(tmp_path, 2) == ["skip"] and not staged.may_explain(tmp_path)


@pytest.mark.slow
def test_a_folders_model(tmp_path: Path) -> None:
    folder = write_small_llama(tmp_path / "small")
    answer = apart("compare", "--model", folder, "--steps", 1, "--units", "weight", "--world-size", 1)
    assert answer.code == 0, answer.err
    assert "and 1 more ops: --json has all" not in answer.out and "sequences equal" in answer.out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--stage", "explode"], "'explode' is not known; known: skip:rank=R,unit=U; with nccl on the host also"),
        (["--stage", "skip:rank=1"], "is not known; known: skip:rank=R,unit=U"),
        (["--stage", "sm_kernel"], "--stage sm_kernel: needs --transport nccl on --device host"),
        (["--stage", "skip:rank=2,unit=0"], "there is no rank 2 among 2 ranks"),
        (["--stage", "null_window;swap:rank=2,call=1", "--transport", "nccl"], "there is no rank 2 among 2 ranks"),
        (
            ["--stage", "skip:rank=1,call=0", "--transport", "nccl"],
            "'skip:rank=1,call=0' is not known",
        ),  # 1 is the first
        (["--stage", "abort_hang", "--transport", "nccl"], "nothing is aborted unless another fault is joined to it"),
        (["--stage", "first_use_hang", "--transport", "nccl"], "happens to 2 ranks, and before NCCL 2.31.2"),
        (["--stage", "version=23102;first_use_hang", "--transport", "nccl"], "before NCCL 2.31.2: use --world-size 2"),
        (
            ["--stage", "version=23101;first_use_hang", "--transport", "nccl", "--world-size", 3],
            "--stage first_use_hang: happens to 2 ranks",
        ),
        (["--stage", "skip:rank=0,call=1;skip:rank=1,call=2", "--transport", "nccl"], "skip is given twice"),
        (["--transport", "gloo"], "'gloo' is not one of 'pull', 'nccl'"),
        (["--layers", 2, "--model", "."], "--layers: --model has its own layers"),
        (["--model", "/nonexistent"], "/nonexistent"),
        (["--steps", 0], "0 is not in the range x>=1"),
        (["--timeout-s", "nan"], "--timeout-s nan: give seconds, at most 86400"),
        (["--timeout-s", "inf"], "--timeout-s inf: give seconds, at most 86400"),
    ],
)
def test_bad_requests(options: list[object], said: str) -> None:
    answer = here("compare", *options)
    assert answer.code == 2
    assert said in answer.err


@pytest.mark.parametrize("units", ["layer", "auto"])
def test_a_unit_that_is_not_in_the_plan(units: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if units != "auto":
        monkeypatch.delattr(compare, "rank_values")  # refused before ranks are started
    answer = run("--world-size", 1, "--stage", "skip:rank=0,unit=4", "--units", units)
    assert answer.code == 2
    assert (
        f"unit 4 is not in the plan: it has {0 if units == 'auto' else 4} units" in answer.err
    )  # auto: nothing is sharded


def test_a_machine_without_a_gpu_says_so_before_ranks_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def no_device(local_rank: int) -> int:
        asked.append(local_rank)
        raise DeviceError("device cuda is not available: there is no driver")

    monkeypatch.setattr(compare, "cuda_index", no_device)
    monkeypatch.delattr(compare, "rank_values")
    answer = here("compare", "--device", "cuda", "--world-size", 3)
    assert answer.code == 3
    assert answer.err == "DeviceError: device cuda is not available: there is no driver\n"
    assert asked == [2]  # the rank that needs the most devices


def test_a_machine_without_cuda_python_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "why_no_bindings", lambda: "graphs are walked with cuda-python")
    answer = here("compare")
    assert answer.code == 3
    assert "captured graphs cannot be looked at: graphs are walked with cuda-python" in answer.err


def test_outputs_that_differ_are_said_and_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    one = {"kind": "gather", "op": 0, "unit": 0, "slot": 0, "num_bytes": 64, "stream": "copy", "after": []}
    samples = {run: {"step_ms": [1.0], "host_us": [9.0], "launch_us": [3.0]} for run in ("eager", "graph")}
    value = {
        "rows": {"eager": [one], "graph": [one]},
        "difference": None,
        "ran": True,
        "outputs_equal": True,
        "report": {"problems": []},
        "claim": "no kernel nodes in 1 gathers",
        "samples": samples,
        "plan": {},
    }
    monkeypatch.setattr(compare, "rank_values", lambda *a, **b: [value, {**value, "outputs_equal": False}])
    full = here("compare", "--json", "/dev/full")
    assert full.code == 2
    assert full.err == "SpecError: --json /dev/full could not be written: No space left on device\n"
    answer = here("compare")
    assert answer.code == 1
    assert "outputs DIFFER between the eager run and the replay" in answer.out
