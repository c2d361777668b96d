"""A checkpoint: tensors by name over one safetensors file, or over a folder's files and their index."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from graphshard.core.errors import LoadError
from graphshard.core.specs import WeightSpec
from graphshard.load.safetensors_file import SafetensorsFile, TensorEntry

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


class Checkpoint:
    """Weights on disk. Every header is checked when the checkpoint is opened; bytes are read when they are used."""

    def __init__(self, path: Path) -> None:
        """Open `path`: a safetensors file, an index file, or a folder with either.

        Raises:
            LoadError: there is none, or a file is truncated or malformed.
        """
        self.path = path
        file = _find(path)
        self._files = _open_index(file) if file.suffix == ".json" else _open_one(file)

    @property
    def entries(self) -> dict[str, TensorEntry]:
        """All tensors by name."""
        return {name: file.entries[name] for name, file in self._files.items()}

    def entry(self, name: str) -> TensorEntry:
        """Where the tensor `name` lies in its file.

        Raises:
            LoadError: there is none; names near to it are listed.
        """
        return self._file(name).entries[name]

    def read(self, spec: WeightSpec) -> memoryview:
        """The `spec.num_bytes` bytes of a weight: a view of the mapped file, not a copy.

        Raises:
            LoadError: it is missing, or has another dtype or shape.
        """
        file = self._file(spec.name)
        entry = file.entries[spec.name]
        if entry.dtype != spec.dtype or entry.shape != spec.shape:
            raise LoadError(
                f"weight {spec.name} is {entry.dtype}{_shape(entry.shape)} in {file.path}, "
                f"the model asks for {spec.dtype}{_shape(spec.shape)}: give the checkpoint of this model's config.json"
            )
        if spec.strides is not None:
            raise LoadError(
                f"weight {spec.name} has strides {spec.strides}, and checkpoints hold contiguous tensors only"
            )
        return file.read(spec.name)

    def check(self, specs: Iterable[WeightSpec]) -> None:
        """Raise for the first weight that `read` would refuse, before anything is reserved for it.

        Raises:
            LoadError: as `read`.
        """
        for spec in specs:
            self.read(spec)

    def identity(self) -> str:
        """Device, inode, size and time of change of each file: equal for the very same files."""
        stats = [os.stat(path) for path in sorted({str(file.path) for file in self._files.values()})]
        return " ".join(f"{s.st_dev}:{s.st_ino}:{s.st_size}:{s.st_mtime_ns}" for s in stats)

    def _file(self, name: str) -> SafetensorsFile:
        file = self._files.get(name)
        if file is None:
            near = difflib.get_close_matches(name, self._files, n=3)
            hint = f"near it are {', '.join(near)}" if near else f"none of its {len(self._files)} names is near"
            raise LoadError(f"weight {name} is not in {self.path}: {hint}")
        return file


def _find(path: Path) -> Path:
    """The safetensors or index file that `path` means."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise LoadError(f"no checkpoint at {path}: there is no such file or folder")
    for name in (INDEX_NAME, SINGLE_NAME):
        if (path / name).is_file():
            return path / name
    found = sorted(path.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    what = f"{len(found)} safetensors files and no {INDEX_NAME}" if found else f"neither {SINGLE_NAME} nor {INDEX_NAME}"
    raise LoadError(f"no checkpoint in {path}: it holds {what}; give the file itself")


def _open_one(path: Path) -> dict[str, SafetensorsFile]:
    file = SafetensorsFile(path)
    return dict.fromkeys(file.entries, file)


def _open_index(path: Path) -> dict[str, SafetensorsFile]:
    """Files by tensor name, as the index says, each checked to hold what the index promises."""
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        names = {str(name): str(file) for name, file in weight_map.items()}
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise LoadError(
            f"{path} is not an index: it has no JSON object weight_map from tensor names to files"
        ) from None
    files = {}
    for file in sorted(set(names.values())):
        if Path(file).name != file:
            raise LoadError(f"{path} names the file {file!r}, which does not lie beside it")
        files[file] = SafetensorsFile(path.parent / file)
    for name, file in names.items():
        if name not in files[file].entries:
            raise LoadError(f"weight {name} is not in {files[file].path}, where {path.name} says it is")
    return {name: files[file] for name, file in names.items()}


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"
