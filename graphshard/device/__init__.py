"""Devices: what carries out a program. `open_device` gives the one asked for, or says why it cannot."""

from graphshard.device.base import Device, open_device
from graphshard.device.host import HostDevice

__all__ = ["Device", "HostDevice", "open_device"]
