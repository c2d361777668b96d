"""SiTU, the gated activation of Kimi K3's MLPs and experts."""

from __future__ import annotations

import torch
from torch import Tensor


def situ(gate_up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """`beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta)`, in float32, then gate_up's dtype.

    `gate_up` is `[..., 2 * width]`, gates first; the result is `[..., width]`. For small values it is SiLU(gate) * up,
    and it never exceeds `beta * linear_beta`.

    Source: SituAndMul in the published modeling_kimi_linear.py; `situ_glu` in the documentation of Tenstorrent's ttnn
    and `situ` in that of NVIDIA NeMo Automodel state the same formula.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    limited = (up / linear_beta).tanh().mul_(linear_beta)
    return (gate / beta).tanh().mul_(torch.sigmoid(gate)).mul_(limited).mul_(beta).to(gate_up.dtype)
