"""A rank that maps its peer's window, and holds it until it is killed."""

from __future__ import annotations

import signal

from graphshard.comm.group import Group
from graphshard.comm.windows import WindowTable
from graphshard.device import open_device


def hold_a_peers_window(group: Group, fifo: str) -> None:
    device = open_device("host")
    table = WindowTable(device, group)
    table.register({"held": device.allocate(8192, exportable=True)})
    group.barrier()
    if group.rank == 0:
        with open(fifo, "w") as said:
            said.write("held")
    while True:
        signal.pause()
