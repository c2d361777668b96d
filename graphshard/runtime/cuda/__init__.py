"""Compute on a CUDA device: segments run by torch on our compute stream, captured by `torch.cuda.graph`."""

from graphshard.runtime.cuda.compute import CudaCompute
from graphshard.runtime.cuda.step import CapturedStep
from graphshard.runtime.cuda.torch_cuda import TorchCuda, VendorTorchCuda

__all__ = ["CapturedStep", "CudaCompute", "TorchCuda", "VendorTorchCuda"]
