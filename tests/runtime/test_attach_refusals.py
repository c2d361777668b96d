"""What of a module is left alone, and what is refused: by name, on all ranks, before anything is changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import try_on_ranks
from small_modules import WIDTH, Block, attach, bits, equal, inputs, outputs, random_stack
from torch import nn

import graphshard
from graphshard.comm.group import Group
from graphshard.runtime.runtime import Runtime

# --- what is left alone, what is refused ---


def test_tied_weights_stay_whole_with_the_reason() -> None:
    module = random_stack(3)
    module.embed.weight = nn.Parameter(torch.randn(2 * WIDTH, WIDTH)[:WIDTH])
    module.layers[0].up.weight = module.head.weight  # type: ignore[union-attr, assignment]
    module.layers[0].up.bias = nn.Parameter(torch.randn(WIDTH))  # type: ignore[union-attr, assignment]
    module.layers[0].down.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))  # type: ignore[union-attr, assignment]
    module.layers[2].norm = module.layers[1].norm  # type: ignore[union-attr, assignment]
    module.layers[2].down.weight = nn.Parameter(  # type: ignore[union-attr, assignment]
        module.layers[1].down.weight.data  # type: ignore[union-attr]
    )
    expected = outputs(module)
    with attach(module, check=True) as attached:
        assert equal(outputs(module), expected)
        report = " ".join(attached.report().split())
        assert "layers.0.up.weight untouched tied to head.weight, outside the layers" in report
        assert "layers.1.norm.weight untouched shared by layers 1 2" in report
        assert "layers.1.down.weight untouched shared by layers 1 2" in report
        assert "layers.1.up.weight" in attached.plan.units[1].weights


def test_weights_that_views_see_stay_whole_with_the_reason() -> None:
    module = random_stack(3)
    both = torch.randn(3 * WIDTH, WIDTH)
    module.layers[0].up.weight = nn.Parameter(both[: 2 * WIDTH])  # type: ignore[union-attr, assignment]
    module.layers[0].register_buffer("gate", both[WIDTH : WIDTH + 1], persistent=False)
    module.layers[1].up.weight = nn.Parameter(both[2 * WIDTH :].t())  # type: ignore[union-attr, assignment]
    module.register_buffer("first", module.layers[2].up.weight.data[:1])  # type: ignore[union-attr]
    module.call = lambda stack, x: stack.layers[0](x)
    with attach(module, order=[0], check=True) as attached:
        report = " ".join(attached.report().split())
        assert "layers.0.up.weight untouched shares its bytes with layers.0.gate" in report
        assert "layers.2.up.weight untouched tied to first, outside the layers" in report
        assert "layers.1.up.weight untouched" not in report, "it lies beside them"


class Marked(nn.Parameter):
    """What quantisers make of a parameter."""


def test_subclasses_and_quantised_weights_stay_whole_with_the_reason() -> None:
    module = random_stack()
    module.layers[1].up.weight = Marked(module.layers[1].up.weight.data)  # type: ignore[union-attr, assignment]
    with torch.inference_mode():
        module.layers[2].up.weight = nn.Parameter(  # type: ignore[union-attr, assignment]
            torch.randn(2 * WIDTH, WIDTH), requires_grad=False
        )
    expected = outputs(module)
    with attach(module) as attached:
        assert equal(outputs(module), expected)
        report = " ".join(attached.report().split())
        assert "layers.1.up.weight untouched is a Marked: only plain parameters are sharded" in report
        assert "layers.2.up.weight untouched was made in inference mode" in report


def test_weights_without_bytes_here_are_refused() -> None:
    module = random_stack()
    module.layers[1].to("meta")
    with pytest.raises(graphshard.SpecError, match=r"layers.1.norm.weight is on the meta device .* load the module"):
        attach(module)
    module = random_stack()
    module.layers[1].up = nn.LazyLinear(WIDTH)  # type: ignore[union-attr, assignment]
    with pytest.raises(graphshard.SpecError, match=r"layers.1.up.weight is uninitialised: run the module once"):
        attach(module)


def test_a_dtensor_is_refused(tmp_path: Any) -> None:
    from torch import distributed
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        module = random_stack()
        whole = module.layers[1].up.weight  # type: ignore[union-attr]
        split = distribute_tensor(whole.detach(), init_device_mesh("cpu", (1,)))  # type: ignore[arg-type]
        module.layers[1].up.weight = nn.Parameter(split)  # type: ignore[union-attr, assignment]
        with pytest.raises(graphshard.SpecError, match=r"layers.1.up.weight is a DTensor, which is split over ranks"):
            attach(module)
    finally:
        distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_modules_are_refused() -> None:
    module = random_stack()
    with pytest.raises(graphshard.SpecError, match=r"OptimizedModule is compiled by torch.compile"):
        attach(torch.compile(module))  # type: ignore[arg-type]
    module.layers[1].compile()
    with pytest.raises(graphshard.SpecError, match=r"layers.1 is compiled by torch.compile"):
        attach(module)
    module = random_stack()
    module.layers[2] = torch.jit.trace(Block(), inputs()[0])
    with pytest.raises(graphshard.SpecError, match=r"layers.2 is a ScriptModule"):
        attach(module)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_tracing_an_attached_module_is_refused_and_leaves_it_right() -> None:
    module = random_stack()
    expected = outputs(module)
    with attach(module), torch.no_grad():
        with pytest.raises(
            graphshard.ProgramError, match=r"torch\.jit\.trace would keep the bytes that slots hold now"
        ):
            torch.jit.trace(module, inputs()[0])
        assert equal(outputs(module), expected)


def test_attaching_twice_is_refused() -> None:
    module = random_stack()
    with (
        attach(module),
        pytest.raises(graphshard.SpecError, match=r"layers.0 is attached already: detach\(\) it first"),
    ):
        attach(module)


def unlike_on_rank_1(group: Group) -> list[bool]:
    module = random_stack()
    if group.rank == 1:
        with torch.no_grad():
            module.layers[1].up.weight[3, 4] += 2.0**-20  # type: ignore[union-attr, index]
            module.layers[2].up.bias[0] = float("nan")  # type: ignore[union-attr, index]
    whole = {name: parameter.data.clone() for name, parameter in module.named_parameters()}
    try:
        attach(module, group)
    finally:
        assert all(torch.equal(bits(p), bits(whole[name])) for name, p in module.named_parameters()), "nothing changed"
    return []


def test_a_weight_that_is_not_replicated_is_named_on_all_ranks_before_anything_changes() -> None:
    errors = [outcome.error for outcome in try_on_ranks(unlike_on_rank_1, 3)]
    assert len(set(errors)) == 1
    assert errors[0].startswith("weight layers.1.up.weight is not replicated: its hash is ")
    assert "on ranks 0 2" in errors[0] and "on rank 1 (2 of 15 weights differ)" in errors[0]
    assert "exclude=['layers.1.up.weight']" in errors[0]


def unlike_lists(group: Group) -> None:
    attach(random_stack(3 + group.rank), group)


def test_ranks_with_unlike_modules_are_told() -> None:
    errors = [outcome.error for outcome in try_on_ranks(unlike_lists, 2)]
    assert len(set(errors)) == 1
    assert "the next is none on rank 0, layers.3." in errors[0]


def too_little_on_rank_1(group: Group) -> None:
    module = random_stack()
    if group.rank == 1:
        del module.layers[:]
    before = outputs(module)
    try:
        attach(module, group)
    finally:
        assert equal(outputs(module), before)


def test_what_fails_on_one_rank_fails_on_all_and_changes_nothing() -> None:
    errors = [outcome.error for outcome in try_on_ranks(too_little_on_rank_1, 2)]
    assert len(set(errors)) == 1 and errors[0].startswith("attach failed on rank 1: Stack has no ModuleList")


def test_a_failure_after_weights_were_given_up_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(runtime: Runtime) -> None:
        raise graphshard.CommError("as asked")

    monkeypatch.setattr(Runtime, "check_gathers", fail)
    with pytest.raises(graphshard.CommError, match=r"as asked\. 15 weights of the module are gone: load it again"):
        attach(random_stack())
