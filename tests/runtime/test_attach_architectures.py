"""`attach` beside the untouched model, bit for bit, over architectures of `transformers`; prints a table by name.

Bits depend on where a weight begins: MKL takes another path for another address modulo 64 (and 16, at one row). Slots
begin at multiples of 256, torch's own allocations at multiples of 64, so both sides are alike; the test checks that.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, VOCAB, Architecture, outputs_of
from ranks import run_on_ranks
from torch import Tensor, nn

import graphshard
from graphshard.comm.group import Group, LocalGroup

NEW_TOKENS = 4
HEADER = (
    "architecture",
    "ranks",
    "layers",
    "calls",
    "sharded KiB",
    "of all",
    "untouched",
    "forwards",
    "generate",
    "note",
)


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[list[tuple[str, ...]]]:
    rows: list[tuple[str, ...]] = []
    yield rows
    widths = [max(len(row[column]) for row in (HEADER, *rows)) for column in range(len(HEADER))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (HEADER, *rows)]
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("\n" + "\n".join(line.rstrip() for line in lines))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    from transformers.utils import logging

    verbosity, threads = logging.get_verbosity(), torch.get_num_threads()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    logging.set_verbosity(verbosity)


def generated(architecture: Architecture, model: Any) -> Tensor | None:
    """Tokens of a greedy generation with a cache, where the model can."""
    if not architecture.generates:
        return None
    prompt = architecture.steps()[0]["input_ids"]
    return model.generate(prompt, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, use_cache=True)


def attach_and_compare(
    group: Group,
    architecture: Architecture,
    models: list[nn.Module],
    expected: list[dict[str, Tensor]],
    tokens: Tensor | None,
) -> dict[str, Any]:
    model = models[group.rank]
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    attached = graphshard.attach(model, group, min_shard_bytes=0, prefetch_depth=1, **architecture.attach)
    same = []
    for step, outputs in zip(architecture.steps(), expected, strict=True):
        found = outputs_of(model, step)
        same.append(found.keys() == outputs.keys() and all(torch.equal(found[name], outputs[name]) for name in found))
    again = generated(architecture, model)
    row = {
        "forwards": sum(same),
        "generate": None if tokens is None or again is None else torch.equal(tokens, again),
        "layers": attached.layers.path,
        "calls": len(attached.layers.order),
        "sharded": attached.runtime.layout.shardable_bytes,
        "untouched": len(attached._spec.kept),
    }
    attached.detach()
    restored = all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    return row | {"restored": restored}


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
def test_attached_equals_untouched(architecture: Architecture, world_size: int, table: list[tuple[str, ...]]) -> None:
    reference = architecture.build()
    assert all(p.data_ptr() % 64 == 0 for p in reference.parameters()), "as slots are"
    expected = [outputs_of(reference, step) for step in architecture.steps()]
    assert expected[0] and all(bool(value.isfinite().all()) for step in expected for value in step.values())
    tokens = generated(architecture, reference)
    models = [copy.deepcopy(reference) for _ in range(world_size)]
    rows = run_on_ranks(attach_and_compare, world_size, architecture, models, expected, tokens)
    row = rows[0]
    num_bytes = sum(p.numel() * p.element_size() for p in reference.parameters())
    table.append(
        (
            architecture.name,
            str(world_size),
            row["layers"],
            str(row["calls"]),
            f"{row['sharded'] / 1024:.0f}",
            f"{100 * row['sharded'] / num_bytes:.0f} %",
            str(row["untouched"]),
            f"{row['forwards']} of {len(expected)} equal",
            "-" if row["generate"] is None else "equal" if row["generate"] else "DIFFERS",
            architecture.note,
        )
    )
    for row in rows:
        assert row["forwards"] == len(expected) and row["generate"] in (None, True) and row["restored"]
        assert row["sharded"] > 0.2 * num_bytes


def test_there_are_enough_and_of_all_kinds() -> None:
    names = {architecture.name.split(",")[0] for architecture in ARCHITECTURES}
    assert len(names) >= 20
    assert {"gpt2", "bert", "mixtral", "jamba", "mamba2", "t5", "vit", "albert"} <= names


def by_name(name: str) -> Architecture:
    return next(architecture for architecture in ARCHITECTURES if architecture.name == name)


# --- what cannot be attached is refused, with the reason ---


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "t5, encoder",
            r"T5ForConditionalGeneration has several lists of layers: 'decoder.block' .* which one is meant",
        ),
        ("bart, decoder", r"several lists of layers: 'model.decoder.layers' .*, 'model.encoder.layers'"),
    ],
)
def test_two_stacks_of_layers_are_refused_unless_one_is_named(name: str, expected: str) -> None:
    with pytest.raises(graphshard.SpecError, match=expected):
        graphshard.attach(by_name(name).build(), LocalGroup(1)[0])


def test_a_layer_called_again_is_refused_without_an_order() -> None:
    architecture = by_name("albert")
    model = architecture.build()
    with graphshard.attach(model, LocalGroup(1)[0], min_shard_bytes=0, units="layer"):
        expected = r"layer 0 \(encoder.albert_layer_groups.0\) was called with 1 of 1 layer calls done, .* with order="
        with pytest.raises(graphshard.ProgramError, match=expected):
            outputs_of(model, architecture.steps()[0])


def test_a_model_without_bytes_is_refused() -> None:
    with torch.device("meta"):
        from transformers import LlamaConfig, LlamaModel

        model = LlamaModel(LlamaConfig(**by_name("llama").options))
    with pytest.raises(graphshard.SpecError, match=r"layers.0.self_attn.q_proj.weight is on the meta device"):
        graphshard.attach(model, LocalGroup(1)[0])


def test_layers_that_are_not_called_as_modules_are_refused() -> None:
    """XLM keeps its layers' parts in lists side by side: no list holds whole layers."""
    from transformers import XLMConfig, XLMModel

    model = XLMModel(XLMConfig(vocab_size=VOCAB, emb_dim=64, n_layers=3, n_heads=4)).eval()
    with pytest.raises(graphshard.SpecError, match=r"several lists of layers: 'ffns' .*, 'attentions'"):
        graphshard.attach(model, LocalGroup(1)[0])


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "deepseek_v3", "jamba", "zamba2", "t5, decoder", "bert"])
def test_no_architecture_reads_weights_late(name: str) -> None:
    """With `check` every ATen call is watched, and slots are NaN outside their layer."""
    architecture = by_name(name)
    model = architecture.build()
    expected = [outputs_of(model, step) for step in architecture.steps()]
    choices = {"min_shard_bytes": 0, "units": "layer", "check": True} | architecture.attach
    with graphshard.attach(model, LocalGroup(1)[0], **choices):
        for step, outputs in zip(architecture.steps(), expected, strict=True):
            found = outputs_of(model, step)
            assert all(torch.equal(found[key], outputs[key]) for key in outputs)
