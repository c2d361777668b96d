"""An attached module to the rest of the world: right bytes from `state_dict`, a refusal wherever they would be lost."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, outputs_of
from ranks import run_on_ranks
from small_modules import WIDTH, Stack, attach, equal, inputs, outputs, random_stack, twin
from torch import Tensor, nn

import graphshard
from graphshard.comm.group import Group


def same_state(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    """Equal names in equal order, equal bits."""
    return list(some) == list(others) and all(torch.equal(some[name], others[name]) for name in some)


# --- right bytes ---


def states_of(group: Group, check: bool) -> list[bool]:
    module, reference = random_stack(), random_stack()
    wrapper = nn.ModuleDict({"inner": module, "other": nn.Linear(2, 2)})
    outer = nn.ModuleDict({"inner": reference, "other": wrapper["other"]})
    attach(module, group, check=check)
    right = []
    for _ in range(2):
        if group.rank == 0:
            right += [
                same_state(module.state_dict(), reference.state_dict()),
                same_state(module.layers[1].state_dict(), reference.layers[1].state_dict()),
                same_state(module.layers[2].up.state_dict(prefix="x."), reference.layers[2].up.state_dict(prefix="x.")),
                same_state(module.state_dict(keep_vars=True), reference.state_dict()),
                same_state(wrapper.state_dict(), outer.state_dict()),
            ]
        right.append(equal(outputs(module), outputs(reference)))
    return right


@pytest.mark.parametrize("check", [False, True])
def test_state_dicts_are_right_on_any_submodule_and_around(check: bool) -> None:
    """Local: the peer does something else meanwhile."""
    assert run_on_ranks(states_of, 2, check) == [[True] * 12, [True] * 2]


def test_a_state_dict_under_other_names_is_refused() -> None:
    def rename(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
        state[f"{prefix}kernel"] = state.pop(f"{prefix}weight")

    module = random_stack()
    module.layers[1].up.register_state_dict_post_hook(rename)  # type: ignore[no-untyped-call]
    with attach(module) as attached:
        with pytest.raises(graphshard.ProgramError, match=r"state_dict would save, .*; .* whole_weight"):
            module.state_dict()
        attached.detach()
    assert "layers.1.up.kernel" in module.state_dict()


def test_modules_that_save_in_a_way_of_their_own_are_refused() -> None:
    class Saving(nn.Linear):
        def get_extra_state(self) -> Tensor:
            return self.weight.sum()

        def set_extra_state(self, state: Tensor) -> None: ...

    module = random_stack()
    module.layers[0].up = Saving(WIDTH, module.layers[0].up.out_features)
    with attach(module), pytest.raises(graphshard.ProgramError, match="state_dict would save, in a way of its own"):
        module.state_dict()


def test_a_state_dict_owns_its_tensors_and_can_be_saved() -> None:
    module, file = random_stack(), io.BytesIO()
    expected = random_stack().state_dict()
    with attach(module) as attached:
        state = module.state_dict()
        slots = attached.runtime.memory.slots
        assert slots is not None
        inside = range(slots.address, slots.address + slots.num_bytes)
        assert not any(tensor.data_ptr() in inside for tensor in state.values())
        torch.save(module.state_dict(), file)
    file.seek(0)
    assert same_state(torch.load(file), expected) and same_state(state, expected)


def test_a_state_dict_inside_a_forward_is_refused() -> None:
    module = random_stack()

    def call(stack: Stack, x: Tensor) -> Tensor:
        stack.state_dict()
        return x

    with attach(module):
        module.call = call
        with pytest.raises(graphshard.ProgramError, match="a step of this thread is open"):
            outputs(module)
        module.call = None
        assert equal(outputs(module), outputs(random_stack()))


def test_whole_weights_by_name() -> None:
    module, reference = random_stack(), random_stack()
    with attach(module) as attached:
        for name, parameter in reference.layers.named_parameters(prefix="layers"):
            assert torch.equal(attached.whole_weight(name), parameter)
        with pytest.raises(graphshard.SpecError, match=r"model Stack has no weight 'head.weight'"):
            attached.whole_weight("head.weight")


@pytest.mark.parametrize("name", ["llama, tied", "gpt2", "t5, decoder", "qwen3_moe"])
def test_save_pretrained_writes_what_the_untouched_model_would(name: str, tmp_path: Any) -> None:
    architecture = next(a for a in ARCHITECTURES if a.name == name)
    module = architecture.build()
    step = architecture.steps()[0]
    expected, state = outputs_of(module, step), copy.deepcopy(module.state_dict())
    with attach(module, **architecture.attach):
        module.save_pretrained(tmp_path)  # type: ignore[operator]
        assert same_state(module.state_dict(), state)
    loaded = type(module).from_pretrained(tmp_path).eval()  # type: ignore[attr-defined]
    assert same_state(loaded.state_dict(), state)
    found = outputs_of(loaded, step)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


# --- refusals ---

REFUSED: dict[str, tuple[Callable[[Stack], object], str]] = {
    "half": (
        lambda m: m.half(),
        r"to\(\), half\(\), cuda\(\) and their kin would convert weights .* convert it before",
    ),
    "to dtype": (lambda m: m.to(torch.float64), r"would convert"),
    "to meta": (lambda m: m.to("meta"), r"would convert"),
    "to_empty": (lambda m: m.to_empty(device="cpu"), r"would convert"),
    "share_memory": (lambda m: m.share_memory(), r"would convert"),
    "of a layer": (lambda m: m.layers[1].double(), r"Block: .* would convert"),
    "of a leaf": (lambda m: m.layers[1].up.bfloat16(), r"Linear: .* would convert"),  # type: ignore[union-attr]
    "around it": (lambda m: nn.Sequential(nn.Linear(2, 2), m).half(), r"would convert"),
    "deepcopy": (copy.deepcopy, r"deepcopy would copy weights .* or copy it before attaching"),
    "deepcopy of a layer": (lambda m: copy.deepcopy(m.layers[0]), r"Block: deepcopy would copy"),
    "deepcopy around it": (lambda m: copy.deepcopy({"m": m}), r"Stack: deepcopy would copy"),
    "pickle": (pickle.dumps, r"pickling would store weights .* or use state_dict"),
    "torch.save": (lambda m: torch.save(m, io.BytesIO()), r"pickling would store"),
    "load_state_dict": (lambda m: m.load_state_dict(random_stack().state_dict()), r"load_state_dict would overwrite"),
    "load a layer": (lambda m: m.layers[0].load_state_dict(random_stack().layers[0].state_dict()), r"would overwrite"),
    "load around it": (
        lambda m: nn.ModuleDict({"m": m}).load_state_dict(
            {f"m.{k}": v for k, v in random_stack().state_dict().items()}
        ),
        r"load_state_dict would overwrite",
    ),
    "compile": (lambda m: m.compile(), r"torch.compile does not run the hooks"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_lose_bytes_is_refused_and_nothing_is_lost(name: str) -> None:
    use, expected = REFUSED[name]
    module, reference = random_stack(), random_stack()
    with attach(module) as attached:
        with pytest.raises(graphshard.ProgramError, match=f"{expected}"):
            use(module)
        assert equal(outputs(module), outputs(reference))
        attached.detach()
        use(module)


def test_every_refusal_names_the_way() -> None:
    module = random_stack()
    with attach(module), pytest.raises(graphshard.ProgramError, match=r"call detach\(\) of the attached module first"):
        module.half()


def test_conversions_that_change_nothing_pass() -> None:
    module, reference = random_stack(), random_stack()
    with attach(module):
        assert module.to("cpu") is module and module.float() is module and module.to(torch.float32) is module
        assert module.layers[0].cpu() is module.layers[0]
        assert module.eval() is module and module.train() is module
        assert equal(outputs(module), outputs(reference))


def test_tie_weights_is_refused_where_there_is_one() -> None:
    architecture = next(a for a in ARCHITECTURES if a.name == "llama, tied")
    module = architecture.build()
    expected = r"tie_weights would replace weights .* tie them before"
    with attach(module), pytest.raises(graphshard.ProgramError, match=expected):
        module.tie_weights()  # type: ignore[operator]
    stack = random_stack()
    with attach(stack):
        assert not hasattr(stack, "tie_weights")


def test_parts_without_sharded_weights_are_free() -> None:
    module = random_stack()
    with attach(module, exclude=["layers.0.*"]):
        copy.deepcopy(module.head)
        module.head.load_state_dict(nn.Linear(WIDTH, WIDTH).state_dict())
        assert module.head.half().weight.dtype == torch.float16


def test_a_parameter_that_was_put_in_place_of_a_sharded_one_is_the_users_own_and_stops_steps() -> None:
    module, reference = random_stack(), random_stack()
    new = torch.randn(2 * WIDTH, WIDTH)
    reference.layers[1].up.weight = nn.Parameter(new.clone())  # type: ignore[union-attr, assignment]
    with attach(module, check=True):
        module.layers[1].up.weight = nn.Parameter(new.clone())  # type: ignore[union-attr, assignment]
        assert same_state(module.state_dict(), reference.state_dict())
        with pytest.raises(graphshard.ProgramError, match=r"layers\.1\.up\.weight was replaced .* before attach\(\)"):
            outputs(module)


def test_named_parameters_work_and_shapes_are_right() -> None:
    module, reference = random_stack(), random_stack()
    with attach(module):
        shapes = {name: (p.shape, p.dtype, p.device) for name, p in module.named_parameters()}
        assert shapes == {name: (p.shape, p.dtype, p.device) for name, p in reference.named_parameters()}
        assert module.head.weight is dict(module.named_parameters())["head.weight"]


@pytest.mark.filterwarnings("ignore")
def test_torch_compile_around_an_attached_module_gives_the_same_bits() -> None:
    """Its hooks break the graph at every layer; nothing is gained, and nothing is wrong."""
    module, reference = random_stack(), twin(random_stack())
    with attach(module), torch.no_grad():
        compiled = torch.compile(module, backend="eager")
        for x in [*inputs(2), *inputs(2)]:
            assert torch.equal(compiled(x), reference(x))
