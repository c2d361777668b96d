"""A model by its name or its config's path, and its draft model: where `graphshard plan` begins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from graphshard.core.errors import SpecError
from graphshard.core.specs import ModelSpec
from graphshard.cost.deployment import Deployment
from graphshard.cost.facts import PlanningModel
from graphshard.models.specs.config_file import read_config_file
from graphshard.models.specs.kimi_k3 import is_kimi_k3, kimi_k3

NAMED = ("kimi-k3",)
"""Models that are known without a file."""

BORROWED_ROLES = ("embedding", "head")


def read_model(source: str | Path, deployment: Deployment, draft: str | Path | None = None) -> PlanningModel:
    """What one rank of `deployment` holds of `source`: a name of `NAMED`, a model's folder, or a config.json.

    Args:
        source: the model.
        deployment: how it is served; the draft model is served alike, without its include and exclude patterns.
        draft: the draft model's name, folder or config.json. It has units and slots of its own, since its first gather
            is issued outside the target's graph.

    Raises:
        SpecError: nothing is there, a key cannot be read, or the deployment does not divide the model.
    """
    model = _read(source, deployment)
    if draft is None:
        return model
    small = _read(draft, replace(deployment, include=(), exclude=()))
    return replace(model, draft=_without_borrowed(small, model))


def _read(source: str | Path, deployment: Deployment) -> PlanningModel:
    if str(source) in NAMED:
        return kimi_k3(deployment)
    path = Path(source)
    if not path.exists():
        raise SpecError(f"no model {str(source)!r}: give a folder, a config.json, or one of {', '.join(NAMED)}")
    file = read_config_file(path)
    if is_kimi_k3(file):
        return kimi_k3(deployment, file)
    from graphshard.models.specs.hf_config import hf_model  # imports torch and transformers

    named = Path(file.where)
    return hf_model(file, named.parent.name if named.name == "config.json" else named.stem, deployment)


def _without_borrowed(draft: PlanningModel, target: PlanningModel) -> PlanningModel:
    """The draft without an embedding and a head of the target's own shape: drafts borrow those."""
    theirs = {(f.role, target.spec.weight(f.weight).shape) for f in target.facts.weights if f.role in BORROWED_ROLES}
    borrowed = {
        fact.weight
        for fact in draft.facts.weights
        if fact.role in BORROWED_ROLES and (fact.role, draft.spec.weight(fact.weight).shape) in theirs
    }
    if not borrowed:
        return draft
    weights = tuple(weight for weight in draft.spec.weights if weight.name not in borrowed)
    segments = tuple(
        replace(segment, reads=tuple(name for name in segment.reads if name not in borrowed))
        for segment in draft.spec.segments
    )
    note = f"{', '.join(sorted(borrowed))}: the target's are used"
    facts = replace(
        draft.facts,
        weights=tuple(fact for fact in draft.facts.weights if fact.weight not in borrowed),
        notes=(*draft.facts.notes, note),
    )
    return PlanningModel(ModelSpec(draft.spec.name, weights, segments), facts)
