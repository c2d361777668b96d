"""Small models with facts, and machines with round numbers, for tests of the cost model."""

from __future__ import annotations

import random
from dataclasses import replace

from graphshard.core.specs import DeviceSpec, ModelSpec, SegmentSpec, WeightSpec
from graphshard.cost.deployment import Deployment
from graphshard.cost.facts import LayerFact, ModelFacts, WeightFact
from graphshard.cost.hardware import HardwareSpec, Link

CUDA = DeviceSpec("cuda", "test", 2**40, 4096)


def machine(**changes: object) -> HardwareSpec:
    """1 GB/s of memory and link, 1 TFLOP/s, nothing slower beside anything."""
    plain = HardwareSpec(
        name="round",
        kind="cuda",
        memory_bytes=2**34,
        memory_bytes_per_s=1e9,
        memory_efficiency=1.0,
        links=(Link("pull", 0.4e9, 3.0), Link("nccl", 0.4e9, 5.0)),
        derate=(),
        activation_bytes_per_s=1e9,
        activation_t0_us=1.0,
        peak_flops=(("bfloat16", 1e12), ("float32", 1e12)),
        gemm_efficiency=1.0,
        kernel_us=1.0,
        launch_us=5.0,
        launch_us_per_node=0.5,
        max_domain=64,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def layered_model(sizes: list[list[int]], reads: list[list[list[int]]] | None = None) -> tuple[ModelSpec, ModelFacts]:
    """Layer i has weights of `sizes[i]` rows (32 columns); segment j of it reads the weights `reads[i][j]`.

    None: each weight has a segment of its own.
    """
    weights: list[WeightSpec] = []
    segments: list[SegmentSpec] = []
    facts: list[WeightFact] = []
    for layer, rows in enumerate(sizes):
        for number, n in enumerate(rows):
            name = f"layers.{layer}.w{number}.weight"
            weights.append(WeightSpec(name, (n, 32), "bfloat16"))
            facts.append(fact_of(name, f"layers.{layer}", n, 32))
        for number, members in enumerate(reads[layer] if reads else [[i] for i in range(len(rows))]):
            names = tuple(f"layers.{layer}.w{member}.weight" for member in members)
            segments.append(SegmentSpec(f"s{number}", layer, names))
    spec = ModelSpec("small", tuple(weights), tuple(segments))
    layers = tuple(LayerFact(layer, "none", "") for layer in range(len(sizes)))
    return spec, ModelFacts("small", tuple(facts), layers, 32, 0, 0, Deployment(world_size=2))


def fact_of(name: str, block: str, n: int, k: int) -> WeightFact:
    return WeightFact(name, "mlp", block, n, k, "bfloat16", "rank", "column", True, "replicated")


def random_small_model(seed: int, num_weights: int) -> tuple[ModelSpec, ModelFacts]:
    """`num_weights` over a few layers, of unlike sizes; some segments read two weights, some read none."""
    generator = random.Random(seed)
    sizes: list[list[int]] = []
    reads: list[list[list[int]]] = []
    left = num_weights
    while left:
        count = min(left, generator.randrange(1, 4))
        left -= count
        sizes.append([generator.choice([8, 16, 16, 40, 100, 250]) for _ in range(count)])
        layer: list[list[int]] = []
        for weight in range(count):
            if layer and generator.random() < 0.2:
                layer[-1].append(weight)
            else:
                layer.append([weight])
            if generator.random() < 0.3:
                layer.append([])
        reads.append(layer)
    return layered_model(sizes, reads)
