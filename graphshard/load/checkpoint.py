"""A checkpoint: a tensor store over one safetensors file, or over a folder's files and their index."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path

from graphshard.core.counts import some_of
from graphshard.core.errors import LoadError
from graphshard.load.safetensors_file import FileTensor, SafetensorsFile, kind_of, unique_pairs

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


class Checkpoint:
    """Tensors on disk. Every header is checked when the checkpoint is opened; bytes are read when they are asked for.

    Nothing is kept by path: what is opened later reads the files as they are then.
    """

    def __init__(self, path: Path) -> None:
        """Open `path`: a safetensors file, an index file, or a folder with either.

        Raises:
            LoadError: there is none, a file is missing, truncated or malformed, or files and index disagree.
        """
        self.path = path
        file = _find(path)
        self._files = _open_index(file) if file.suffix == ".json" else _open_one(file)
        self._entries = {name: one.entries[name] for name, one in self._files.items()}
        self._lock = threading.Lock()
        self._num_bytes_read = 0

    @property
    def where(self) -> str:
        """See TensorStore."""
        return str(self.path)

    @property
    def entries(self) -> Mapping[str, FileTensor]:
        """See TensorStore; with where each begins in its file."""
        return self._entries

    def read_into(self, name: str, begin: int, out: memoryview) -> None:
        """See TensorStore."""
        entry = self._entries[name]
        assert 0 <= begin <= begin + len(out) <= entry.num_bytes, (name, begin, len(out), entry)
        self._files[name].read_into(entry.begin + begin, out)
        with self._lock:
            self._num_bytes_read += len(out)

    def identity(self) -> str:
        """See TensorStore. Device, inode, size and time of change of each file."""
        return " ".join(file.identity() for file in self._each_file())

    def release(self, names: Iterable[str]) -> None:
        """See TensorStore. Nothing is kept of what was read."""

    @property
    def num_bytes_read(self) -> int:
        """See TensorStore."""
        return self._num_bytes_read

    def close(self) -> None:
        """Close the files. Idempotent."""
        for file in self._each_file():
            file.close()

    def _each_file(self) -> list[SafetensorsFile]:
        return sorted(set(self._files.values()), key=lambda file: file.path)


def _find(path: Path) -> Path:
    """The safetensors or index file that `path` means."""
    try:
        if path.is_file():
            return path
        if not path.is_dir():
            what = f"it is {kind_of(path.stat())}" if path.exists() else "there is no such file or folder"
            raise LoadError(f"no checkpoint at {path}: {what}")
        for name in (INDEX_NAME, SINGLE_NAME):
            if (path / name).is_file():
                return path / name
        found = sorted(path.glob("*.safetensors"))
    except OSError as error:
        raise LoadError(f"no checkpoint at {path}: it cannot be looked at ({error.strerror})") from None
    if len(found) == 1:
        return found[0]
    what = f"{len(found)} safetensors files and no {INDEX_NAME}" if found else f"neither {SINGLE_NAME} nor {INDEX_NAME}"
    way = "give the file itself" if found else "give the folder that has the weights"
    raise LoadError(f"no checkpoint in {path}: it holds {what}; {way}")


def _open_one(path: Path) -> dict[str, SafetensorsFile]:
    file = SafetensorsFile(path)
    return dict.fromkeys(file.entries, file)


def _open_index(path: Path) -> dict[str, SafetensorsFile]:
    """Files by tensor name, as the index says; index and files hold the same tensors, each once."""
    try:
        index = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique_pairs)
        names = {str(name): str(file) for name, file in index["weight_map"].items()}
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = f" ({error})" if isinstance(error, ValueError) else ""
        raise LoadError(
            f"{path} is not an index: it has no JSON object weight_map from tensor names to files{why}"
        ) from None
    wanted = sorted(set(names.values()))
    elsewhere = [file for file in wanted if Path(file).name != file]
    if elsewhere:
        raise LoadError(f"{path} names {elsewhere[0]!r}, which does not lie beside it: give plain names of files")
    missing = [file for file in wanted if not (path.parent / file).is_file()]
    if missing:
        raise LoadError(
            f"{path} names {len(wanted)} files, of which {len(missing)} are not beside it: {some_of(missing)}; "
            "download them again"
        )
    with ExitStack() as opened:
        files = {file: opened.enter_context(closing(SafetensorsFile(path.parent / file))) for file in wanted}
        _check_index(path, names, files)
        opened.pop_all()
    return {name: files[file] for name, file in names.items()}


def _check_index(path: Path, names: Mapping[str, str], files: Mapping[str, SafetensorsFile]) -> None:
    """LoadError with all that index and files disagree about."""
    absent = [f"{name} in {file}" for name, file in names.items() if name not in files[file].entries]
    holders: dict[str, list[str]] = {}
    for file, opened in files.items():
        for name in opened.entries:
            holders.setdefault(name, []).append(file)
    twice = [f"{name} in {' and '.join(where)}" for name, where in holders.items() if len(where) > 1]
    unnamed = [f"{name} in {where[0]}" for name, where in holders.items() if name not in names]
    found = [
        f"{what}: {some_of(which)}"
        for what, which in (
            ("named by the index, not held", absent),
            ("held by two files", twice),
            ("held, not named by the index", unnamed),
        )
        if which
    ]
    if found:
        raise LoadError(f"{path} and its files disagree: {'; '.join(found)}. Download the checkpoint again")
