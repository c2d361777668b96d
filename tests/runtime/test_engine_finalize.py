"""`finalize`: the module computes as with whole weights; amax over ranks; failures that all ranks share; memory."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from typing import Any

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
    online_fp8,
    prepare_server,
    qkv,
    server_model,
)
from small_modules import bits
from torch import Tensor, nn

import graphshard
from graphshard._core import Memory
from graphshard.comm.group import Group, LocalGroup
from graphshard.core.errors import DeviceError, LoadError, ProgramError, SpecError
from graphshard.device import open_device
from graphshard.runtime.engine import filler

# --- a whole run: the module computes what one with whole weights does ---


def run_rank(group: Group, how: str) -> dict[str, Any]:
    whole = server_model(PARTS, WIDTH, "cpu")
    whole.load_state_dict(checkpoint_of(whole))
    prepared = loaded(group, follow={"*.weight_scale": 1} if how == "channel" else {})
    if how != "none":
        online_fp8(prepared, how)
        alone = prepare_server(server_model(PARTS, WIDTH), LocalGroup(1)[0], PARTS)
        load_all(alone, whole.state_dict(), PARTS)
        online_fp8(alone, how)
        for name, parameter in alone.module.named_parameters():
            path, _, attribute = name.rpartition(".")
            setattr(whole.get_submodule(path), attribute, nn.Parameter(parameter.detach().clone(), requires_grad=False))
    x = torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH)
    with torch.no_grad(), prepared.finalize(**PLAN) as attached:
        found = [prepared.module(x) for _ in range(2)]
        group.barrier()
        state = prepared.module.state_dict()
        attached.detach()
        again = prepared.module(x)
    right = all(torch.equal(result, whole(x)) for result in (*found, again))
    same = all(
        torch.equal(state[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))
        for name, tensor in whole.state_dict().items()
    )
    return {"right": right, "state": same, "units": len(attached.plan.units)}


@pytest.mark.parametrize("how", ["none", "tensor", "channel"])
def test_a_finalized_module_computes_what_whole_weights_do(how: str) -> None:
    with torch.no_grad():
        assert run_on_ranks(run_rank, 3, how) == [{"right": True, "state": True, "units": 2}] * 3


def own_loop_rank(group: Group) -> bool:
    whole = server_model(PARTS, WIDTH, "cpu")
    whole.load_state_dict(checkpoint_of(whole))
    prepared = loaded(group)
    with torch.no_grad(), prepared.finalize(own_loop=True, **PLAN) as attached:
        x = y = torch.ones(1, WIDTH)
        with attached.begin_step() as step:
            for i, (mine, theirs) in enumerate(zip(prepared.module.layers, whole.layers, strict=True)):  # type: ignore[arg-type]
                step.before_layer(i)
                x, y = mine(x), theirs(y)
                step.after_layer(i)
        group.barrier()
    return torch.equal(x, y)


def chosen_rank(group: Group, prepare: dict[str, Any], finalize: dict[str, Any]) -> list[Any]:
    """What is kept by rows, what is sharded in the end, and whether every weight has its bytes."""
    prepared = loaded(group, **prepare)
    tensors = checkpoint_of(server_model(PARTS, WIDTH, "cpu"))
    with prepared.finalize(units="layer", **finalize) as attached:
        right = all(torch.equal(attached.whole_weight(w.name), tensors[w.name]) for w in attached.runtime.model.weights)
        sharded = [decision.weight for decision in attached.plan.decisions if decision.unit is not None]
        group.barrier()
    return [sorted(prepared.rows), sorted(sharded), right]


QKVS = [f"layers.{i}.qkv.weight" for i in range(2)]
OUTS = [f"layers.{i}.out.weight" for i in range(2)]
SMALL = {"min_shard_bytes": 64 * 1024}


@pytest.mark.parametrize(
    ("prepare", "finalize", "rows", "sharded"),
    [
        ({"include": ["*.qkv.weight"]}, {}, QKVS, QKVS),
        ({"exclude": ["*.out.*", "*.bias", "*.norm.*"]}, {}, QKVS, QKVS),
        ({"min_shard_bytes": 100}, {}, [*OUTS, *QKVS], [*OUTS, *QKVS]),
        (SMALL, {}, [], []),
        # a plan that shards what was loaded whole, and keeps what was loaded by rows
        (SMALL, {"include": ["*.qkv.weight"]}, [], QKVS),
        ({"include": ["*.qkv.weight"]}, {"include": ["*.out.weight"]}, QKVS, OUTS),
    ],
)
def test_what_prepare_was_told_holds_for_the_plan_unless_it_is_told_otherwise(
    prepare: dict[str, Any], finalize: dict[str, Any], rows: list[str], sharded: list[str]
) -> None:
    assert run_on_ranks(chosen_rank, 2, prepare, finalize) == [[sorted(rows), sorted(sharded), True]] * 2


def whole_unlike_rank(group: Group) -> None:
    prepared = prepare_server(server_model(PARTS, WIDTH), group, PARTS, **SMALL)
    load_all(prepared, checkpoint_of(server_model(PARTS, WIDTH, "cpu"), seed=group.rank), PARTS)
    prepared.finalize(**PLAN)


def test_weights_that_were_loaded_whole_are_compared_before_they_are_sharded() -> None:
    for outcome in try_on_ranks(whole_unlike_rank, 2):
        assert outcome.error_type == "SpecError"
        assert re.search(r"is not replicated: its hash is .* exclude=", outcome.error)


def updated_rank(group: Group) -> list[bool]:
    """Online FP8, then an update from finished weights, under the same names, in place."""
    first, second = loaded(group), loaded(LocalGroup(1)[0], seed=1)
    for prepared in (first, second):
        online_fp8(prepared, "tensor")
    with torch.no_grad(), first.finalize(**PLAN) as attached, second.finalize():
        addresses = {name: p.data_ptr() for name, p in first.module.named_parameters()}
        finished = second.module.state_dict()
        attached.runtime.update(finished.items())
        state = first.module.state_dict()
        same = all(torch.equal(bits(state[name]), bits(tensor)) for name, tensor in finished.items())
        stays = addresses == {name: p.data_ptr() for name, p in first.module.named_parameters()}
        with pytest.raises(ProgramError, match="cannot be loaded: the module was finalized"):
            qkv(first).weight.weight_loader(None, None)
        first.module(torch.ones(1, WIDTH))
        group.barrier()
    return [same, stays]


def test_a_finalized_module_takes_updates_in_place() -> None:
    assert run_on_ranks(updated_rank, 2) == [[True, True]] * 2


def checked_rank(group: Group) -> bool:
    prepared = loaded(group)
    whole = server_model(PARTS, WIDTH, "cpu")
    whole.load_state_dict(checkpoint_of(whole))
    x = torch.ones(2, WIDTH)
    with torch.no_grad(), prepared.finalize(check=True, **PLAN):
        found = prepared.module(x)
        group.barrier()
        return torch.equal(found, whole(x))


def test_reads_outside_layers_are_watched_if_asked_for() -> None:
    assert run_on_ranks(checked_rank, 2) == [True, True]


class Shapes(nn.Module):
    """A weight of three dimensions, one of a single row, and one with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Parameter(torch.empty(7, 3, 2), requires_grad=False)
        self.row = nn.Parameter(torch.empty(1, 5), requires_grad=False)
        self.one = ServerLinear(4, 4)
        self.two = ServerLinear(4, 4)
        self.two.weight = self.one.weight


def shapes_rank(group: Group) -> list[bool]:
    with torch.device("meta"):
        module = nn.Sequential(Shapes(), Shapes())
    prepared = graphshard.prepare(module, group, layers="", min_shard_bytes=0)
    generator = torch.Generator().manual_seed(2)
    tensors = {name: torch.randn(p.shape, generator=generator).to(p.dtype) for name, p in module.named_parameters()}
    for index, (name, tensor) in enumerate(tensors.items()):
        prepared.load(name.replace("one", "two") if index % 2 else name, tensor)
    shared = all(layer.one.weight is layer.two.weight for layer in module)  # type: ignore[union-attr]
    with prepared.finalize(**PLAN) as attached:
        whole = [torch.equal(attached.whole_weight(name), tensor) for name, tensor in tensors.items()]
        group.barrier()
    return [shared, *whole]


def test_weights_of_other_shapes_and_with_two_names() -> None:
    assert run_on_ranks(shapes_rank, 3) == [[True] * 7] * 3


def test_a_loop_of_ones_own_over_a_finalized_module() -> None:
    assert run_on_ranks(own_loop_rank, 2) == [True, True]


def test_a_replicated_plan_makes_every_weight_whole_and_resident() -> None:
    def rank(group: Group) -> bool:
        prepared = loaded(group)
        tensors = checkpoint_of(server_model(PARTS, WIDTH, "cpu"))
        with prepared.finalize(plan="replicated") as attached:
            module = dict(prepared.module.named_parameters())
            same = all(torch.equal(module[name], tensors[name]) for name in module)
            return same and attached.plan.units == ()

    assert run_on_ranks(rank, 3) == [True] * 3


# --- failures in the middle ---


class Failing:
    """A device whose allocations fail from some number on, on one rank."""

    def __init__(self, num_ranks: int, fails_at: int) -> None:
        self._device = open_device("host", num_ranks=num_ranks)
        self._left = fails_at

    def allocate(self, num_bytes: int, exportable: bool = False) -> Memory:
        self._left -= 1
        if self._left == 0:
            raise DeviceError(f"no memory for {num_bytes} B (a test)")
        return self._device.allocate(num_bytes, exportable)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


def failing_rank(group: Group, fails_at: int) -> str:
    device = Failing(group.world_size, fails_at if group.rank == 1 else 0)
    prepared = prepare_server(server_model(PARTS, WIDTH), group, PARTS, device=device)
    tensors = checkpoint_of(server_model(PARTS, WIDTH, "cpu"))
    load_all(prepared, tensors, PARTS)
    prepared.finalize(**PLAN).close()
    return "finalized"


def test_a_rank_without_memory_fails_all_at_once_wherever_it_happens() -> None:
    num_rows = 10  # allocations of rows, each of which fails in its loader; then chunks, slots, the window
    ends = [try_on_ranks(failing_rank, 2, fails_at, group_timeout_s=20.0) for fails_at in range(1, num_rows + 5)]
    errors = [[outcome.error for outcome in outcomes] for outcomes in ends]
    failed = [pair for pair in errors if any(pair)]
    assert len(failed) >= num_rows + 3
    for pair in failed[num_rows:]:
        assert "failed on rank 1: no memory for" in pair[0] and pair[0] == pair[1], pair
    for pair in failed[:num_rows]:
        assert "no memory for" in pair[1] and pair[0], pair


def broken_rank(group: Group, at: str) -> None:
    prepared = loaded(group)
    if group.rank == 1:
        row = prepared._rows["layers.1.qkv.weight"]
        fails = iter([False, at == "rows"])
        standing = row.standing

        def stands() -> Tensor:
            if next(fails, False):
                raise LoadError("these rows cannot be read (a test)")
            return standing()

        row.standing = stands  # type: ignore[method-assign]
    prepared.finalize(**PLAN)


def slow_rank(group: Group, limit_s: float) -> float:
    prepared = prepare_server(server_model(PARTS, WIDTH), group, PARTS, load_timeout_s=limit_s)
    load_all(prepared, checkpoint_of(server_model(PARTS, WIDTH, "cpu")), PARTS)
    started = time.monotonic()
    if group.rank == 1:
        threading.Event().wait(1.5 * group.timeout_s)  # its storage is slow
    prepared.finalize(**PLAN).close()
    return time.monotonic() - started


@pytest.mark.slow  # longer than a group's limit
@pytest.mark.parametrize("limit_s", [60.0, 2.0])
def test_a_rank_that_loads_for_longer_than_the_groups_limit_is_waited_for(limit_s: float) -> None:
    outcomes = try_on_ranks(slow_rank, 2, limit_s, group_timeout_s=6.0)
    if limit_s == 60.0:
        assert [outcome.error for outcome in outcomes] == ["", ""] and outcomes[0].value > 6.0
    else:
        assert (
            re.search(r"waited 2\.0 s in loading .*: rank 1", outcomes[0].error)
            and outcomes[0].error_type == "CommError"
        )


def leaving_rank(group: Group, how: str) -> None:
    prepared = loaded(group)
    if group.rank == 1 and how == "raises":
        raise ValueError("out of patience (a test)")
    if group.rank == 1:
        standing, stops = prepared._rows["layers.1.qkv.weight"].standing, iter([False, True])

        def stands() -> Tensor:
            if next(stops, False):
                os.kill(os.getpid(), signal.SIGKILL)
            return standing()

        prepared._rows["layers.1.qkv.weight"].standing = stands  # type: ignore[method-assign]
    prepared.finalize(**PLAN)


@pytest.mark.parametrize(
    ("how", "mode"), [("raises", "threads"), pytest.param("is killed", "processes", marks=pytest.mark.slow)]
)
def test_a_rank_that_goes_away_ends_finalize_on_all_others_by_name(how: str, mode: str) -> None:
    started = time.monotonic()
    outcomes = try_on_ranks(leaving_rank, 3, how, mode=mode, timeout_s=120.0)
    assert time.monotonic() - started < 90, "bounded by its end, not by a timeout"
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error_type == "CommError" and "rank 1" in outcome.error, outcome


def test_a_failure_after_rows_were_given_up_says_so_on_all_ranks() -> None:
    started = time.monotonic()
    outcomes = try_on_ranks(broken_rank, 3, "rows")
    assert time.monotonic() - started < 30, "bounded by the failure, not by a timeout"
    for outcome in outcomes:
        assert outcome.error_type == "LoadError", outcome
        assert re.search(r"rank 1: these rows .* \d+ weights of the module are gone, .*: make it anew", outcome.error)


# --- memory ---


def freed_rank(group: Group) -> list[Any]:
    prepared = loaded(group)
    held = qkv(prepared).weight.data
    rows = sum(parameter.nbytes for name, parameter in prepared.module.named_parameters() if name in prepared.rows)
    attached = prepared.finalize(**PLAN)
    report = attached.report()
    found = [
        prepared.held_bytes == held.nbytes,
        prepared.freed_bytes == rows - held.nbytes,
        "are still held by somebody: layers.0.qkv.weight" in report,
        prepared.peak_bytes <= rows + max(sum(PARTS) * WIDTH * 2, filler.MAX_WINDOW_BYTES),
    ]
    del held
    found.append(prepared.held_bytes == 0 and prepared.freed_bytes == rows)
    group.barrier()
    attached.close()
    return found


def test_freed_bytes_are_measured_and_who_holds_rows_is_named() -> None:
    assert run_on_ranks(freed_rank, 2) == [[True] * 5] * 2


def test_a_rank_that_came_back_is_sent_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphshard.runtime.engine.prepared.Newcomer", Group)
    with pytest.raises(SpecError, match="a rank that came back cannot prepare a module"):
        graphshard.prepare(server_model(PARTS, WIDTH), LocalGroup(1)[0])
