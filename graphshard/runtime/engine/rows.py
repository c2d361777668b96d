"""One weight of which this rank keeps its rows: placeholder, then rows as its parts are loaded, then what stands there.

The table of cuts is the only source of which rows are whose: nothing is read from attributes of a parameter, which may
be replaced by another one after loading.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from graphshard.core.errors import LoadError, ProgramError
from graphshard.device.base import Device
from graphshard.runtime.attach.spec import dtype_name
from graphshard.runtime.device_bytes import device_bytes
from graphshard.runtime.engine.cut import ShardId
from graphshard.runtime.engine.materialise import standing_at
from graphshard.runtime.engine.parts import WHOLE, Parts
from graphshard.runtime.engine.stock import RowSpec
from graphshard.runtime.weights.replicated import bytes_hash


class RowSlice:
    """The rows of weight `spec` that one rank keeps. Threads may load it at once."""

    def __init__(
        self,
        spec: RowSpec,
        module: nn.Module,
        names: Sequence[str],
        rank: int,
        device: Device,
        *,
        is_loaded: bool = False,
    ) -> None:
        """`names`: all under which the weight is found in `module`. `is_loaded`: they show its rows already."""
        self.spec = spec
        self.begin, self.end = spec.cut.rows_of(rank)
        self.parts = Parts(spec.name, spec.shape, spec.dtype, spec.blocks)
        if is_loaded:
            self.parts.done(WHOLE)
        self._module, self._names, self._device = module, tuple(names), device
        given = self.parameter
        self._given = weakref.ref(given)  # processing that puts another one in its place frees its rows
        self._address = given.data_ptr()
        self._rows: Tensor | None = None
        self._lock = threading.Lock()
        self._storage: weakref.ref[torch.UntypedStorage] | None = None
        self.released_bytes = 0
        self._prints: dict[str, str] = {}

    @property
    def prints(self) -> dict[str, str]:
        """A hash of a sample of each tensor that was loaded, by part: tells unlike tensors apart, reading little."""
        return dict(self._prints)

    @property
    def num_rows(self) -> int:
        """Of this rank."""
        return self.end - self.begin

    @property
    def parameter(self) -> nn.Parameter:
        """What stands in the module under the weight's name now.

        Raises:
            ProgramError: nothing does, or unlike things under its names.
        """
        found = [standing_at(self._module, name) for name in self._names]
        first = found[0]
        if not isinstance(first, nn.Parameter) or any(other is not first for other in found):
            raise ProgramError(
                f"weight {self.spec.name} is no longer a parameter of its module, or not of all that shared it: "
                "something took it away after prepare(). Fuse before: give prepare() the merged weight with blocks=, "
                "and load its parts by shard id"
            )
        return first

    def load(self, tensor: Tensor, shard_id: ShardId | None = WHOLE) -> None:
        """Keep this rank's rows of `tensor`, the part `shard_id` of the weight (None: all of it).

        Raises:
            LoadError: as `Parts.check`.
            ProgramError: the parameter was replaced before all of it was loaded.
        """
        with self._lock:
            begin, end = self.parts.check(tensor, shard_id)
            tensor = tensor.detach().resolve_conj().resolve_neg().reshape(end - begin, *self.spec.shape[1:])
            if self._is_replaced:
                raise ProgramError(f"weight {self.spec.name} {self._now()} before all of it was loaded: {_LOAD_FIRST}")
            if self._rows is None:
                self._rows = self._reserve()
            first, last = max(begin, self.begin), min(end, self.end)
            if first < last:
                source = tensor[first - begin : last - begin]
                _as_bits(self._rows[first - self.begin : last - self.begin]).copy_(_as_bits(source))
            self.parts.done(shard_id)
            self._prints["whole" if shard_id is WHOLE else repr(shard_id)] = _sample_hash(tensor)
            if not self.parts.missing:
                self.parameter.data = self._rows
                self._rows = None

    def standing(self) -> Tensor:
        """This rank's rows as post-load processing left them.

        Raises:
            LoadError: the weight was not loaded, or not all of it.
            ProgramError: what stands there are no longer this rank's rows.
        """
        if self.parts.missing:
            raise LoadError(self.why_incomplete())
        found = self.parameter.detach()
        if found.dim() != len(self.spec.shape) or found.shape[0] != self.num_rows or not found.is_contiguous():
            layout = "" if found.is_contiguous() else f" with strides {list(found.stride())}"
            raise ProgramError(
                f"weight {self.spec.name} is {dtype_name(found)}{list(found.shape)}{layout} before finalize(), where "
                f"this rank keeps {self.num_rows} rows of {list(self.spec.shape)}: processing may change dtype and row "
                "bytes, not rows or their order. Transpose or fuse what is loaded, or keep the weight whole with "
                f"exclude=[{self.spec.name!r}]"
            )
        return found

    def release(self) -> None:
        """Give the rows up: everybody has them."""
        parameter = self.parameter
        self._storage = weakref.ref(parameter.untyped_storage())
        self.released_bytes = parameter.nbytes
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)

    @property
    def is_freed(self) -> bool:
        """Whether the released rows' storage is gone; somebody else may still hold it."""
        return self._storage is None or self._storage() is None

    def why_incomplete(self) -> str:
        """What is missing at `finalize`; empty if nothing is."""
        if not self.parts.missing:
            return ""
        replaced = f", and {self._now()}: {_LOAD_FIRST}" if self._is_replaced else ""
        return f"weight {self.spec.name} {self.parts.why_missing()}{replaced}"

    @property
    def _is_replaced(self) -> bool:
        """Whether the module shows anything else than what `prepare` put there."""
        return self.parameter is not self._given() or self.parameter.data_ptr() != self._address

    def _now(self) -> str:
        found = self.parameter
        return f"was replaced by {dtype_name(found)}{list(found.shape)} on {found.device}"

    def _reserve(self) -> Tensor:
        """Memory for this rank's rows: the device's, which goes back at once when it is given up."""
        dtype, shape = self.parameter.dtype, (self.num_rows, *self.spec.shape[1:])
        with torch.inference_mode(False):
            num_bytes = torch.empty(shape, dtype=dtype, device="meta").nbytes
            if not num_bytes:
                return torch.empty(shape, dtype=dtype, device="cpu")
            memory = self._device.allocate(num_bytes)
            return device_bytes(self._device, memory)[:num_bytes].view(dtype).view(shape)


_LOAD_FIRST = "load it through its weight_loader or load(); post-load processing may replace its rows afterwards"


def _as_bits(tensor: Tensor) -> Tensor:
    """The same elements as integers or what torch copies as it is, whatever the strides: no bit is interpreted."""
    return tensor.view(_BITS.get(tensor.element_size(), tensor.dtype))


def _sample_hash(tensor: Tensor) -> str:
    """Of at most 16 x 16 elements, evenly spaced."""
    if not tensor.numel():
        return ""
    rows = tensor[:: -(-tensor.shape[0] // _SAMPLE)]
    rows = rows.reshape(rows.shape[0], -1)
    sample = _as_bits(rows[:, :: -(-rows.shape[1] // _SAMPLE)]).contiguous().cpu()
    return bytes_hash(sample.view(-1).view(torch.uint8).numpy().data)


_SAMPLE = 16
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
