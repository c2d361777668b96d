"""The D faults and all mutants in 200 seeded orders, with copies earliest and latest, and on threads.

What the verifier accepts never shows a wrong byte in any order; what it calls harmful is really harmful.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import pytest
import torch
from byte_model import ByteModel
from byte_steps import compile_bytes, wrong_after
from fault_tools import reorder
from mutate import Mutant, list_mutants, program_mutants
from order_rig import EARLIEST, LATEST, ORDERS, Rig, Step
from ranks import run_on_ranks
from torch import Tensor
from verify_cases import good_programs, program_of

from graphshard.comm.group import Group
from graphshard.core.lowering import lower
from graphshard.runtime.graphs import StepGraph
from graphshard.verify import verify

HEADS = ("inside", "outside", "tail")
EXTREMES = (EARLIEST, LATEST)


@pytest.fixture(scope="module")
def rig() -> Rig:
    return Rig()


# --- the runtime, as users have it ---


def right_in_every_order(graphs: Iterable[StepGraph], truth: dict[str, Tensor], num_threaded: int) -> int:
    """Replay `graphs` in turn in every order; how many replays, all of them right."""
    graphs = list(graphs)
    orders = [*((seed, "cooperative") for seed in (*EXTREMES, *range(ORDERS))), *[(-1, "threaded")] * num_threaded]
    for seed, executor in orders:
        for graph in graphs:
            reorder(graph, seed, executor)
            for output in graph.outputs.values():
                output.zero_()
            graph.replay()
            for key, output in graph.outputs.items():
                assert torch.equal(output, truth[key.split(":")[1]]), f"seed {seed}, {executor}: {key} is wrong"
    return len(orders) * len(graphs)


def orders_of(group: Group, cases: list[tuple[list[list[int]], dict[str, object]]], num_threaded: int) -> int:
    """Rank 0 replays each case in every order; the others lend their windows."""
    number = 0
    for layers, choices in cases:
        model = ByteModel(layers, tied=bool(choices.get("include")))
        sizes = [1, 2] if len(layers) == 4 else [1]
        with compile_bytes(group, model, **(choices | {"capture_sizes": sizes})) as runtime:
            if group.rank == 0:
                graphs = [runtime.graph(size) for size in sizes]
                number += right_in_every_order(graphs, model.tensors(), num_threaded)
            group.barrier()
    return number


@pytest.mark.parametrize("head", HEADS)
def test_slots_are_right_in_every_order(head: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Any number of units and slots, equal neighbours, a weight read twice, two step shapes."""
    cases: list[tuple[list[list[int]], dict[str, object]]] = [
        ([[600 + layer] for layer in range(num_layers)], {"units": "layer", "prefetch_depth": depth, "head": head})
        for num_layers in (1, 2, 3, 4, 5, 7, 61)
        for depth in (1, 2)
    ]
    cases += [
        ([[700], [700], [700]], {"units": "weight", "prefetch_depth": 1, "head": head, "num_slots": 3}),
        ([[700, 300], [800], [900]], {"units": "weight", "prefetch_depth": 1, "head": head, "include": ["*"]}),
        ([[700], [800], [900], [950]], {"units": "layer", "prefetch_depth": 1, "head": head, "num_copy_streams": 2}),
    ]
    number, *_ = run_on_ranks(orders_of, 2, cases, 3, timeout_s=120.0)
    with capsys.disabled():
        print(f"\nhead {head}: {number} replays in {ORDERS} seeded orders, 2 extremes and on threads, all right")
    assert number > ORDERS * len(cases)


def orders_in_step(group: Group, choices: dict[str, object]) -> list[str]:
    """All ranks replay together, each in orders of its own; one in five replays has a thread a stream."""
    model = ByteModel([[700], [800], [900], [950]])
    wrong = []
    with compile_bytes(group, model, units="layer", transport="nccl", **choices) as runtime:
        graph = runtime.graph(1)
        for number in range(ORDERS):
            seed = (*EXTREMES, number * group.world_size + group.rank)[min(number + group.rank, 2)]
            reorder(graph, seed, "threaded" if number % 5 == group.rank else "cooperative")
            wrong += wrong_after(runtime, model, graph.replay)
    return wrong


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("depth", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_collective_gathers_are_right_in_every_order_of_each_rank(depth: int, head: str) -> None:
    """No order of one rank's nodes makes another rank wait forever, or see wrong bytes."""
    assert run_on_ranks(orders_in_step, 3, {"prefetch_depth": depth, "head": head}) == [[], [], []]


# --- programs past the verifier ---


def test_good_programs_are_right_in_every_order(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    """Two steps of each program from poisoned slots, with one and two copy streams, eagerly too."""
    number = 0
    for name, program in good_programs(5):
        for num_copy_streams in (1, 2):
            step = rig.step(program, lower(program, 2, num_copy_streams))
            assert rig.wrong_orders([step, step], (*EXTREMES, *range(ORDERS)), 1) == 0, name
            assert rig.wrong_orders([step, step], [-1], 3, "threaded") == 0, name
            assert rig.wrong_eager([step, step], 1) == 0, name
            number += 1
    with capsys.disabled():
        print(f"\n{number} good lists in {ORDERS + 2} orders, on threads and eagerly: no wrong byte")


class Tally:
    """By kind of mutant: harmful ones, those that showed wrong bytes at an extreme or in a seeded order."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {}

    def add(self, mutant: Mutant, is_harmful: bool, outcome: str) -> None:
        self.counts.setdefault(mutant.kind, Counter())[f"{outcome} harmful" if is_harmful else outcome] += 1

    def total(self) -> Counter[str]:
        return sum(self.counts.values(), Counter())

    def text(self) -> str:
        return "\n".join(f"{kind}: {dict(sorted(count.items()))}" for kind, count in sorted(self.counts.items()))


def outcome_of(rig: Rig, step: Step) -> str:
    """`refused` by the driver, or where two steps first show wrong bytes: at an extreme, in a seeded order, nowhere."""
    if step.graph is None:
        return "refused"
    if rig.wrong_orders([step, step], EXTREMES, 1):
        return "extreme"
    return "seeded" if rig.wrong_orders([step, step], [0], ORDERS // 2) else "right"  # two launches an order


def judge(rig: Rig, mutants: Iterable[Mutant], lists: Callable[[Mutant], dict[str, object]]) -> Tally:
    """Run every mutant; AssertionError if a harmless one shows wrong bytes, or a whole kind of harmful ones none."""
    tally = Tally()
    for mutant in mutants:
        report = verify(mutant.program, **lists(mutant))  # type: ignore[arg-type]
        is_harmful = any(violation.wrong_bytes for violation in report.violations)
        step = rig.step(mutant.program, mutant.lowered)
        outcome = outcome_of(rig, step)
        assert is_harmful or outcome in ("right", "refused"), f"{mutant.kind}: {report.text()}\n{mutant.program.text()}"
        tally.add(mutant, is_harmful, outcome)
    print(tally.text())
    for kind, count in tally.counts.items():
        shown = count["extreme harmful"] + count["seeded harmful"] + count["refused harmful"]
        assert shown or not count["right harmful"], f"{kind}: harmful by the verifier, and never in practice"
    return tally


def test_harmful_program_mutants_show_wrong_bytes(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    """Each mutant forced past the verifier; its verdict is what happens, both ways."""
    mutants = (mutant for _, program in good_programs(3) for mutant in program_mutants(program))
    tally = judge(rig, mutants, lambda mutant: {})
    total = tally.total()
    num_shown = total["extreme harmful"] + total["seeded harmful"]
    num_harmful = num_shown + total["right harmful"]
    with capsys.disabled():
        print(
            f"\nprogram mutants: {total.total()}, harmful {num_harmful}; wrong bytes seen of {num_shown}: "
            f"{total['extreme harmful']} with copies earliest or latest, {total['seeded harmful']} more in seeded "
            f"orders; of {total['right']} harmless ones none"
        )
    assert num_harmful > 1000 and num_shown >= 0.98 * num_harmful


@pytest.mark.parametrize(
    ("head", "num_copy_streams"),
    [
        *((head, 1) for head in HEADS),
        ("tail", 2),
        *(pytest.param(head, 2, marks=pytest.mark.slow) for head in ("inside", "outside")),
    ],
)
def test_harmful_list_mutants_are_refused_or_show_wrong_bytes(
    rig: Rig, head: str, num_copy_streams: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unjoined streams and foreign waits are refused at capture; the others show wrong bytes."""
    program = program_of([(0,), (1,), (2,)], head=head, prefetch_depth=1)
    mutants = list_mutants(program, lower(program, 2, num_copy_streams))

    def lists(mutant: Mutant) -> dict[str, object]:
        return {"num_copies": 2, "num_copy_streams": num_copy_streams, "lowered": {program: mutant.lowered}}

    total = judge(rig, mutants, lists).total()
    harmful = {name.removesuffix(" harmful"): count for name, count in total.items() if name.endswith(" harmful")}
    with capsys.disabled():
        print(
            f"\nlist mutants, head {head}, {num_copy_streams} copy streams: {total.total()}, harmful "
            f"{sum(harmful.values())}: refused by the driver {harmful.get('refused', 0)}, wrong bytes seen of "
            f"{harmful.get('extreme', 0)} with copies earliest or latest and of {harmful.get('seeded', 0)} more in "
            f"seeded orders, {harmful.get('right', 0)} unseen"
        )
    assert not harmful.get("right", 0)


def test_pairs_of_programs_are_right_in_every_order(rig: Rig) -> None:
    """Graphs of unlike programs over the same slots, a second program in place of a draft's."""
    programs = [program_of([(0,), (1,), (2,)], head=head, prefetch_depth=1) for head in HEADS]
    programs += [program_of([(0,), (1,), (2,), (3,), (4,)], head=head, prefetch_depth=2) for head in HEADS]
    steps = [rig.step(program) for program in programs]
    for first in steps:
        for second in steps:
            assert rig.wrong_orders([first, second, second, first], EXTREMES, 1) == 0
            assert rig.wrong_orders([first, second, second, first], [7], ORDERS // 4) == 0
            assert rig.wrong_orders([first, second, first], [-1], 2, "threaded") == 0


def test_threads_and_streams_find_some_of_it(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    """What real threads show of the harmful mutants: printed, since it is up to the machine."""
    counts: Counter[str] = Counter()
    for head in HEADS:
        program = program_of([(0,), (1,), (2,)], head=head, prefetch_depth=1)
        for mutant in program_mutants(program):
            if not any(violation.wrong_bytes for violation in verify(mutant.program).violations):
                continue
            step = rig.step(mutant.program)
            counts["harmful"] += 1
            counts["threads"] += rig.wrong_orders([step, step], [-1], 5, "threaded") > 0
            counts["streams"] += rig.wrong_eager([step, step], 5) > 0
    with capsys.disabled():
        print(
            f"\nharmful mutants {counts['harmful']}: wrong bytes seen of {counts['threads']} with a thread a stream, "
            f"of {counts['streams']} eagerly (5 times two steps each)"
        )
    assert counts["harmful"] > 100 and counts["streams"] > 0
