"""Patterns over names: what a caller may give, and what matches."""

from __future__ import annotations

from typing import Any

import pytest

from graphshard.core.errors import SpecError
from graphshard.core.patterns import first_match, matches, patterns_of


@pytest.mark.parametrize(
    ("given", "patterns"),
    [((), ()), ("rotary.*", ("rotary.*",)), (["a", "b.*"], ("a", "b.*")), (iter("ab"), ("a", "b")), ("", ("",))],
)
def test_a_text_is_one_pattern_and_not_its_letters(given: Any, patterns: tuple[str, ...]) -> None:
    assert patterns_of("ignore", given) == patterns


@pytest.mark.parametrize("given", [3, None, [1], ["a", None], [["a"]]])
def test_what_is_no_pattern_is_refused_by_the_name_of_the_argument(given: Any) -> None:
    with pytest.raises(SpecError, match=r"^ignore is .*; it is a sequence of patterns, as in "):
        patterns_of("ignore", given)


def test_the_first_that_matches_counts() -> None:
    assert first_match("layers.3.q", ["head", "layers.[0-2].*", "*.q", "layers.*"]) == "*.q"
    assert first_match("head", []) == "" and not matches("head", ["HEAD", "hea"])
    assert matches("layers.3.q", ["layers.?.q"])
