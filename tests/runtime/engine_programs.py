"""What ranks do that are processes: a module of its own, since they load it."""

from __future__ import annotations

import torch
from server_modules import PLAN, checkpoint_of, load_all, prepare_server, server_model

from graphshard.comm.group import Group


def transported_rank(group: Group, transport: str) -> list[str]:
    parts, width = [40, 8, 9], 16
    model, whole = server_model(parts, width), server_model(parts, width, "cpu")
    tensors = checkpoint_of(whole)
    whole.load_state_dict(tensors)
    x = torch.ones(2, width)
    with torch.no_grad():
        expected = whole(x)
        prepared = prepare_server(model, group, parts)
        load_all(prepared, tensors, parts)
        with prepared.finalize(**PLAN, transport=transport):
            found = model(x)
            group.barrier()
    return [] if torch.equal(found, expected) else ["another result"]
