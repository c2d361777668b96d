"""Attaching: any module with a list of layers, sharded in place."""

from graphshard.runtime.attach.attached import Attached, attach_module, ways_to_call

__all__ = ["Attached", "attach_module", "ways_to_call"]
