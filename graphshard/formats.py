"""Dequantising, one function a storage format: what a kernel that reads such weights is held against."""

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

__all__ = [
    "dequantize_blocks",
    "dequantize_float",
    "dequantize_int4",
    "dequantize_mxfp4",
    "dequantize_nvfp4",
    "dequantize_per_channel",
    "dequantize_per_part",
    "dequantize_per_tensor",
]
