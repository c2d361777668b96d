"""Ranks: how they find each other, what they agree on, and how one reads another's memory."""

from graphshard.comm.group import Group, LocalGroup
from graphshard.comm.rendezvous import init_group

__all__ = ["Group", "LocalGroup", "init_group"]
