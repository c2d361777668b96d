"""A transformers model with sharded layers, its code unchanged.

    torchrun --nproc-per-node 2 docs/examples/attach_transformers.py

The model is small and random, so that nothing is downloaded; `from_pretrained` is used the same way.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import graphshard

CONFIG = LlamaConfig(
    vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8, eos_token_id=511
)


def random_model() -> LlamaForCausalLM:
    """The same weights on every rank."""
    seed = torch.Generator().manual_seed(0)
    model = LlamaForCausalLM(CONFIG).eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.05, generator=seed)
    return model


def main(group: graphshard.Group) -> bool:
    """Generate before, while and after the layers are sharded; whether all tokens are equal."""
    model, prompt = random_model(), torch.tensor([[1, 2, 3]])
    whole = model.generate(prompt, max_new_tokens=8, do_sample=False)

    attached = graphshard.attach(model, group)
    if group.rank == 0:
        print(attached.report())
    sharded = model.generate(prompt, max_new_tokens=8, do_sample=False)
    state = model.state_dict()  # gathered, right bytes: save_pretrained works too

    attached.detach()
    again = model.generate(prompt, max_new_tokens=8, do_sample=False)
    right = all(torch.equal(state[name], parameter) for name, parameter in model.named_parameters())
    equal = torch.equal(whole, sharded) and torch.equal(whole, again) and right
    print(f"{group.prefix} tokens {sharded[0].tolist()} equal: {equal}")
    return equal


if __name__ == "__main__":
    main(graphshard.init_group())
