"""Updates where the host does not wait for steps: what is in flight has the old weights, all after it the new ones."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from cuda_rig import Rank
from fault_tools import LIMIT_S, InThread, until
from ranks import run_on_ranks

from graphshard.comm.group import Group


@pytest.mark.parametrize("head", ["inside", "outside", "tail"])
def test_steps_in_flight_end_first(head: str, transport: str) -> None:
    def go(group: Group) -> list[Any]:
        rank = Rank(group, head=head, units="layer", prefetch_depth=1, transport=transport)
        runtime, model = rank.runtime, rank.model
        with runtime:
            graph = runtime.graph(1)
            seen: list[list[str]] = []
            table = runtime.buffer_table()

            def step(version: int) -> None:
                """One replay, and behind it a kernel of the caller's that looks at the outputs."""
                graph.replay()
                rank.torch_cuda.kernel(lambda: seen.append(model.wrong(graph.outputs, version)))

            for version in range(1, 4):
                gate = threading.Event()
                rank.torch_cuda.kernel(lambda gate=gate: gate.wait(LIMIT_S))  # the caller's; the step comes after it
                step(version - 1)
                assert not runtime._streams["compute"].is_idle()

                def open_later(epoch: int = runtime.epoch, gate: threading.Event = gate) -> None:
                    until(lambda: runtime.epoch > epoch, "the update stops steps")
                    gate.set()

                opening = InThread(open_later)
                runtime.update(model.tensors(version))
                opening.result()
                step(version)
                runtime.synchronize()
                runtime.run(1)
                rank.torch_cuda.kernel(lambda version=version: seen.append(model.wrong(graph.outputs, version)))
            rank.torch_cuda.synchronize(rank.torch_cuda.current_stream())
            assert runtime.buffer_table() == table
            return [seen, runtime.num_primes]

    found = run_on_ranks(go, 2)
    assert found[0] == found[1] and found[0][0] == [[]] * 9
