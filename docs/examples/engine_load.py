"""A server's loading code over placeholders: no rank ever holds a whole weight of its layers.

    torchrun --nproc-per-node 2 docs/examples/engine_load.py

Merged q, k, v arrive part by part and become FP8 on each rank's rows.
"""

import torch
from torch import nn

import graphshard
from graphshard.formats import fp8_scale, quantize_fp8

ROWS = {"q": 256, "k": 64, "v": 64}


class _MergedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(sum(ROWS.values()), 256), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (x @ (self.weight.float() * self.weight_scale).t()).split(list(ROWS.values()), dim=-1)
        return torch.tanh(q + torch.cat([k, v, k, v], dim=-1))

    def to_fp8(self, amax: torch.Tensor) -> None:
        self.weight_scale = nn.Parameter(fp8_scale(amax, "float8_e4m3fn"), requires_grad=False)
        self.weight.data = quantize_fp8(self.weight.data, self.weight_scale, "float8_e4m3fn")


def main(group: graphshard.Group) -> bool:
    """Whether the loaded, quantised and sharded module computes what one with whole weights does."""
    whole = nn.Sequential(_MergedLinear(), _MergedLinear())  # to compare with
    with torch.device("meta"):  # parameters as a server makes them, without memory
        model = nn.Sequential(_MergedLinear(), _MergedLinear())
    prepared = graphshard.prepare(model, group, layers="", blocks={"*.weight": ROWS})
    for name, layer in model.named_children():
        weight = torch.randn(sum(ROWS.values()), 256, generator=torch.Generator().manual_seed(int(name)))
        for shard_id, part in zip(ROWS, weight.split(list(ROWS.values())), strict=True):
            layer.weight.weight_loader(layer.weight, part, shard_id)  # keeps this rank's rows
        layer.to_fp8(prepared.combined_amax(f"{name}.weight"))  # of these rows, with the scale of all
        whole[int(name)].weight.data = weight
        whole[int(name)].to_fp8(weight.abs().max().reshape(1))
    attached = prepared.finalize()
    print(attached.report() if group.rank == 0 else "", end="")
    with torch.inference_mode():
        equal = torch.equal(model(torch.ones(1, 256)), whole(torch.ones(1, 256)))
    print(f"{group.prefix} equal: {equal}")
    return equal


if __name__ == "__main__":
    main(graphshard.init_group())
