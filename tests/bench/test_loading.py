"""`bench load`: what is put together is right, for made-up samples and for a small checkpoint on threads."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphshard.bench.load_peers import READ_BYTES, Share, private_memory
from graphshard.bench.load_rows import load_row, missed, peak_bytes, time_share
from graphshard.bench.peak import ANONYMOUS, SampledMemory, held_now, highest_sum
from graphshard.bench.synthetic import Content, SyntheticModel, write_checkpoint
from graphshard.core.errors import SpecError
from graphshard.load.checkpoint import Checkpoint
from graphshard.load.recipe import Concat, Read, reads_of

MIB = 2**20
SMALL = SyntheticModel(width=64, num_layers=3)


def test_the_highest_sum_is_of_one_time() -> None:
    """Ranks whose peaks come one after the other do not hold both at once."""
    assert highest_sum([private({0: 1, 5: 100, 6: 1, 9: 1}), private({0: 1, 5: 1, 6: 1, 9: 100})]) == 101
    assert highest_sum([private({0: 7}), {}]) == 7
    assert highest_sum([private({1: 10, 3: 50}), private({2: 5})]) == 55  # at 2 the larger of rank 0's next samples


def private(samples: dict[int, int]) -> dict[int, dict[str, int]]:
    return {at: {ANONYMOUS: num_bytes} for at, num_bytes in samples.items()}


def test_a_shared_file_counts_once() -> None:
    """Two ranks that map each other's windows hold no more than before, however far apart they are looked at."""
    before, after = {ANONYMOUS: 1, "7": 100}, {ANONYMOUS: 1, "7": 100, "8": 100}
    other_before, other_after = {ANONYMOUS: 2, "8": 100}, {ANONYMOUS: 2, "7": 100, "8": 100}
    assert highest_sum([{0: before, 3: after}, {0: other_before, 1: other_after}]) == 203


HELD = st.dictionaries(st.sampled_from([ANONYMOUS, "1", "2"]), st.integers(0, 100))


@given(st.lists(st.dictionaries(st.integers(0, 12), HELD, min_size=1, max_size=8), min_size=1, max_size=4))
def test_the_highest_sum_is_never_too_low(by_rank: list[dict[int, dict[str, int]]]) -> None:
    """Not below the sum at any time that all have, and not above the sum of all peaks."""
    found = highest_sum(by_rank)
    for at in set.intersection(*(set(samples) for samples in by_rank)):
        now = [samples[at] for samples in by_rank]
        files = sum(max(held.get(file, 0) for held in now) for file in ("1", "2"))
        assert found >= sum(held.get(ANONYMOUS, 0) for held in now) + files
    all_peaks = [max(held.get(key, 0) for held in one.values()) for one in by_rank for key in (ANONYMOUS, "1", "2")]
    assert found <= sum(all_peaks)


def test_memory_that_comes_and_goes_was_sampled() -> None:
    """Private and shared memory alike."""
    before = highest_sum([{0: held_now()}])
    with SampledMemory() as sampled:
        held = [mmap.mmap(-1, 32 * MIB), mmap.mmap(-1, 16 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)]
        for one in held:
            for at in range(0, len(one), mmap.PAGESIZE):
                one[at] = 1
        times = set(sampled.samples)
        while len(set(sampled.samples) - times) < 2:  # the sampler's second turn from here began with all of it there
            os.sched_yield()
        for one in held:
            one.close()
    assert 46 * MIB <= highest_sum([sampled.samples]) - before < 64 * MIB
    assert highest_sum([{0: held_now()}]) - before < 16 * MIB


@pytest.mark.parametrize("num_files", [1, 3])
def test_the_checkpoint_holds_its_content(tmp_path: Path, num_files: int) -> None:
    """Every tensor of every file, and every weight as its recipe puts it together."""
    paths, content = write_checkpoint(tmp_path, SMALL, num_files), Content()
    assert len(paths) == num_files
    checkpoint = Checkpoint(tmp_path)
    found = {}
    for name, entry in checkpoint.entries.items():
        data = bytearray(entry.num_bytes)
        checkpoint.read_into(name, 0, memoryview(data))
        assert data == content.of_tensor(name, 0, entry.num_bytes)
        found[name] = bytes(data)
    assert len(set(found.values())) == len(found) == 8 * SMALL.num_layers
    assert sum(map(len, found.values())) == SMALL.num_bytes
    for weight in SMALL.spec().weights:
        recipe = SMALL.recipes()[weight.name]
        assert isinstance(recipe, Read | Concat)
        whole = b"".join(found[name] for name in reads_of(recipe))
        assert len(whole) == weight.num_bytes
        begin, end = weight.num_bytes // 5, weight.num_bytes * 4 // 5
        assert b"".join(content.of_weight(SMALL, weight.name, begin, end)) == whole[begin:end]


def test_sizes_are_met() -> None:
    for size in (6 * MIB, 48 * MIB, 1024 * MIB, 4096 * MIB):
        assert abs(SyntheticModel.of_size(size).num_bytes - size) <= size / 16
    with pytest.raises(SpecError, match="is too small to time: use"):
        SyntheticModel.of_size(1000)


def test_plain_reads_cover_the_files_once(tmp_path: Path) -> None:
    data = os.urandom(2 * READ_BYTES + 12345)
    cuts = [0, 1, READ_BYTES + 7, len(data)]
    paths = [tmp_path / str(i) for i in range(len(cuts) - 1)]
    for path, begin, end in zip(paths, cuts, cuts[1:], strict=False):
        path.write_bytes(data[begin:end])
    for world_size, num_threads in ((1, 1), (3, 2), (4, 5)):
        shares = [Share(paths, rank, world_size, num_threads) for rank in range(world_size)]
        assert b"".join(bytes(share.read(private_memory)) for share in shares) == data


def rank(load_s: list[float], read_s: list[float], held: dict[str, int]) -> dict[str, Any]:
    samples = {"load_s": load_s, "read_s": read_s, "load_cpu_s": load_s, "read_cpu_s": read_s}
    found = {
        "checkpoint_bytes": 1000,
        "bytes_read": 505,
        "limit_bytes": 700,
        "pss_bytes": 600,
        "baseline": {"0": {ANONYMOUS: 10}},
    }
    sampled = {at: {ANONYMOUS: num_bytes} for at, num_bytes in held.items()}
    return {"samples_s": samples, "sampled": sampled, **found}


def test_rows_and_verdicts() -> None:
    """JSON keys are texts; the slowest rank counts; resident weights may be read by all."""
    ranks = [
        rank([1.0, 3.0, 1.0], [1.0, 2.0, 1.0], {"0": 10, "1": 610, "2": 400}),
        rank([2.0, 1.0, 1.0], [1.0, 1.0, 1.0], {"0": 10, "1": 500, "2": 650}),
    ]
    assert peak_bytes(ranks) == 610 + 500 - 20
    assert time_share(ranks) == 1.5  # of 2, 1.5 and 1
    row = load_row("graphshard", ranks) | {"x_read": 1.3}
    assert row["samples_s"] == [2.0, 3.0, 1.0] and row["seconds"] == 2.0 and row["cpu_s"] == 3.0
    assert (row["bytes_read"], row["x_checkpoint"], row["limit_bytes"]) == (1010, 1.01, 1400)
    assert load_row("plain read", ranks, "read")["bytes_read"] is None
    assert missed(row, num_wrong=0) == []
    assert len(missed(row | {"x_read": 1.31, "x_checkpoint": 1.03, "peak_bytes": 1401}, num_wrong=1)) == 4
