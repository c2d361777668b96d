"""Devices: what carries out a program. `open_device` gives the one asked for, or says why it cannot."""

from graphshard.device.base import Device
from graphshard.device.cuda import CudaDevice
from graphshard.device.host import HostDevice
from graphshard.device.open import open_device

__all__ = ["CudaDevice", "Device", "HostDevice", "open_device"]
