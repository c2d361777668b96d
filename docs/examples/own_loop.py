"""A loop of one's own over sharded layers: `torchrun --nproc-per-node 2 docs/examples/own_loop.py`."""

import torch

import graphshard


def main(group: graphshard.Group) -> bool:
    """Run six layers of which this rank keeps its share; whether the result is what whole layers give."""
    seed = torch.Generator().manual_seed(0)  # every rank makes the same weights
    layers = torch.nn.ModuleList(torch.nn.Linear(512, 512) for _ in range(6))
    for parameter in layers.parameters():
        parameter.data.normal_(std=0.05, generator=seed)
    with torch.inference_mode():
        expected = x = torch.ones(2, 512)
        for layer in layers:
            expected = torch.relu(layer(expected))
        with graphshard.attach(layers, group, own_loop=True) as attached, attached.begin_step() as step:
            for i, layer in enumerate(layers):
                step.before_layer(i)  # from here on the layer's weights are whole
                x = torch.relu(layer(x))
                step.after_layer(i)  # from here on others use their memory
    print(f"{group.prefix} equal: {torch.equal(x, expected)}")
    return torch.equal(x, expected)


if __name__ == "__main__":
    main(graphshard.init_group())
