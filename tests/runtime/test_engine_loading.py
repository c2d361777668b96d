"""Loaders: what they take, what they show meanwhile, and what they refuse, naming the weight."""

from __future__ import annotations

import contextlib
import re
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from ranks import run_on_ranks, try_on_ranks
from server_modules import PARTS, WIDTH, checkpoint_of, load_all, prepare_server, server_model
from small_modules import Stack, random_stack
from torch import nn

import graphshard
from graphshard.comm.group import Group, LocalGroup
from graphshard.core.errors import GraphshardError, LoadError, ProgramError, SpecError
from graphshard.runtime.engine import Prepared

QKV = "layers.0.qkv.weight"


def alone(**options: Any) -> tuple[Prepared, dict[str, torch.Tensor]]:
    model = server_model(PARTS, WIDTH)
    return prepare_server(model, LocalGroup(1)[0], PARTS, **options), checkpoint_of(server_model(PARTS, WIDTH, "cpu"))


# --- what a server's code sees ---


def seen_rank(group: Group) -> dict[str, Any]:
    model = server_model(PARTS, WIDTH)
    prepared = prepare_server(model, group, PARTS)
    qkv = model.layers[0].qkv  # type: ignore[union-attr]
    parameter = qkv.weight
    before = (tuple(parameter.shape), str(parameter.dtype), str(parameter.device), parameter.untyped_storage().nbytes())
    tensor = torch.arange(21 * WIDTH, dtype=torch.bfloat16).view(21, WIDTH)
    shapes = []
    for shard_id, part in reversed(list(zip("qkv", tensor.split(PARTS), strict=True))):
        parameter.weight_loader(parameter, part, shard_id)
        shapes.append(tuple(parameter.shape))
    begin, end = prepared.rows[QKV]
    right = torch.equal(parameter, tensor[begin:end]) and qkv.weight is parameter
    group.barrier()
    return {"before": before, "shapes": shapes, "right": right, "full": prepared.full_shape(QKV)}


def test_a_weight_shows_its_full_shape_until_all_its_parts_are_there_then_the_rows_of_the_rank() -> None:
    found = run_on_ranks(seen_rank, 4)
    for rank, (begin, end) in enumerate([(0, 5), (5, 10), (10, 15), (15, 21)]):
        assert found[rank]["before"] == ((21, WIDTH), "torch.bfloat16", "cpu", 2)
        assert found[rank]["shapes"] == [(21, WIDTH), (21, WIDTH), (end - begin, WIDTH)]
        assert found[rank]["right"] and found[rank]["full"] == (21, WIDTH)


def test_what_stays_whole_is_loaded_whole_and_merged_ones_by_parts() -> None:
    prepared, tensors = alone(exclude="*.bias", min_shard_bytes=0)
    load_all(prepared, tensors, PARTS)
    bias = prepared.module.get_parameter("layers.0.qkv.bias")
    assert torch.equal(bias, tensors["layers.0.qkv.bias"]) and "layers.0.qkv.bias" not in prepared.rows
    assert torch.equal(prepared.module.get_buffer("table"), tensors["table"])
    with prepared.finalize() as attached:
        report = attached.report()
    assert "loaded 6 weights by rows and 6 whole" in report, report


def scaled_rank(group: Group, scales: str) -> list[float]:
    """The scale of each part of a merged weight, however the checkpoint has them."""
    model = server_model(PARTS, WIDTH)
    for layer in model.layers:
        layer.qkv.part_scale = nn.Parameter(torch.empty(3, device="meta"), requires_grad=False)  # type: ignore[union-attr]
    prepared = prepare_server(
        model, group, PARTS, exclude=["*_scale"], blocks={"*.part_scale": {"q": 1, "k": 1, "v": 1}, "*.qkv.*": PARTS}
    )
    for index in range(2):
        name = f"layers.{index}.qkv.part_scale"
        if scales == "merged":
            prepared.load(name, torch.tensor([1.0, 2.0, 3.0]))
        else:
            for number, shard_id in enumerate("qkv"):
                scale = torch.tensor(number + 1.0)
                prepared.load(name, scale if scales == "scalars" else scale.reshape(1), shard_id)
    tensors = checkpoint_of(server_model(PARTS, WIDTH, "cpu"))
    for name, tensor in tensors.items():
        prepared.load(name, tensor)
    with prepared.finalize(min_shard_bytes=0):
        group.barrier()
        return [float(scale) for scale in model.layers[1].qkv.part_scale]  # type: ignore[union-attr]


@pytest.mark.parametrize("scales", ["merged", "separate", "scalars"])
def test_scales_of_parts_all_arrive(scales: str) -> None:
    assert run_on_ranks(scaled_rank, 2, scales) == [[1.0, 2.0, 3.0]] * 2


def test_a_tied_tensor_is_loaded_once_under_any_of_its_names() -> None:
    model = server_model(PARTS, WIDTH)
    model.register_buffer("other", model.table)
    model.head = model.embed
    prepared = prepare_server(model, LocalGroup(1)[0], PARTS)
    prepared.load("other", torch.ones(WIDTH))
    prepared.load("head.weight", torch.ones(WIDTH, WIDTH))
    assert bool(model.table.all()) and model.other is model.table and bool(model.embed.weight.all())  # type: ignore[operator]
    for name, first in (("other", "table"), ("head.weight", "embed.weight")):
        with pytest.raises(LoadError, match=rf"^{name} is tied to {first}: weight {first} is loaded twice"):
            prepared.load(name, torch.ones(model.get_submodule("embed").weight.shape[: 1 + (name != "other")]))  # type: ignore[index]


def test_one_scale_for_three_parts_and_three_for_one_are_refused() -> None:
    prepared, _ = alone(blocks={"embed.weight": [1] * WIDTH})
    for tensor in (torch.tensor(1.0), torch.ones(1), torch.ones(3)):
        with pytest.raises(LoadError, match=r"weight table is float32\[8\], the tensor given is float32"):
            prepared.load("table", tensor)


def test_parameters_of_the_meta_device_keep_their_attributes_and_ties() -> None:
    with torch.device("meta"):
        module = Stack(2)
    module.head.weight = module.embed.weight
    module.embed.weight.rank_stamp = 7  # type: ignore[attr-defined]
    module.layers[0].up.weight.rank_stamp = 8  # type: ignore[union-attr, attr-defined]
    graphshard.prepare(module, LocalGroup(1)[0], min_shard_bytes=0)
    assert module.head.weight is module.embed.weight and module.embed.weight.rank_stamp == 7  # type: ignore[attr-defined]
    assert module.layers[0].up.weight.rank_stamp == 8  # type: ignore[union-attr, attr-defined]
    assert module.head.weight.requires_grad and not any(p.is_meta for p in module.parameters())


def test_a_module_with_real_weights_gives_up_those_that_are_kept_by_rows() -> None:
    module = random_stack(2)
    kept = module.head.weight
    prepared = graphshard.prepare(module, LocalGroup(1)[0], min_shard_bytes=1024)
    assert set(prepared.rows) == {f"layers.{i}.{name}.weight" for i in range(2) for name in ("up", "down")}
    assert all(module.get_parameter(name).untyped_storage().nbytes() == 4 for name in prepared.rows)
    assert module.head.weight is kept and kept.untyped_storage().nbytes() > 4


def test_loaders_that_go_past_the_weight_loader_fail_at_once() -> None:
    prepared, tensors = alone()
    parameter = prepared.module.get_parameter(QKV)
    for write in (
        lambda: parameter.data.copy_(tensors[QKV]),
        lambda: parameter.data[:12].copy_(tensors[QKV][:12]),
        lambda: parameter.data.narrow(0, 0, 12).copy_(tensors[QKV][:12]),
        lambda: parameter.data.normal_(),
    ):
        with pytest.raises(RuntimeError, match="single memory location"):
            write()


def test_calling_the_module_before_finalize_is_refused() -> None:
    prepared, tensors = alone()
    load_all(prepared, tensors, PARTS)
    with pytest.raises(ProgramError, match=r"ServerLayer was called before finalize\(\)"):
        prepared.module(torch.ones(1, WIDTH))
    with prepared.finalize(), torch.no_grad():
        prepared.module(torch.ones(1, WIDTH))
        with pytest.raises(ProgramError, match=r"cannot be loaded: the module was finalized; Runtime\.update"):
            prepared.load(QKV, tensors[QKV])
        with pytest.raises(ProgramError, match="the module was finalized"):
            prepared.module.get_parameter(QKV).weight_loader(None, tensors[QKV])  # type: ignore[operator]
        with pytest.raises(ProgramError, match=r"finalize\(\) was called again"):
            prepared.finalize()


# --- what is refused, and stays refused on all ranks ---

WRONG: dict[str, tuple[Any, str]] = {
    "shape": (lambda p, t: p.load(QKV, t[QKV][:-1]), r"qkv\.weight is bfloat16\[21, 8\], the tensor given .*\[20, 8\]"),
    "part's shape": (lambda p, t: p.load(QKV, t[QKV], "k"), r"qkv\.weight, part 'k', is bfloat16\[4, 8\], .*\[21, 8\]"),
    "dtype": (
        lambda p, t: p.load(QKV, t[QKV].float()),
        r"bfloat16\[21, 8\], the tensor given is float32.*cast n",
    ),
    "no bytes": (lambda p, t: p.load(QKV, t[QKV].to("meta")), r"bfloat16\[21, 8\] on meta"),
    "shard id": (lambda p, t: p.load(QKV, t[QKV], "gate"), r"has no part 'gate'; known: 'q', 'k', 'v'"),
    "shard id of no kind": (lambda p, t: p.load(QKV, t[QKV], ["q"]), r"has no part \['q'\]; known: 'q', 'k', 'v'"),
    "no tensor": (lambda p, t: p.load(QKV, t[QKV].tolist()), r"qkv\.weight was given list: give a plain tensor"),
    "sparse": (lambda p, t: p.load("table", t["table"].to_sparse()), r"weight table was given .*sparse_coo: give"),
    "no name": (lambda p, t: p.load(None, t[QKV]), r"nothing is called None among 12"),
    "no parts": (
        lambda p, t: p.load("layers.1.out.weight", t[QKV], 0),
        r"1\.out\.weight has no part 0; known: none",
    ),
    "name": (lambda p, t: p.load("layers.0.qvk.weight", t[QKV]), r"nothing is called 'layers\.0\.qvk.*layers\.0\.qkv"),
    "whole, shape": (lambda p, t: p.load("embed.weight", t[QKV]), r"embed\.weight is float32\[8, 8\], .*bfloat16\[21"),
    "whole, twice": (
        lambda p, t: [p.load("embed.weight", t["embed.weight"]) for _ in range(2)],
        r"embed\.weight is loaded twice",
    ),
    "part twice": (
        lambda p, t: [p.load(QKV, t[QKV][:12], "q") for _ in range(2)],
        r"qkv\.weight, part 'q', is loaded twice \(loaded: 'q'\)",
    ),
    "part after whole": (
        lambda p, t: (p.load(QKV, t[QKV]), p.load(QKV, t[QKV][:12], "q")),
        r"part 'q', is loaded twice \(loaded: the whole\)",
    ),
    "whole after part": (
        lambda p, t: (p.load(QKV, t[QKV][:12], "q"), p.load(QKV, t[QKV])),
        r"qkv\.weight is loaded twice \(loaded: 'q'\)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_load_names_the_weight_and_what_it_is(name: str) -> None:
    act, expected = WRONG[name]
    prepared, tensors = alone()
    with pytest.raises(LoadError, match=expected):
        act(prepared, tensors)


def swallowing_rank(group: Group) -> None:
    prepared = prepare_server(server_model(PARTS, WIDTH), group, PARTS)
    tensors = checkpoint_of(server_model(PARTS, WIDTH, "cpu"))
    if group.rank == 1:
        with contextlib.suppress(LoadError):  # as a server's loader may; the weight is loaded right afterwards
            prepared.load(QKV, tensors[QKV].float())
    load_all(prepared, tensors, PARTS)
    prepared.finalize()


def test_a_loader_error_that_was_swallowed_on_one_rank_is_raised_by_finalize_on_all() -> None:
    for outcome in try_on_ranks(swallowing_rank, 3):
        assert outcome.error_type == "LoadError", outcome
        expected = r"finalize failed on rank 1: weight layers\.0\.qkv\.weight is bfloat16.*: make the module anew"
        assert re.search(expected, outcome.error), outcome


def test_whatever_a_loader_raised_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared, tensors = alone()
    with monkeypatch.context() as patched, pytest.raises(RuntimeError):
        patched.setattr(torch.Tensor, "copy_", Mock(side_effect=RuntimeError("no such copy (a test)")))
        prepared.load(QKV, tensors[QKV])
    load_all(prepared, tensors, PARTS)
    with pytest.raises(LoadError, match=r"RuntimeError\('no such copy \(a test\)'\)\. A load failed"):
        prepared.finalize()


def test_a_module_of_the_meta_device_may_be_made_in_inference_mode() -> None:
    with torch.inference_mode():
        prepared, tensors = alone()
        load_all(prepared, tensors, PARTS)
    assert prepared.rows
    with prepared.finalize() as attached, torch.inference_mode():
        prepared.module(torch.ones(1, WIDTH))
        assert torch.equal(attached.whole_weight(QKV), tensors[QKV])


def incomplete_rank(group: Group, leave_out: str, part: str) -> None:
    prepared = prepare_server(server_model(PARTS, WIDTH), group, PARTS)
    tensors = checkpoint_of(server_model(PARTS, WIDTH, "cpu"))
    if group.rank == 1:
        tensor = tensors.pop(leave_out)
        if part:
            prepared.load(leave_out, tensor[:12], part)
    load_all(prepared, tensors, PARTS)
    prepared.finalize()


@pytest.mark.parametrize(
    ("leave_out", "part", "expected"),
    [
        (QKV, "", r"1 of 12 weights .*\n  weight layers\.0\.qkv\.weight was never loaded"),
        (QKV, "q", r"weight layers\.0\.qkv\.weight lacks part 'k', 'v'; loaded: 'q'"),
        ("layers.1.norm.weight", "", r"weight layers\.1\.norm\.weight was never loaded"),
        ("embed.weight", "", r"weight embed\.weight was never loaded"),
        ("table", "", r"weight table was never loaded"),
    ],
)
def test_what_one_rank_did_not_load_is_named_on_all(leave_out: str, part: str, expected: str) -> None:
    for outcome in try_on_ranks(incomplete_rank, 2, leave_out, part):
        assert outcome.error_type == "LoadError" and re.search(expected, outcome.error), outcome


def test_what_a_servers_own_loader_filled_counts_and_half_of_it_does_not() -> None:
    for rows, expected in ((WIDTH, ""), (3, r"embed\.weight was not loaded in 5 of its 8 rows")):
        prepared, tensors = alone()
        embedding = tensors.pop("embed.weight")
        load_all(prepared, tensors, PARTS)
        prepared.module.get_parameter("embed.weight").data[:rows].copy_(embedding[:rows])
        if expected:
            with pytest.raises(LoadError, match=expected):
                prepared.finalize()
        else:
            prepared.finalize().close()


# --- what prepare refuses, before anything changes ---

UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "blocks": (
        {"blocks": {"*.qkv.weight": [1, 2]}},
        r"blocks .* of weight layers\.0\.qkv\.weight .* 21 rows, 3 tog",
    ),
    "no match": ({"blocks": {"*.kqv.*": [1]}}, r"blocks: pattern '\*\.kqv\.\*' matches none of the 11 parameters"),
    "include": ({"include": ["*.kqv.*"]}, r"kqv"),
    "multiple": ({"row_multiple": 0}, r"row_multiple 0 for \* is refused"),
    "no multiple": ({"row_multiple": 1.5}, r"row_multiple 1\.5 for \* is refused"),
    "no blocks": ({"blocks": {"*.qkv.weight": 21}}, r"blocks 21 of weight layers\.0\.qkv\.weight are refused"),
    "follower's rows": (
        {"follow": {"*.qkv.bias": 2}, "row_multiple": 2},
        r"bias is \[21\]: with a row for each 2 .*11",
    ),
    "layers": ({"layers": "nowhere"}, r"has no module at layers='nowhere'"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_does_not_fit_is_refused_before_anything_changes(name: str) -> None:
    options, expected = UNFIT[name]
    model = server_model(PARTS, WIDTH)
    with pytest.raises(SpecError, match=expected):
        prepare_server(model, LocalGroup(1)[0], PARTS, **options)
    assert all(tensor.is_meta for tensor in model.state_dict().values())


def test_a_buffer_that_no_checkpoint_brings_is_refused_on_the_meta_device() -> None:
    with torch.device("meta"):
        module = Stack(1)
        module.layers[0].register_buffer("rope", torch.empty(4), persistent=False)
    with pytest.raises(SpecError, match=r"buffer layers\.0\.rope is on the meta device and in no checkpoint"):
        graphshard.prepare(module, LocalGroup(1)[0])


def unlike_rank(group: Group) -> bool:
    module = server_model(PARTS, WIDTH + group.rank)
    try:
        prepare_server(module, group, PARTS)
    except GraphshardError:
        assert all(tensor.is_meta for tensor in module.state_dict().values())
        raise
    return True


def test_ranks_with_unlike_modules_are_told_before_anything_changes() -> None:
    for outcome in try_on_ranks(unlike_rank, 2):
        assert outcome.error_type == "SpecError"
        assert re.search(r"prepare: rank 0 has layers\.0\.norm\.weight .*\[8\].*, rank 1 has .*\[9\]", outcome.error)


def test_tied_weights_inside_and_outside_the_layers_stay_whole() -> None:
    with torch.device("meta"):
        module = Stack(2)
    module.layers[1].up.weight = module.layers[0].up.weight  # type: ignore[union-attr]
    module.head.weight = nn.Parameter(torch.empty(1, device="meta"))
    prepared = graphshard.prepare(module, LocalGroup(1)[0], min_shard_bytes=1024)
    assert set(prepared.rows) == {"layers.0.down.weight", "layers.1.down.weight"}


def test_a_view_of_a_weight_sees_what_is_loaded() -> None:
    model = server_model(PARTS, WIDTH, "cpu")
    qkv = model.layers[0].qkv
    assert isinstance(qkv, nn.Module) and isinstance(qkv.weight, nn.Parameter)
    qkv.register_buffer("queries", qkv.weight.data[:12], persistent=False)
    prepared = prepare_server(model, LocalGroup(1)[0], PARTS)
    tensors = checkpoint_of(server_model(PARTS, WIDTH, "cpu"))
    load_all(prepared, tensors, PARTS)
    assert QKV not in prepared.rows and torch.equal(qkv.get_buffer("queries"), tensors[QKV][:12])
