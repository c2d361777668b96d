"""Writing a safetensors file tensor by tensor, so that no more than one has to be in memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from graphshard.core.errors import LoadError
from graphshard.core.sizes import align_up
from graphshard.core.specs import WeightSpec
from graphshard.load.safetensors_file import TORCH_DTYPES

_FORMAT_DTYPES = {torch_name: name for name, torch_name in TORCH_DTYPES.items()}


def write_safetensors(
    path: Path,
    specs: Sequence[WeightSpec],
    data: Iterable[bytes | bytearray | memoryview],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write the contiguous tensors `specs`, whose bytes `data` yields in the same order.

    Raises:
        LoadError: a dtype that the format has no name for, or bytes that do not fit a spec.
    """
    header = safetensors_header(path, specs, metadata)
    with path.open("wb") as file:
        file.write(header)
        for spec, piece in zip(specs, data, strict=True):
            num_bytes = memoryview(piece).nbytes
            if num_bytes != spec.num_bytes:
                raise LoadError(f"{path}: tensor {spec.name} needs {spec.num_bytes} bytes, {num_bytes} were given")
            file.write(piece)


def _header_shape(path: Path, spec: WeightSpec) -> list[int]:
    """The shape as the format counts: packed pairs are two values each."""
    if spec.dtype != TORCH_DTYPES["F4"]:
        return list(spec.shape)
    if not spec.shape:
        raise LoadError(f"{path}: tensor {spec.name} is one packed pair without a dimension; give it shape (1,)")
    return [*spec.shape[:-1], 2 * spec.shape[-1]]


def safetensors_header(
    path: Path, specs: Sequence[WeightSpec], metadata: Mapping[str, str] | None = None, alignment_bytes: int = 64
) -> bytes:
    """The bytes before the first tensor of a file that will be `path`: the tensors `specs` lie end to end after them.

    Padded to a multiple of `alignment_bytes`, with which the first tensor starts.

    Raises:
        LoadError: a dtype that the format has no name for.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for spec in specs:
        if spec.dtype not in _FORMAT_DTYPES:
            raise LoadError(f"{path}: the format has no dtype {spec.dtype} (tensor {spec.name}); use uint8")
        header[spec.name] = {
            "dtype": _FORMAT_DTYPES[spec.dtype],
            "shape": _header_shape(path, spec),
            "data_offsets": [end, end + spec.num_bytes],
        }
        end += spec.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(align_up(8 + len(text), alignment_bytes) - 8)
    return len(text).to_bytes(8, "little") + text
