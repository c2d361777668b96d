"""From what ranks measured to the rows of `bench dual`, and where two ways cross."""

from __future__ import annotations

from typing import Any

import pytest

from graphshard.bench.dual_figures import gemm_shapes, hardware_of
from graphshard.bench.dual_rows import dual_rows, measured_crossover, tokens_per_rank, worst_choice
from graphshard.cost.dual import DualEstimate
from graphshard.cost.dual_choice import as_cost_block
from graphshard.models.block_stack import BlockSizes, BlockStack


def told(gather: float, sliced: float, chosen: float, difference: float = 1e-6) -> dict[str, dict[str, Any]]:
    times = {"replicated": 5.0, "gather": gather, "tensor_parallel": sliced, "chosen": chosen}
    runs = {"replicated": "replicated", "gather": "gather", "tensor_parallel": "tensor_parallel", "chosen": "gather"}
    return {
        mode: {
            "runs": runs[mode],
            "samples_ms": [ms, ms + 1, ms + 2],
            "difference": difference if mode == "tensor_parallel" else 0.0,
            "agrees": difference < 1e-3,
        }
        for mode, ms in times.items()
    }


def rows_of(gather: list[float], sliced: list[float], tokens: list[int]) -> list[dict[str, Any]]:
    ranks = [{str(tokens_per_rank(n, 2)): told(g, s, g) for n, g, s in zip(tokens, gather, sliced, strict=True)}] * 2
    return dual_rows([ranks], tokens)


def test_tokens_that_do_not_divide_are_rounded_up() -> None:
    assert [tokens_per_rank(n, 3) for n in (1, 3, 4, 1024)] == [1, 1, 2, 342]


def test_a_row_for_each_number_of_tokens_and_mode() -> None:
    rows = rows_of([4.0, 8.0], [2.0, 16.0], [1, 64])
    assert [(row["tokens_per_group"], row["mode"]) for row in rows] == [
        (tokens, mode) for tokens in (1, 64) for mode in ("replicated", "gather", "tensor_parallel", "chosen")
    ]
    first = rows[2]
    assert (first["tokens_per_rank"], first["median_ms"], first["n"]) == (1, 3.0, 6)
    assert not first["identical"] and first["difference"] == 1e-6 and first["agrees"]
    assert rows[1]["identical"] and len(rows[1]["samples_ms"][0]) == 2
    assert rows[3]["x_better"] == pytest.approx(5 / 3) and rows[7]["x_better"] == 1.0
    assert worst_choice(rows) is rows[3]


def test_launches_are_pooled() -> None:
    rows = dual_rows([[{"1": told(1.0, 5.0, 1.0)}] * 2, [{"1": told(3.0, 5.0, 3.0)}] * 2], [2])
    gather = rows[1]
    assert (gather["launches"], gather["n"], gather["median_ms"]) == (2, 12, 3.0)
    assert gather["samples_ms"] == [[[1.0, 2.0, 3.0]] * 2, [[3.0, 4.0, 5.0]] * 2]


def test_one_rank_that_disagrees_is_enough() -> None:
    ranks = [{"1": told(1.0, 1.0, 1.0)}, {"1": told(1.0, 1.0, 1.0, difference=0.5)}]
    rows = dual_rows([ranks], [2])
    assert [row["agrees"] for row in rows] == [False] * 4 and rows[2]["difference"] == 0.5


def test_the_crossover_is_where_the_ratio_of_medians_is_one() -> None:
    found = measured_crossover(rows_of([3.0, 3.0, 3.0], [0.0, 1.0, 7.0], [16, 64, 256]))
    assert found["between"] == [64, 256] and found["tokens_per_group"] == 128  # 4 / 2 before, 4 / 8 after


def test_of_several_crossings_the_last_counts() -> None:
    found = measured_crossover(rows_of([3.0, 1.0, 3.0, 3.0], [1.0, 3.0, 1.0, 7.0], [1, 4, 16, 64]))
    assert found["between"] == [16, 64]


def test_no_crossover_says_on_which_side_all_numbers_are() -> None:
    assert measured_crossover(rows_of([1.0], [2.0], [4])) == {"tokens_per_group": None, "between": [0, 4]}
    assert measured_crossover(rows_of([2.0], [1.0], [4])) == {"tokens_per_group": None, "between": [4, None]}


def test_predictions_go_by_what_was_measured() -> None:
    spec = BlockStack(BlockSizes(hidden_size=8, intermediate_size=4, num_layers=3)).spec()
    block = as_cost_block(spec, spec.blocks[0])
    assert block.num_bytes == 384
    shapes = gemm_shapes(block, [1, 2], 2)
    assert shapes[0] == (1, 4, 8, "float32") and (4, 8, 2, "float32") in shapes and len(shapes) == 8
    cold = [[*shape, 10.0 * shape[0]] for shape in shapes]
    hot = [[*shape, 4.0 * shape[0]] for shape in shapes]
    figures = {"gemm": cold, "gemm_cached": hot, "gather_us": 30.0, "exchange_us": 8.0, "cache_bytes": 384}
    hardware = hardware_of(figures, block, 2, "pull")
    times = DualEstimate(block, hardware, 2).times(2)
    assert (times.replicated_us, times.gather_us) == (30.0, 42.0)  # three gemms of one row each, in memory and cached
    small = hardware_of({**figures, "cache_bytes": 383}, block, 2, "pull")
    assert DualEstimate(block, small, 2).times(2).gather_us == 60.0
    moved_us = 2 * (2 * 8 * 4 / 2) / (384 / 30.0)  # half of all ranks' tokens, there and back
    assert times.tensor_parallel_us == pytest.approx(3 * 20.0 + 8.0 + moved_us)
