"""Python compiles and captures, C++ serves: `torchrun --nproc-per-node 2 serve_handle.py ./serve.so`.

serve_handle.cpp has the line that builds the library.
"""

import ctypes
import sys

import graphshard
from graphshard.models.config import LlamaConfig
from graphshard.models.llama import random_llama

TINY = LlamaConfig(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
)


def main(group: graphshard.Group, library: str) -> bool:
    """Decode eight tokens in C++, then in Python; whether they are the same."""
    model, weights = random_llama(TINY)  # every rank makes the same weights, and keeps its share
    with graphshard.compile(model, group, checkpoint=weights, capture_sizes=[1]) as runtime:
        step = runtime.graph(batch_size=1)
        served, expected = (ctypes.c_int64 * 8)(7), [7]
        handle = ctypes.c_uint64(step.handle)  # transport nccl wants step.promise_alike() first, and the promise kept
        status = ctypes.CDLL(library).serve(handle, served, ctypes.c_int64(len(served)))  # the GIL is released
        for position in range(len(served) - 1):
            step.inputs["tokens"].fill_(expected[-1])
            step.inputs["positions"].fill_(position)
            step.replay()
            step.synchronize()
            expected.append(int(step.outputs["logits"].argmax()))
    print(f"{group.prefix} status {status}, {list(served)}, as in Python: {list(served) == expected}")
    return status == 0 and list(served) == expected


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: torchrun --nproc-per-node 2 serve_handle.py ./serve.so")
    main(graphshard.init_group(), sys.argv[1])
