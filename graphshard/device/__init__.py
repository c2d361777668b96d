"""Devices: what carries out a program. `open_device` gives the one asked for, or says why it cannot."""

from graphshard.device.as_libcuda import host_driver_environment
from graphshard.device.base import Device
from graphshard.device.cuda import CudaDevice
from graphshard.device.host import HostDevice
from graphshard.device.open import open_device

__all__ = ["CudaDevice", "Device", "HostDevice", "host_driver_environment", "open_device"]
