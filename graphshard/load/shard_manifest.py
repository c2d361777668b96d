"""The manifest of a folder of shard files: what is in them, for whoever loads or reshards them.

    {"format": "graphshard-shards-1", "digest": "5f1d...", "model": "llama", "world_size": 2, "epoch": 0,
     "alignment_bytes": 256, "weights": [["embed", "float32", [8, 4], null], ...],
     "units": [["layers.0", ["layers.0.q", ...]], ...], "chunks": [["01ab...", ...], ...], "resident": ["77f0...", ...]}

and, where there are any, "blocks": [1, 3], the units whose weights are a block's, and "sliced": [1], those of them that
lie in slices. Over another number of ranks other blocks may. "rows": ["layers.0.down"] are the weights that the model's
blocks store [in, out], whether sliced or not: a square one looks the same the other way round.

Its digest stands in every file and in every file's name, so what belongs together is known without a look at the
bytes. It depends on the bytes and on where they lie, not on slots, depths or step shapes: those are a runtime's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from graphshard.core.errors import LoadError, SpecError
from graphshard.core.layout import Layout, build_layout
from graphshard.core.plan import Plan, Unit
from graphshard.core.slices import why_not_sliced
from graphshard.core.specs import ModelSpec, WeightSpec
from graphshard.core.text import digest_of
from graphshard.load.safetensors_file import kind_of

MANIFEST_NAME = "shards.json"
FORMAT = "graphshard-shards-1"
AGAIN = "copy the folder again as a whole, or load the checkpoint and save the shards again"
"""What to do about files that are not what was written."""


@dataclass(frozen=True)
class ShardManifest:
    """What all ranks' shard files hold."""

    model: str
    world_size: int
    epoch: int
    alignment_bytes: int
    weights: tuple[WeightSpec, ...]
    units: tuple[Unit, ...]
    chunks: tuple[tuple[int, ...], ...]
    """Checksums by rank, then by unit."""
    resident: tuple[int, ...]
    """Checksums by weight, in the order of `layout.resident`."""
    blocks: tuple[int, ...] = ()
    """Units that lie in slices wherever their weights can be sliced."""
    rows: tuple[str, ...] = ()
    """Weights that the model's blocks store [in, out]."""

    @staticmethod
    def of(model: ModelSpec, plan: Plan, epoch: int) -> ShardManifest:
        """What is known before the bytes are."""
        blocks = {block.weights for block in model.blocks} if plan.modes else set()
        return ShardManifest(
            model=model.name,
            world_size=plan.world_size,
            epoch=epoch,
            alignment_bytes=plan.alignment_bytes,
            weights=model.owned,
            units=plan.units,
            chunks=(),
            resident=(),
            blocks=tuple(unit.index for unit in plan.units if unit.is_sliced or unit.weights in blocks),
            rows=rows_of(model),
        )

    def over(self, world_size: int) -> ShardManifest:
        """The manifest of the same weights over `world_size` ranks, without checksums of chunks."""
        weights = {weight.name: weight for weight in self.weights}
        units = [
            replace(unit, is_sliced=not why_not_sliced([weights[name] for name in unit.weights], world_size))
            if unit.index in self.blocks
            else unit
            for unit in self.units
        ]
        return replace(self, world_size=world_size, units=tuple(units), chunks=())

    @cached_property
    def layout(self) -> Layout:
        """Where each byte lies; there are no slots."""
        plan = Plan(
            model=self.model,
            world_size=self.world_size,
            decisions=(),
            units=self.units,
            residencies=(),
            num_slots=0,
            prefetch_depth=0,
            head="inside",
            transport="pull",
            executor="cooperative",
            step_shapes=(),
            unit_policy="placed",
            alignment_bytes=self.alignment_bytes,
        )
        return build_layout(ModelSpec(self.model, self.weights, ()), plan)

    @cached_property
    def layout_digest(self) -> str:
        """The digest of `layout`."""
        return self.layout.digest

    @cached_property
    def model_digest(self) -> str:
        """The digest of the weights' specs: segments are no matter of bytes."""
        return ModelSpec(self.model, self.weights, ()).digest

    @cached_property
    def digest(self) -> str:
        """The sha256 of all that the manifest says."""
        return digest_of(json.dumps(self._content(), sort_keys=True, separators=(",", ":")))

    def has_layout(self, layout: Layout) -> bool:
        """Whether `layout`, a runtime's, keeps its bytes where the files have them; its slots do not matter."""
        return replace(layout, slots=(), slot_bytes=0).digest == self.layout_digest

    def file_name(self, rank: int) -> str:
        """`shard-00003-of-00008.5f1d0a2b3c4d5e6f.safetensors`: files of two saves never have one name."""
        return f"shard-{rank:05d}-of-{self.world_size:05d}.{self.digest[:16]}.safetensors"

    def metadata(self, rank: int) -> dict[str, str]:
        """What rank `rank`'s file says of itself. As long before the checksums are known as after."""
        return {
            "format": FORMAT,
            "rank": str(rank),
            "world_size": str(self.world_size),
            "epoch": str(self.epoch),
            "layout": self.layout_digest,
            "model": self.model_digest,
            "manifest": self.digest,
            "chunks": " ".join(map(_hex, self.chunks[rank] if self.chunks else [0] * len(self.units))),
            "resident": " ".join(map(_hex, self.resident or [0] * len(self.layout.resident))),
        }

    def text(self) -> str:
        """The manifest as JSON."""
        return json.dumps({"format": FORMAT, "digest": self.digest, **self._content()}, indent=1) + "\n"

    def _content(self) -> dict[str, Any]:
        sliced = [unit.index for unit in self.units if unit.is_sliced]
        return {
            "model": self.model,
            "world_size": self.world_size,
            "epoch": self.epoch,
            "alignment_bytes": self.alignment_bytes,
            "weights": [[w.name, w.dtype, list(w.shape), _listed(w.strides)] for w in self.weights],
            "units": [[unit.name, list(unit.weights)] for unit in self.units],
            "chunks": [list(map(_hex, checksums)) for checksums in self.chunks],
            "resident": list(map(_hex, self.resident)),
            **({"blocks": list(self.blocks), "sliced": sliced} if self.blocks else {}),
            **({"rows": list(self.rows)} if self.rows else {}),
        }


def rows_of(model: ModelSpec) -> tuple[str, ...]:
    """The weights that blocks of `model` store [in, out], in order."""
    return tuple(name for block in model.blocks for name in block.rows)


def read_manifest(folder: Path) -> ShardManifest:
    """The manifest in `folder`.

    Raises:
        LoadError: there is none, or it is not what was written.
    """
    path = folder / MANIFEST_NAME
    try:
        if path.exists() and not path.is_file():
            raise LoadError(f"{path} cannot be read: it is {kind_of(path.stat())}, not a file; {AGAIN}")
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LoadError(
            f"no shard files in {folder}: there is no {MANIFEST_NAME}, which is written last. A save that did not end "
            "leaves none: save again, or load the checkpoint"
        ) from None
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"it is not JSON ({error})") from None
    if not isinstance(content, Mapping) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, Mapping) else type(content).__name__
        raise LoadError(
            f"{path} has format {found!r}, this version reads {FORMAT}: load the checkpoint and save the shards again"
        )
    try:
        manifest = _manifest(content)
        is_whole = len(manifest.chunks) == manifest.world_size and all(
            len(checksums) == len(manifest.units) for checksums in manifest.chunks
        )
        if not is_whole or len(manifest.resident) != len(manifest.layout.resident):
            raise ValueError("checksums are missing")
    except (KeyError, ValueError, TypeError, AttributeError, SpecError) as error:
        raise _damaged(path, f"{type(error).__name__} {error}") from None
    if manifest.digest != content.get("digest"):
        raise _damaged(path, f"its digest is {manifest.digest[:12]}, it says {str(content.get('digest'))[:12]}")
    return manifest


def _manifest(content: Mapping[str, Any]) -> ShardManifest:
    weights = [
        WeightSpec(name, tuple(shape), dtype, None if strides is None else tuple(strides))
        for name, dtype, shape, strides in content["weights"]
    ]
    blocks, sliced = (content.get(key, []) for key in ("blocks", "sliced"))
    if set(sliced) - set(blocks) or set(blocks) - set(range(len(content["units"]))):
        raise ValueError(f"sliced are units {sliced}, blocks are units {blocks}")
    units = [Unit(index, name, tuple(names), index in sliced) for index, (name, names) in enumerate(content["units"])]
    numbers = [content[key] for key in ("world_size", "epoch", "alignment_bytes")]
    if not all(isinstance(number, int) for number in numbers):
        raise ValueError(f"world_size, epoch and alignment_bytes are {numbers}")
    return ShardManifest(
        model=str(content["model"]),
        world_size=numbers[0],
        epoch=numbers[1],
        alignment_bytes=numbers[2],
        weights=tuple(weights),
        units=tuple(units),
        chunks=tuple(tuple(int(one, 16) for one in checksums) for checksums in content["chunks"]),
        resident=tuple(int(one, 16) for one in content["resident"]),
        blocks=tuple(blocks),
        rows=tuple(map(str, content.get("rows", []))),
    )


def _damaged(path: Path, why: str) -> LoadError:
    return LoadError(f"{path} is damaged: {why}; {AGAIN}")


def _hex(checksum: int) -> str:
    return f"{checksum:016x}"


def _listed(values: tuple[int, ...] | None) -> list[int] | None:
    return None if values is None else list(values)
