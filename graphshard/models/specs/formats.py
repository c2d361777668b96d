"""In which dtype a weight is kept: as the config says, or as `--weights` asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphshard.core.errors import SpecError
from graphshard.core.sizes import dtype_bits
from graphshard.cost.deployment import WeightFormat
from graphshard.models.specs.part import Part

FP8 = "float8_e4m3fn"
MXFP4 = "float4_e2m1fn_x2"
MXFP4_SCALE = "float8_e8m0fnu"
MXFP4_BLOCK = 32
"""Values that share a scale."""
WIDE = ("float32", "float16", "bfloat16")
METHODS = ("fp8", "mxfp4")
"""Known values of `quantization_config.quant_method`."""


def stored_format(values: Mapping[str, Any], asked: WeightFormat, where: str) -> str:
    """`fp8`, `mxfp4`, or empty: how the checkpoint of the config `values` keeps its large weights.

    Scales of FP8 blocks are not counted (one float32 for 128 x 128 values: 0.02 % of the bytes); those of MXFP4 are.

    Raises:
        SpecError: a quantisation that is not known, unless `asked` replaces it.
    """
    quantisation = values.get("quantization_config")
    if quantisation is None:
        return ""
    method = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else quantisation
    if method in METHODS:
        return str(method)
    if asked != "config":
        return ""
    raise SpecError(
        f"{where}: quantization_config.quant_method is {method!r}, known are {', '.join(METHODS)}: "
        "say how the weights will be kept with --weights fp8 or --weights bf16"
    )


def kept_dtype(part: Part, asked: WeightFormat) -> str:
    """The dtype of `part` under `--weights`: large matrices become FP8; what is narrower already stays as it is."""
    if asked == "config" or part.dtype not in (*WIDE, FP8):
        return part.dtype
    if asked == "fp8" and part.is_large:
        return FP8
    if dtype_bits(part.dtype) == 32 and not part.is_large and part.role in ("router", "other"):
        return part.dtype  # routers, decays and convolutions are float32 on purpose
    return "bfloat16"
