"""Tensors whose storage does not hold their bytes: a load or an update names them, and the process goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from byte_model import ByteModel
from byte_steps import compile_bytes
from ranks import try_on_ranks
from torch import Tensor
from update_programs import stored, try_update

from graphshard.comm.group import Group

MODEL = ByteModel([[300], [100]])
FIRST = MODEL.weights[0].name


class Elsewhere(Tensor):
    """A tensor around another, as DTensor is one: its own storage has no memory."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Elsewhere:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        return cls(function(*(one.inner if isinstance(one, cls) else one for one in arguments), **(named or {})))


def _freed(tensor: Tensor) -> Tensor:
    """What FSDP leaves of a parameter that it has sharded."""
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(tensor.nbytes // 2)
    return tensor


def _freed_view(tensor: Tensor) -> Tensor:
    view = torch.stack([tensor, tensor], 1)[:, 1]
    view.untyped_storage().resize_(view.nbytes)
    return view


CASES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "wrapper": (Elsewhere, f"{FIRST} is a Elsewhere, which keeps its bytes elsewhere"),
    "parameter": (lambda t: torch.nn.Parameter(Elsewhere(t), requires_grad=False), f"{FIRST} is a Elsewhere, which"),
    "nested": (
        lambda t: torch.nested.nested_tensor([t], layout=torch.jagged),
        f"{FIRST} is a nested tensor, which",
    ),
    "sparse": (Tensor.to_sparse, f"{FIRST} has the layout torch.sparse_coo"),
    "freed": (_freed, f"{FIRST} has lost its memory: 150 bytes are left of 300"),
    "freed view": (_freed_view, f"{FIRST} has lost its memory: 300 bytes are left of 600"),
}
LOADED = {
    "meta": (lambda t: t.to("meta"), f"{FIRST} is on the meta device, and has no bytes"),
    "array": (Tensor.numpy, f"{FIRST} is a ndarray, no tensor"),
}


@pytest.mark.parametrize("kind", CASES | LOADED)
def test_a_load_names_what_it_cannot_read(kind: str) -> None:
    make, says = (CASES | LOADED)[kind]
    tensors = MODEL.tensors() | {FIRST: make(MODEL.tensors()[FIRST])}
    ended = try_on_ranks(lambda group: compile_bytes(group, MODEL, checkpoint=tensors).close(), 2)
    assert {(one.error_type, one.error) for one in ended} == {("LoadError", ended[0].error)}
    assert says in ended[0].error and "give a plain tensor that holds all its bytes" in ended[0].error


@pytest.mark.parametrize("checkpoint", [None, 3, [("w", torch.ones(1))]])
def test_what_is_no_checkpoint_is_named_on_all_ranks(checkpoint: object) -> None:
    def go(group: Group) -> None:
        compile_bytes(group, MODEL, checkpoint=checkpoint if group.rank else MODEL.tensors()).close()

    ended = try_on_ranks(go, 2)
    assert {(one.error_type, one.error) for one in ended} == {("SpecError", ended[0].error)}
    assert "failed on rank 1" in ended[0].error and "give a path, or tensors by name" in ended[0].error


def test_an_update_names_what_it_cannot_read() -> None:
    def go(group: Group) -> None:
        with compile_bytes(group, MODEL, units="layer") as runtime:
            before = stored(runtime)
            for make, says in CASES.values():
                text = try_update(runtime, MODEL.tensors(1) | {FIRST: make(MODEL.tensors()[FIRST])})
                assert says in text and "the weights of epoch 0 stay" in text, text
            assert all(map(torch.equal, before, stored(runtime)))
            assert try_update(runtime, MODEL.tensors(1)) == ""

    assert [one.error for one in try_on_ranks(go, 2)] == ["", ""]


def test_every_plain_tensor_is_read() -> None:
    """Views of one storage, its very last bytes, no elements at all, and what torch says of how it was made."""
    whole = torch.arange(400, dtype=torch.uint8)
    with torch.inference_mode():
        inferred = whole[100:].clone()
    given = {"views": whole[100:], "every other": torch.stack([whole[100:]] * 2, 1)[:, 1], "inferred": inferred}
    for tensor in (*given.values(), torch.nn.Parameter(whole[100:], requires_grad=False)):
        tensors = {FIRST: tensor, MODEL.weights[1].name: whole[:100]}

        def go(group: Group, tensors: dict[str, Tensor] = tensors) -> bool:
            with compile_bytes(group, MODEL, checkpoint=tensors) as runtime:
                seen = runtime.buffers(min(runtime.programs), "output")
                runtime.run(1)
                return all(torch.equal(each, tensors[key.split(":")[1]]) for key, each in seen.items())

        ended = try_on_ranks(go, 2)
        assert [one.value for one in ended] == [True, True], ended
