"""The ledger's sums: to the byte on small models, and Kimi K3's published lines."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphshard.core.errors import SpecError
from graphshard.core.layout import Layout, build_layout
from graphshard.core.specs import DeviceSpec, ModelSpec, StepShape
from graphshard.cost.deployment import Deployment
from graphshard.cost.facts import LayerFact, ModelFacts, PlanningModel, WeightFact
from graphshard.cost.ledger import Ledger, Overheads, graph_pool_bytes, make_ledger, shardable_by_part
from graphshard.models.specs.kimi_k3 import kimi_k3
from graphshard.runtime.update.places import places_of
from graphshard.runtime.weights.fill import NUM_THREADS, WINDOW_BYTES
from graphshard.schedule.auto import make_plan
from graphshard.schedule.synthetic import synthetic_model

GIB = 2**30
GPU = DeviceSpec("cuda", "any", memory_bytes=2**62)
NOTHING = Overheads(granularity_bytes=1, workspace_bytes=0, load_buffer_bytes=0)
KV_BYTES, STATE_BYTES, ACTIVATION_BYTES, VOCABULARY = 4096, 100_000, 5000, 1000


def planning_model(num_layers: int = 4, draft: PlanningModel | None = None, kv: int = KV_BYTES) -> PlanningModel:
    """Layers of one 4096 x 4096 bfloat16 matrix each; the last layer has a state and no keys."""
    spec = synthetic_model(num_layers, vocab_size=VOCABULARY)
    weights = tuple(
        WeightFact(w.name, "mlp", "b", *w.shape[:2], w.dtype, "rank", "column", w.name.startswith("layers."), "test")
        for w in spec.weights
    )
    last = num_layers - 1
    layers = tuple(LayerFact(i, "attention", f"layers.{i}.proj", kv_bytes_per_token=kv) for i in range(last))
    state = LayerFact(last, "kda", f"layers.{last}.proj", state_bytes_per_request=STATE_BYTES)
    facts = ModelFacts(spec.name, weights, (*layers, state), 4096, VOCABULARY, ACTIVATION_BYTES, Deployment(4))
    return PlanningModel(spec, facts, draft)


def layout_of(spec: ModelSpec, world_size: int = 4, **options: object) -> Layout:
    plan = make_plan(spec, world_size, GPU, **{"units": "layer", "prefetch_depth": 1, **options})
    return build_layout(spec, plan)


def ledger(model: PlanningModel, memory: int = GIB, overheads: Overheads = NOTHING, **options: object) -> Ledger:
    draft = layout_of(model.draft.spec, **options) if model.draft else None
    layout = layout_of(model.spec, **options)
    return make_ledger(model, layout, [StepShape(1), StepShape(8, 2)], memory, 1000, overheads, draft)


MATRIX = 4096 * 4096 * 2
ENDS = 2 * VOCABULARY * 4096 * 2


def test_lines_of_a_small_model() -> None:
    """4 matrices over 4 ranks: 4 whole, 1 in chunks, 2 in slots; embedding and head stay."""
    found = ledger(planning_model())
    assert (found.gross_bytes, found.chunk_bytes, found.slot_bytes) == (4 * MATRIX, MATRIX, 2 * MATRIX)
    assert found.net_of_ranks_bytes == 3 * MATRIX
    assert found.net_of_slots_bytes == found.freed_bytes == MATRIX
    assert found.resident_bytes == ENDS
    assert found.graph_pool_bytes == 16 * (ACTIVATION_BYTES + 4 * VOCABULARY)
    assert found.used_bytes == 3 * MATRIX + ENDS + found.graph_pool_bytes
    assert found.replicated_bytes == 4 * MATRIX + ENDS + found.graph_pool_bytes
    assert found.load_peak_bytes == 3 * MATRIX + ENDS
    assert found.staged_bytes == MATRIX + ENDS
    assert found.attach_peak_bytes == 4 * MATRIX + ENDS + 2 * MATRIX + MATRIX // 4


def test_requests() -> None:
    """Keys of three layers for 1000 tokens, and one layer's state."""
    found = ledger(planning_model())
    a_request = 3 * KV_BYTES * 1000 + STATE_BYTES
    assert (found.request_bytes, found.request_state_bytes) == (a_request, STATE_BYTES)
    assert found.sequences == (GIB - found.used_bytes) // a_request
    assert found.replicated_sequences == (GIB - found.replicated_bytes) // a_request
    assert found.sequences_gained == found.sequences - found.replicated_sequences > 0
    assert found.kv_tokens == (GIB - found.used_bytes) * 1000 // a_request
    assert abs(found.kv_tokens_gained - found.freed_bytes * 1000 / a_request) < 2


def test_a_draft_has_chunks_and_slots_of_its_own() -> None:
    alone, both = ledger(planning_model()), ledger(planning_model(draft=planning_model(2)))
    assert both.draft_slot_bytes == 2 * MATRIX
    assert both.slot_bytes == alone.slot_bytes
    assert both.gross_bytes == alone.gross_bytes + 2 * MATRIX
    assert both.chunk_bytes == alone.chunk_bytes + MATRIX // 2
    assert both.net_of_slots_bytes == alone.net_of_slots_bytes + 2 * MATRIX - MATRIX // 2 - 2 * MATRIX
    assert both.request_state_bytes == 2 * STATE_BYTES


def test_weights_that_do_not_fit() -> None:
    found = ledger(planning_model(), memory=MATRIX)
    assert found.for_requests_bytes < 0
    assert (found.sequences, found.sequences_gained, found.kv_tokens) == (0, 0, 0)
    between = ledger(planning_model(), memory=4 * MATRIX)  # only the plan leaves room
    assert between.replicated_sequences == 0 < between.sequences == between.sequences_gained


def test_a_model_without_caches_has_no_sequences() -> None:
    model = planning_model(1, kv=0)
    nothing = LayerFact(0, "none", "layers.0.proj")
    facts = ModelFacts(model.spec.name, model.facts.weights, (nothing,), 4096, VOCABULARY, 1, Deployment(4))
    found = ledger(PlanningModel(model.spec, facts))
    assert (found.request_bytes, found.sequences, found.kv_tokens) == (0, 0, 0)


@settings(max_examples=60, deadline=None)
@given(
    layers=st.integers(1, 6),
    world_size=st.integers(2, 9),
    depth=st.integers(0, 2),
    granularity=st.sampled_from([1, 4096, 2**21]),
    memory=st.integers(1, 4 * GIB),
    communicators=st.integers(0, 2**28),
)
def test_both_sides_agree_to_the_byte(
    layers: int, world_size: int, depth: int, granularity: int, memory: int, communicators: int
) -> None:
    """freed = replicated - used, and the three windows are what the runtime reserves."""
    model = planning_model(layers)
    overheads = Overheads(granularity, communicator_bytes=communicators)
    found = ledger(model, memory, overheads, world_size=world_size, prefetch_depth=depth)
    assert found.freed_bytes == found.replicated_bytes - found.used_bytes
    layout = layout_of(model.spec, world_size, prefetch_depth=depth)
    windows = found.chunk_bytes + found.slot_bytes + found.resident_bytes + found.rounding_bytes
    assert windows == layout.reserved_bytes(granularity)
    assert found.load_peak_bytes == windows + overheads.load_buffer_bytes
    staged = [sum(one.num_bytes for where in places_of(layout, r).values() for one in where) for r in range(world_size)]
    padding = 256 * (2 * len(layout.units) + len(layout.resident))  # of a rank: each weight's and each chunk's
    assert max(staged) <= found.staged_bytes <= max(staged) + padding
    assert found.sequences * found.request_bytes <= max(found.for_requests_bytes, 0)
    assert 0 <= found.kv_tokens - found.sequences * 1000 < 1000


def test_a_loads_stripes_are_the_loaders() -> None:
    assert Overheads().load_buffer_bytes == NUM_THREADS * WINDOW_BYTES


def test_rows_name_every_sum() -> None:
    found = ledger(planning_model(), overheads=Overheads())
    rows = {row.line: row for row in found.rows()}
    assert len(rows) == len(found.rows())
    value = {line: row.value for line, row in rows.items()}
    assert value["net of ranks"] == value["gross"] - value["chunks"]
    assert value["net of slots"] == value["net of ranks"] - value["slots"] - value["draft slots"]
    assert value["freed"] == value["net of slots"] - value["communicators"] - value["rounding"]
    assert value["for requests"] == value["memory"] - value["used"]
    assert rows["gross"].text == "128.0 MiB" and rows["sequences"].unit == "sequences"
    assert all(row.formula for row in rows.values())


def test_kimi_k3() -> None:
    """Published: 48.79 GiB gross, 42.7 saved at N = 8, two slots 1.17; states are 449 MB a request."""
    model = kimi_k3(Deployment(8, ep=16, weights="fp8"))
    layout = layout_of(model.spec, 8, include=model.facts.replicated)
    found = make_ledger(model, layout, [StepShape(64)], 180 * 10**9, 128_000)
    assert math.isclose(found.gross_bytes / GIB, 48.79, rel_tol=1e-3)
    assert math.isclose(found.net_of_ranks_bytes / GIB, 42.7, rel_tol=1e-3)
    assert math.isclose(found.slot_bytes / GIB, 1.168, rel_tol=1e-3)
    assert found.net_of_slots_bytes == found.net_of_ranks_bytes - 2 * 598 * 2**20
    assert found.rounding_bytes < 3 * 2 * 2**20
    assert math.isclose(found.request_state_bytes, 449.4e6, rel_tol=1e-3)
    assert found.request_kv_bytes == 24 * 576 * 2 * 128_000
    assert found.sequences_gained > 10
    assert [part.part for part in shardable_by_part(model)] == ["kda", "moe_periphery", "mla"]


def test_requests_that_make_no_sense() -> None:
    model = planning_model()
    layout = layout_of(model.spec)
    with pytest.raises(SpecError, match="both start at 1"):
        make_ledger(model, layout, [StepShape(1)], 0, 1000)
    with pytest.raises(SpecError, match="needs a step shape"):
        make_ledger(model, layout, [], GIB, 1000)
    with pytest.raises(SpecError, match="there is no draft model"):
        make_ledger(model, layout, [StepShape(1)], GIB, 1000, draft_layout=layout)
    with pytest.raises(SpecError, match="there is no draft layout"):
        make_ledger(planning_model(draft=model), layout, [StepShape(1)], GIB, 1000)
    with pytest.raises(SpecError, match="communicator_bytes is -1"):
        Overheads(communicator_bytes=-1)
    with pytest.raises(SpecError, match="granularity_bytes is 0"):
        Overheads(granularity_bytes=0)


def test_the_pool_is_the_largest_shape_of_the_largest_model() -> None:
    facts = planning_model().facts
    a_token = ACTIVATION_BYTES + 4 * VOCABULARY
    assert graph_pool_bytes([facts, facts], [StepShape(3, 5), StepShape(4)]) == 15 * a_token
    assert graph_pool_bytes([facts], [StepShape(4)], slack=0.5) == 6 * a_token
