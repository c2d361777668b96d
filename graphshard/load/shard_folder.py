"""A folder of shard files, replaced as a whole: the manifest is renamed into place last, and names all that counts.

Files of a save carry the digest of its manifest in their names, so an unfinished save lies beside the finished one
before it and changes nothing of it. What no manifest names any more is removed when a save has ended.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from graphshard.core.errors import LoadError, SpecError
from graphshard.load.atomic_file import PART_SUFFIX, AtomicFile, cannot_write
from graphshard.load.checkpoint import INDEX_NAME, SINGLE_NAME
from graphshard.load.shard_manifest import MANIFEST_NAME, ShardManifest, read_manifest

_CHECKPOINT_NAMES = (INDEX_NAME, SINGLE_NAME)

_OURS = re.compile(
    rf"shard-\d{{5}}-of-\d{{5}}\.[0-9a-f]{{16}}\.safetensors(\.[0-9a-f]{{8}}{re.escape(PART_SUFFIX)})?"
    rf"|{re.escape(MANIFEST_NAME)}\.[0-9a-f]{{8}}{re.escape(PART_SUFFIX)}"
)


@dataclass(frozen=True)
class ShardFolder:
    """A folder of shard files, and what its manifest says."""

    path: Path
    manifest: ShardManifest


def find_shards(path: Path) -> ShardFolder | None:
    """The shard files that `path`, a folder or a manifest, means; None if it means something else.

    Raises:
        LoadError: the manifest is damaged or missing beside shard files, a checkpoint lies beside it, or `path` is one
            rank's file.
    """
    try:
        return _find_shards(path)
    except OSError as error:
        raise LoadError(f"no checkpoint at {path}: it cannot be looked at ({error.strerror})") from None


def _find_shards(path: Path) -> ShardFolder | None:
    if _OURS.fullmatch(path.name) and path.is_file():
        raise LoadError(f"{path} is the shard file of one rank: give its folder, {path.parent}, as the checkpoint")
    if path.name == MANIFEST_NAME:
        return ShardFolder(path.parent, read_manifest(path.parent)) if path.is_file() else None
    beside = [name for name in _CHECKPOINT_NAMES if (path / name).is_file()]
    if not (path / MANIFEST_NAME).is_file():
        if beside or not path.is_dir() or not any(_OURS.fullmatch(one.name) for one in path.iterdir()):
            return None
    elif beside:
        raise LoadError(
            f"{path} holds shard files and a checkpoint: give {path / MANIFEST_NAME} or {path / beside[0]}, whichever "
            "is meant"
        )
    return ShardFolder(path, read_manifest(path))


def open_folder(folder: Path) -> os.stat_result:
    """Make `folder` one that shard files may be saved to; what the system says it is.

    Raises:
        SpecError: it is a file, or a checkpoint lies there: loading the folder would be ambiguous.
        DeviceError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = [name for name in _CHECKPOINT_NAMES if (folder / name).exists()]
        stat = folder.stat()
    except ValueError as error:
        raise SpecError(f"shard files cannot be saved to {str(folder)!r}: {error}; give a folder") from None
    except (FileExistsError, NotADirectoryError):
        raise SpecError(
            f"shard files cannot be saved to {folder}: there is a file of that name; give a folder"
        ) from None
    except OSError as error:
        raise cannot_write(folder, error) from None
    if found:
        raise SpecError(
            f"shard files cannot be saved to {folder}: {found[0]} lies there, and whoever loads this folder could not "
            "tell which is meant; give a folder of its own"
        )
    return stat


def commit_manifest(folder: Path, manifest: ShardManifest) -> None:
    """Make the files of `manifest`, which all lie in `folder`, what the folder holds.

    Raises:
        DeviceError: it cannot be written; the folder holds what it held.
    """
    text = manifest.text().encode()
    with AtomicFile(folder / MANIFEST_NAME) as file:
        file.write(0, text)
        file.commit()


def remove_strays(folder: Path, rank: int | None = None) -> list[str]:
    """Remove shard files (of `rank`, if given) that the folder's manifest does not name; all, if there is none.

    Nothing else is touched. Returns what could not be removed: it is in nobody's way.
    """
    try:
        manifest = read_manifest(folder)
        named = {manifest.file_name(one) for one in range(manifest.world_size)}
    except LoadError:
        if (folder / MANIFEST_NAME).exists():
            return []  # whatever it says, it may be all that tells somebody which files are whole
        named = set()
    own = "" if rank is None else f"shard-{rank:05d}-of-"
    left = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if _OURS.fullmatch(path.name) and path.name.startswith(own) and path.name not in named:
            try:
                path.unlink(missing_ok=True)
            except OSError:
                left.append(path.name)
    return left
