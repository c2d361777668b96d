"""`graphshard bench load` at a small size: memory and bytes are within their limits, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_runner import apart, here

from graphshard.core.sizes import parse_bytes


def load(folder: Path, *options: object) -> list[object]:
    return ["bench", "load", "--size", "48MiB", "--world-size", 2, "--folder", folder, *options]


def test_a_small_checkpoint(tmp_path: Path) -> None:
    answer = apart(*load(tmp_path, "--num-files", 3, "--peers", "read", "--repeats", 2, "--json", "-"), fork=False)
    assert answer.code in (0, 1), answer.err
    told = answer.json
    assert (answer.code == 0) == (told["missed"] == [])
    assert all("plain read's time" in line for line in told["missed"])  # nothing else depends on how busy a machine is
    assert told["checkpoint_bytes"] <= told["pss_bytes"] <= told["peak_bytes"] <= told["limit_bytes"]
    assert told["limit_bytes"] == 2 * (told["chunk_bytes"] + told["resident_bytes"] + parse_bytes("64MiB"))
    assert told["checkpoint_bytes"] <= told["bytes_read"] <= 1.02 * told["checkpoint_bytes"]
    assert told["num_wrong"] == 0 and told["ways"] == ["bytes"] and told["why_not"] == {}
    assert [row["what"] for row in told["rows"]] == ["graphshard", "plain read", "private", "again"]
    assert told["peers"] == told["rows"][1:]
    for row in told["rows"]:
        assert row["n"] == len(row["samples_s"]) == 2 and row["seconds"] > 0 and row["cpu_s"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_beside_fsdp2(tmp_path: Path) -> None:
    """Every rank holds the whole module at once; from mapped files it touches little more than its own part."""
    answer = apart(*load(tmp_path, "--fsdp2-size", "128MiB", "--repeats", 1, "--json", "-"), timeout_s=300, fork=False)
    assert answer.code in (0, 1), answer.err
    rows = {row["what"]: row for row in answer.json["rows"][4:]}
    assert list(rows) == ["graphshard", "fsdp2", "fsdp2_mapped"]
    assert rows["fsdp2"]["x_checkpoint"] >= 2
    # both ranks hold all of it, and not at the very same moment: memory is sampled
    assert rows["fsdp2"]["peak_bytes"] >= 1.5 * rows["fsdp2"]["checkpoint_bytes"]
    assert rows["graphshard"]["peak_bytes"] < rows["fsdp2"]["peak_bytes"]
    assert "every rank fills a whole module" in answer.err


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    assert here(*load(tmp_path)[:2], "--size", "1KiB").code == 2
    answer = here(*load(tmp_path)[:2], "--size", "4TiB", "--folder", tmp_path)
    assert answer.code == 3 and "use another --folder, or a smaller --size" in answer.err
    assert list(tmp_path.iterdir()) == []
