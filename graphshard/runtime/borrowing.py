"""Weights of another runtime of the same rank: a draft reads the target's embedding and head where they lie.

The lender owns them: it loads and updates them, and is closed last. Who borrows keeps a reference to the lender, and
views that keep its memory mapped; the lender knows who borrows, as nobody may read weights while they are written.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from graphshard.core.counts import some_of
from graphshard.core.errors import SpecError
from graphshard.core.specs import ModelSpec, WeightSpec
from graphshard.core.text import digest_of
from graphshard.device.base import Device

if TYPE_CHECKING:
    from graphshard.runtime.runtime import Runtime
    from graphshard.runtime.update.updating import Updating


@dataclass(frozen=True)
class Borrowed:
    """What a model borrows, and of whom."""

    lender: Runtime | None = None
    """None if it borrows nothing."""
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    """Views of the lender's resident weights, by name."""

    @property
    def settings(self) -> dict[str, str]:
        """What ranks compare: what the lender is."""
        if self.lender is None:
            return {}
        return {"lender": digest_of(f"{self.lender.model.digest} {self.lender.plan.digest}")}


def borrow_weights(model: ModelSpec, lender: Runtime | None, device: Device) -> Borrowed:
    """Find what `model`, which computes on `device`, borrows in `lender`'s memory. Local.

    Raises:
        SpecError: there is no lender; or it lacks a weight, shards it, has it with another dtype, shape or strides, or
            on another device.
        ProgramError: the lender is closed.
    """
    if not model.borrowed:
        return Borrowed()
    if lender is None:
        raise SpecError(
            f"model {model.name} borrows {some_of(list(model.borrowed))}: give the runtime that has them, as in "
            "graphshard.compile(draft, group, borrow=target)"
        )
    lender.check_open()
    found = {name: _lent(lender, model, model.weight(name)) for name in model.borrowed}
    for name, lent in found.items():
        is_here = lent.is_cpu if device.driver.is_host else lent.device == torch.device(device.name)
        if not is_here:
            raise SpecError(
                f"model {model.name} computes on {device.name} and borrows {name}, which {lender.model.name} has on "
                f"{lent.device}: compile both on one device"
            )
    return Borrowed(lender, found)


def _lent(lender: Runtime, model: ModelSpec, asked: WeightSpec) -> Tensor:
    name, owner = asked.name, lender.model.name
    has = next((weight for weight in lender.model.weights if weight.name == name), None)
    if has is None:
        near = some_of([weight.name for weight in lender.model.weights], 3)
        raise SpecError(f"model {model.name} borrows {name}, which {owner} does not have; it has {near}")
    if has != asked:
        raise SpecError(f"model {model.name} borrows {name} as {_kind(asked)}, and {owner} has it as {_kind(has)}")
    if name in lender.memory.borrowed:
        return lender.memory.borrowed[name]
    for view in lender.layout.resident:
        if view.weight == name:
            return lender.memory.resident(view)
    unit = next(unit for unit in lender.plan.units if name in unit.weights)
    raise SpecError(
        f"model {model.name} borrows {name}, which {owner} shards (unit {unit.index}, {unit.name}): what is lent stays "
        f"whole, so plan {owner} with exclude=({name!r},)"
    )


def _kind(spec: WeightSpec) -> str:
    strides = "" if spec.strides is None else f" with strides {list(spec.strides)}"
    return f"{spec.dtype}{list(spec.shape)}{strides}"


def private_copy(lent: Tensor) -> Tensor:
    """A borrowed weight on memory of its own, with its strides."""
    return torch.empty_strided(lent.shape, lent.stride(), dtype=lent.dtype, device=lent.device).copy_(lent)


class Borrowers:
    """Who reads a runtime's resident weights in their place. Those rest while the weights are written."""

    def __init__(self) -> None:
        self._all: weakref.WeakSet[Updating] = weakref.WeakSet()

    def add(self, borrower: Updating) -> None:
        """`borrower` reads weights of the runtime that owns this."""
        self._all.add(borrower)

    def stop(self, lender: Updating, epoch: int, until: ExitStack) -> None:
        """No borrower runs or begins anything until `until` is closed. `lender` was at `epoch` before it is written.

        Raises:
            CommError, DeviceError, ProgramError: a borrower's step is open, or did not end in time.
        """
        for borrower in list(self._all):
            until.enter_context(_resting(borrower, lender, epoch))
            borrower.borrowers.stop(lender, epoch, until)  # what one borrows another may have borrowed of it


@contextmanager
def _resting(borrower: Updating, lender: Updating, lent_epoch: int) -> Iterator[None]:
    """`borrower` runs nothing. Its epoch tells C so, and afterwards that its weights are others, or of no version."""
    with borrower.turn.lock:
        if borrower.is_closed:
            yield
            return
        borrower.turn.wait_until_free()
        epoch = borrower.epoch
        borrower.set_epoch(epoch | 1)
        try:
            borrower.end_all("the end of what was issued before an update of borrowed weights")
            yield
        finally:
            if borrower.is_torn or lender.is_torn:
                borrower.set_epoch(epoch | 1)
            else:
                is_new = lender.epoch % 2 == 0 and lender.epoch != lent_epoch
                borrower.set_epoch((epoch | 1) + 1 if is_new else epoch)
