"""Dequantising, one function a storage format: what a kernel that reads such weights is held against; and FP8 made."""

from __future__ import annotations

from graphshard.runtime.weights.formats import (
    dequantize_blocks,
    dequantize_float,
    dequantize_int4,
    dequantize_mxfp4,
    dequantize_nvfp4,
    dequantize_per_channel,
    dequantize_per_part,
    dequantize_per_tensor,
)
from graphshard.runtime.weights.quantize import fp8_scale, quantize_fp8

__all__ = [
    "dequantize_blocks",
    "dequantize_float",
    "dequantize_int4",
    "dequantize_mxfp4",
    "dequantize_nvfp4",
    "dequantize_per_channel",
    "dequantize_per_part",
    "dequantize_per_tensor",
    "fp8_scale",
    "quantize_fp8",
]
