"""What specs refuse: everything that would fail later, and with less to say."""

from __future__ import annotations

from typing import Any

import pytest

from graphshard.core.errors import SpecError
from graphshard.core.specs import BufferSpec, StepShape, WeightSpec


@pytest.mark.parametrize("values", [(0,), (1, 0), (-1,), (True,), (1, True), (1.0,), ("1",), (1, None)])
def test_step_shapes_are_whole_numbers_from_1_on(values: tuple[Any, ...]) -> None:
    with pytest.raises(SpecError, match="batch_size and tokens_per_sequence are whole numbers that start at 1, not"):
        StepShape(*values)


@pytest.mark.parametrize(
    ("shape", "strides", "says"),
    [
        ((-1,), None, "shape (-1,) has a negative size"),
        ((1.5,), None, "shape (1.5,) is not made of whole numbers"),
        ((True,), None, "shape (True,) is not made of whole numbers"),
        ("ab", None, "shape 'ab' is not made of whole numbers"),
        (3, None, "shape 3 is not made of whole numbers"),
        ((2, 2), (1,), "1 strides for 2 dimensions"),
        ((2, 2), (2, -1), "strides (2, -1) has a negative size"),
        ((2, 2), (2, "1"), "strides (2, '1') is not made of whole numbers"),
    ],
)
def test_weights_have_sizes(shape: Any, strides: Any, says: str) -> None:
    with pytest.raises(SpecError) as caught:
        WeightSpec("w", shape, "float32", strides)
    assert str(caught.value) == f"weight w: {says}"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"role": "scratch"}, "unknown role 'scratch'; known are input, output, cache, activation"),
        ({"home": "heap"}, "unknown home 'heap'; known are private, window"),
        ({"home": "window"}, 'home "window" (memory that other ranks may map) is not there yet: use "private"'),
        ({"shape": (2, -1)}, "shape (2, -1) has a negative size"),
        ({"shape": (2.0,)}, "shape (2.0,) is not made of whole numbers"),
    ],
)
def test_buffers_have_known_roles_and_homes(more: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError) as caught:
        BufferSpec(**{"name": "b", "shape": (2,), "dtype": "float32", "role": "input", **more})
    assert says in str(caught.value) and str(caught.value).startswith("buffer b: ")


@pytest.mark.parametrize("dtype", ["float33", None, ["float32"]])
def test_dtypes_are_known(dtype: Any) -> None:
    for make in (lambda: WeightSpec("w", (1,), dtype), lambda: BufferSpec("b", (1,), dtype, "input")):
        with pytest.raises(SpecError, match="unknown dtype"):
            make()
