"""Folds and borrowed weights in a model's spec: what is refused, and that models without them keep their digests."""

from __future__ import annotations

from typing import Any

import pytest

from graphshard.core.errors import SpecError
from graphshard.core.specs import ModelSpec, SegmentSpec, WeightSpec

WEIGHTS = tuple(WeightSpec(name, (4,), "float32") for name in ("embed", "q", "f_b"))
STEP = SegmentSpec("q", 0, ("embed", "q", "f_b"))
FOLD = SegmentSpec("commit_fold", None, ("f_b",))


def _model(**more: Any) -> ModelSpec:
    return ModelSpec("tiny", WEIGHTS, (STEP,), **more)


def test_models_without_folds_print_as_before_there_were_any() -> None:
    assert _model().text().splitlines()[0] == "ModelSpec name=tiny kept=[]"
    assert "folds" not in _model().text() and "borrowed" not in _model().text()


def test_folds_and_borrowed_weights_are_part_of_the_digest() -> None:
    texts = {_model(folds=(FOLD,)).digest, _model(borrowed=("embed",)).digest, _model().digest}
    assert len(texts) == 3
    assert "  folds: 1\n    SegmentSpec name=commit_fold layer=none reads=[f_b]\n" in _model(folds=(FOLD,)).text()
    assert _model(borrowed=("embed",)).text().splitlines()[0] == "ModelSpec name=tiny kept=[] borrowed=[embed]"


def test_what_no_plan_may_shard_comes_with_the_reason() -> None:
    model = _model(folds=(FOLD,), borrowed=("embed",))
    assert model.why_whole == {
        "f_b": "read by commit_fold, for all layers at once",
        "embed": "borrowed from the target",
    }
    assert [weight.name for weight in model.owned] == ["q", "f_b"]
    assert _model().why_whole == {} and _model().owned == WEIGHTS


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"folds": (SegmentSpec("fold", 0, ("f_b",)),)}, "fold layers.0.fold runs for all layers at once"),
        ({"folds": (SegmentSpec("fold", None, ("k",)),)}, "segment fold reads unknown weights ['k']"),
        ({"folds": (FOLD, FOLD)}, "two segments are called commit_fold"),
        ({"borrowed": ("head",)}, "borrows weights that it does not declare: ['head']"),
        ({"borrowed": ("embed", "embed")}, "borrows a weight twice: ['embed', 'embed']"),
    ],
)
def test_what_a_spec_refuses(more: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError) as caught:
        _model(**more)
    assert says in str(caught.value)
