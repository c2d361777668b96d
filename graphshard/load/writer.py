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
_DATA_ALIGNMENT_BYTES = 64


def write_safetensors(
    path: Path,
    specs: Sequence[WeightSpec],
    data: Iterable[bytes | bytearray | memoryview],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write the contiguous tensors `specs`, whose bytes `data` yields in the same order.

    The header is padded so that the first tensor starts at a multiple of 64 bytes.

    Raises:
        LoadError: a dtype that the format has no name for, or bytes that do not fit a spec.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for spec in specs:
        if spec.dtype not in _FORMAT_DTYPES:
            raise LoadError(f"{path}: the format has no dtype {spec.dtype} (tensor {spec.name}); use uint8")
        header[spec.name] = {
            "dtype": _FORMAT_DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [end, end + spec.num_bytes],
        }
        end += spec.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(align_up(8 + len(text), _DATA_ALIGNMENT_BYTES) - 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for spec, piece in zip(specs, data, strict=True):
            num_bytes = memoryview(piece).nbytes
            if num_bytes != spec.num_bytes:
                raise LoadError(f"{path}: tensor {spec.name} needs {spec.num_bytes} bytes, {num_bytes} were given")
            file.write(piece)
