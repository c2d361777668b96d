"""Post-load processing: what it may leave for `finalize` and what it may not, named alike on all ranks."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable

import pytest
import torch
from ranks import run_on_ranks, try_on_ranks
from server_modules import (
    PARTS,
    PLAN,
    WIDTH,
    ServerLinear,
    checkpoint_of,
    load_all,
    loaded,
    prepare_server,
    qkv,
    server_model,
)
from torch import nn

from graphshard.comm.group import Group, LocalGroup
from graphshard.core.errors import ProgramError, SpecError
from graphshard.runtime.engine import Prepared
from graphshard.runtime.weights.quantize import fp8_scale

Change = Callable[[Prepared, ServerLinear], None]


def _transposed(prepared: Prepared, linear: ServerLinear) -> None:
    linear.weight.data = linear.weight.data.t()


def _transposed_copy(prepared: Prepared, linear: ServerLinear) -> None:
    linear.weight = nn.Parameter(linear.weight.data.t().contiguous(), requires_grad=False)


def _whole_again(prepared: Prepared, linear: ServerLinear) -> None:
    linear.weight = nn.Parameter(torch.zeros(sum(PARTS), WIDTH), requires_grad=False)


def _taken_away(prepared: Prepared, linear: ServerLinear) -> None:
    del linear.weight


def _fused(prepared: Prepared, linear: ServerLinear) -> None:
    out = prepared.module.get_parameter("layers.0.out.weight").data.view(-1)
    linear.fused = nn.Parameter(torch.cat([linear.weight.data.view(-1), out]), requires_grad=False)


def _unlike_scale(prepared: Prepared, linear: ServerLinear) -> None:
    linear.weight_scale = nn.Parameter(fp8_scale(linear.weight.data.float().abs().max(), "float8_e4m3fn"))


def _unlike_buffer(prepared: Prepared, linear: ServerLinear) -> None:
    linear.register_buffer("weight_scale", linear.weight.data.float().abs().amax(dim=1))


def _subclass(prepared: Prepared, linear: ServerLinear) -> None:
    linear.weight = torch.Tensor._make_subclass(_Odd, linear.weight.data)


class _Odd(nn.Parameter):
    pass


def _other_layer(prepared: Prepared, linear: ServerLinear) -> None:
    prepared.module.layers[1] = server_model(PARTS, WIDTH, "cpu").layers[1]  # type: ignore[index, union-attr, operator]


def _fewer_layers(prepared: Prepared, linear: ServerLinear) -> None:
    prepared.module.layers = nn.ModuleList([prepared.module.layers[0]])  # type: ignore[index, union-attr, operator]


def _wrapped(prepared: Prepared, linear: ServerLinear) -> None:
    prepared.module.layers[0].qkv = nn.Sequential(linear)  # type: ignore[index, union-attr, operator]


LEFT: dict[str, tuple[Change, str, str]] = {
    "transposed": (_transposed, "ProgramError", r"qkv\.weight is bfloat16\[8, \d+\] with strides .*exclude="),
    "transposed copy": (_transposed_copy, "ProgramError", r"qkv\.weight is bfloat16\[8, \d+\] before finalize\(\)"),
    "whole": (_whole_again, "ProgramError", r"is float32\[21, 8\] before .* keeps \d+ rows of \[21, 8\]"),
    "taken away": (_taken_away, "ProgramError", r"qkv\.weight is no longer a parameter .* merged weight with blocks="),
    "fused": (_fused, "SpecError", r"layers\.0\.qkv\.fused"),
    "unlike scale": (_unlike_scale, "SpecError", r"qkv\.weight_scale was made by post-load .* combined_amax\(\)"),
    "buffer": (_unlike_buffer, "SpecError", r"qkv\.weight_scale was made by .* make it a parameter and say follow="),
    "other layer": (_other_layer, "ProgramError", r"layer layers\.1 is not the ServerLayer that prepare\(\) found"),
    "fewer layers": (_fewer_layers, "ProgramError", r"layer layers\.1 is not .*there is nothing in its place"),
    "wrapped": (_wrapped, "ProgramError", r"qkv\.weight is no longer a parameter of its module"),
    "subclass": (_subclass, "ProgramError", r"qkv\.weight cannot be sharded .*: it is a _Odd"),
}


def left_rank(group: Group, name: str, only: int | None) -> None:
    prepared = loaded(group)
    if only is None or group.rank == only:
        LEFT[name][0](prepared, qkv(prepared))
    prepared.finalize(**PLAN)


@pytest.mark.parametrize("only", [None, 1])
@pytest.mark.parametrize("name", LEFT)
def test_what_is_no_longer_the_ranks_rows_is_the_same_named_error_on_all(name: str, only: int | None) -> None:
    _, kind, expected = LEFT[name]
    outcomes = try_on_ranks(left_rank, 3, name, only)
    for outcome in outcomes:
        assert outcome.error_type == kind and re.search(expected, outcome.error), outcome
    assert len({outcome.error for outcome in outcomes}) == 1


def in_place_of(linear: ServerLinear, factor: float) -> ServerLinear:
    """Another module with other weights, as a server's quantised linears come into being."""
    made = ServerLinear(*linear.weight.shape, torch.float32, bias=linear.bias is not None)
    made.weight.data, made.bias = linear.weight.data.float() * factor, linear.bias
    return made


def exchanged_rank(group: Group) -> list[bool]:
    prepared, whole = loaded(group), server_model(PARTS, WIDTH, "cpu")
    whole.load_state_dict(checkpoint_of(whole))
    old = [weakref.ref(qkv(prepared).weight.untyped_storage()), weakref.ref(qkv(prepared).weight)]
    for model in (prepared.module, whole):
        for layer in model.layers:  # type: ignore[union-attr]
            layer.qkv, layer.out = in_place_of(layer.qkv, 2.0), in_place_of(layer.out, 3.0)
    gc.collect()
    x = torch.linspace(-1, 1, WIDTH).view(1, WIDTH)
    is_freed = [ref() is None for ref in old]
    with torch.no_grad(), prepared.finalize(**PLAN):
        right = torch.equal(prepared.module(x), whole(x))
        group.barrier()
    return [right, *is_freed]


def test_modules_that_processing_puts_in_place_of_others_count_and_what_they_replace_is_freed() -> None:
    assert run_on_ranks(exchanged_rank, 3) == [[True] * 3] * 3


def dtype_rank(group: Group) -> None:
    prepared = loaded(group)
    if group.rank == 2:
        qkv(prepared).weight.data = qkv(prepared).weight.data.float()
    prepared.finalize(**PLAN)


def test_ranks_that_process_unlike_are_told_the_weight() -> None:
    for outcome in try_on_ranks(dtype_rank, 3):
        assert outcome.error_type == "SpecError"
        assert re.search(r"rank 0 has layers\.0\.qkv\.weight bfloat16\[21, 8\], rank 2 has .*float32", outcome.error)


def unlike_rank(group: Group, name: str, seed: int) -> None:
    prepared = prepare_server(server_model(PARTS, WIDTH), group, PARTS)
    like, unlike = (checkpoint_of(server_model(PARTS, WIDTH, "cpu"), i) for i in (0, 1))
    if group.rank == 1:
        like[name] = unlike[name]
    load_all(prepared, like, PARTS)
    prepared.finalize(**PLAN).close()


def test_tensors_that_differ_between_ranks_are_not_sharded() -> None:
    for outcome in try_on_ranks(unlike_rank, 3, "layers.0.qkv.weight", 1):
        assert outcome.error_type == "SpecError"
        assert re.search(r"qkv\.weight, '.': ranks were given unlike tensors, .* exclude=\['layers\.0", outcome.error)
    assert all(not outcome.error for outcome in try_on_ranks(unlike_rank, 2, "embed.weight", 1)), "that stays whole"


def experts_rank(group: Group) -> int:
    """Each rank has experts of its own, whose processing makes scales of their own."""
    model = server_model(PARTS, WIDTH)
    for layer in model.layers:
        layer.experts = ServerLinear(6, WIDTH)  # type: ignore[assignment]
    prepared = prepare_server(model, group, PARTS, exclude=["*.experts.*"])
    load_all(prepared, checkpoint_of(server_model(PARTS, WIDTH, "cpu")), PARTS)
    for index, layer in enumerate(model.layers):
        prepared.load(f"layers.{index}.experts.weight", torch.full((6, WIDTH), group.rank, dtype=torch.bfloat16))
        scale = torch.full((6,), float(group.rank))
        layer.experts.weight_scale = nn.Parameter(scale, requires_grad=False)  # type: ignore[union-attr]
    with prepared.finalize(**PLAN):
        group.barrier()
        return int(model.layers[0].experts.weight.max() + model.layers[1].experts.weight_scale.max())  # type: ignore[union-attr, operator, arg-type]


def test_what_ranks_have_unlike_is_excluded_and_stays_theirs() -> None:
    assert run_on_ranks(experts_rank, 3) == [0, 2, 4]


def test_a_follow_pattern_that_nothing_matches_is_refused() -> None:
    prepared = loaded(LocalGroup(1)[0], follow={"*.weight_scale": 1})
    with pytest.raises(SpecError, match=r"follow: pattern '\*\.weight_scale' matches no parameter"):
        prepared.finalize()
    linear = qkv(prepared)
    linear.weight_scale = nn.Parameter(torch.ones(3), requires_grad=False)
    with pytest.raises(SpecError, match=r"weight_scale is \[3\], and follows this rank's rows .* would have 21"):
        prepared.finalize()


def before_rank(group: Group) -> None:
    prepared = prepare_server(server_model(PARTS, WIDTH), group, PARTS)
    qkv(prepared).weight = nn.Parameter(torch.zeros(sum(PARTS), WIDTH), requires_grad=False)
    tensors = checkpoint_of(server_model(PARTS, WIDTH, "cpu"))
    del tensors["layers.0.qkv.weight"]
    load_all(prepared, tensors, PARTS)
    prepared.finalize(**PLAN)


def test_a_weight_that_was_replaced_instead_of_loaded_is_named() -> None:
    expected = r"qkv\.weight was never loaded, and was replaced by float32\[21, 8\] on cpu: load it through its wei"
    for outcome in try_on_ranks(before_rank, 2):
        assert outcome.error_type == "LoadError" and re.search(expected, outcome.error), outcome
    prepared = prepare_server(server_model(PARTS, WIDTH), LocalGroup(1)[0], PARTS)
    qkv(prepared).weight.data = torch.zeros(21, WIDTH, dtype=torch.bfloat16)
    with pytest.raises(ProgramError, match=r"qkv\.weight was replaced by .* before all of it was loaded"):
        prepared.load("layers.0.qkv.weight", torch.zeros(21, WIDTH, dtype=torch.bfloat16))
