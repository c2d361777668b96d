"""Between `prepare` and `finalize` nobody takes placeholders or rows for weights."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import try_on_ranks
from server_modules import PARTS, PLAN, WIDTH, checkpoint_of, loaded, prepare_server, server_model
from torch import nn

import graphshard
from graphshard.comm.group import Group, LocalGroup
from graphshard.core.errors import ProgramError, SpecError

TAKES: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "state_dict": (lambda module: module.state_dict(), "state_dict would give"),
    "a module around": (lambda module: nn.Sequential(module).state_dict(), "state_dict would give"),
    "save": (lambda module: pickle.dumps(module), "pickling would store"),
    "deepcopy": (copy.deepcopy, "deepcopy would copy"),
    "load_state_dict": (lambda module: module.load_state_dict({}), "load_state_dict would overwrite"),
    "a layer's": (lambda module: module.get_submodule("layers.0.qkv").state_dict(), "ServerLinear: state_dict would"),
    "call": (lambda module: module(torch.ones(1, WIDTH)), r"was called before finalize\(\)"),
}


@pytest.mark.parametrize("name", TAKES)
def test_what_would_take_placeholders_for_weights_is_refused_until_finalize(name: str) -> None:
    act, expected = TAKES[name]
    group = LocalGroup(1)[0]
    model = server_model(PARTS, WIDTH)
    prepare_server(model, group, PARTS)
    done = loaded(group)
    for module in (model, done.module):  # before and after its weights were loaded
        with pytest.raises(ProgramError, match=expected):
            act(module)
    done.module.get_submodule("embed").state_dict()  # has nothing by rows
    with torch.no_grad(), done.finalize(**PLAN) as attached:
        assert done.module.state_dict().keys() == checkpoint_of(server_model(PARTS, WIDTH, "cpu")).keys()
        attached.detach()
        copy.deepcopy(done.module)(torch.ones(1, WIDTH))


def again_rank(group: Group, how: str) -> None:
    model = server_model(PARTS, WIDTH)
    prepare_server(model, group, PARTS)
    if how == "attach":
        graphshard.attach(model, group)
    prepare_server(model, group, PARTS)


@pytest.mark.parametrize("how", ["attach", "prepare"])
def test_a_prepared_module_is_neither_attached_nor_prepared_again(how: str) -> None:
    for outcome in try_on_ranks(again_rank, 2, how):
        assert outcome.error_type == SpecError.__name__, outcome
        assert f"{how} failed on rank 0 (and on rank 1): layers.0 was prepared before" in outcome.error
