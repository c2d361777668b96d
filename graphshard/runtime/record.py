"""Capture of compute on the host: a segment's ATen calls are recorded once and replayed on the same memory.

What a CUDA graph does with kernels, a tape does with ATen calls: Python code is frozen, every result keeps its
address. Views are not replayed, since what they view stays where it is; a functional call is replayed into its
recorded result through its `out=` variant, or re-run and copied where no variant gives the same bits; in-place calls
replay as they are.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_iter, tree_map_only

from graphshard.core.errors import DeviceError
from graphshard.runtime.arena import Arena
from graphshard.runtime.aten import AtenMode
from graphshard.runtime.out_calls import Call, OpOverload, in_place_calls, out_calls
from graphshard.runtime.refusals import HostReads, check_permitted, refuse

_UNDEFINED_CONTENTS = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
)

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class Tape:
    """Recorded calls. Calling it replays them, on what inputs, weights and caches hold now.

    It owns every tensor it touches, whoever else lets go of them, and keeps the arena's blocks alive. Replays of tapes
    that share an arena must not overlap.
    """

    __slots__ = ("_calls", "names", "num_views")

    def __init__(self, calls: Sequence[Call], names: Sequence[str], num_views: int) -> None:
        """`names` are the ATen ops behind `calls`; `num_views` calls were recorded that need no replay."""
        self._calls = tuple(calls)
        self.names = tuple(names)
        self.num_views = num_views

    def __len__(self) -> int:
        return len(self._calls)

    def __call__(self) -> None:
        """Replay, on the calling thread. Results are allocated only inside calls that have no `out=` variant."""
        with torch._C._InferenceMode(True):  # torch.inference_mode is a Python class around this; modes are per thread
            for function, args, kwargs in self._calls:
                function(*args, **kwargs)


def record(run: Callable[[], None], arena: Arena, where: str = "") -> Tape:
    """Run `run` once and record its ATen calls; `where` (a segment's path) is named by errors.

    `run` computes on the real tensors while it is recorded: a caller that must see nothing changed saves and restores
    the buffers it writes. Temporaries lie in `arena`, which is reset first, and must be dead when `run` returns.

    Raises:
        DeviceError: `run` did what no capture permits, or kept a temporary. Nothing stays behind.
    """
    if any(isinstance(mode, _Recorder) for mode in _get_current_dispatch_mode_stack()):
        raise DeviceError("this thread is recording already: captures may not be nested")
    arena.reset()
    recorder, host_reads = _Recorder(arena), HostReads()
    try:
        with torch.no_grad(), host_reads, recorder:
            run()
        swallowed = recorder.error or host_reads.error
        if swallowed is not None:  # by `run`; a capture stays invalid after its first error
            raise swallowed
        recorder.check_temporaries()
    except DeviceError as error:
        raise DeviceError(f"{where}: {error}" if where else str(error)) from None
    return Tape(recorder.calls, recorder.names, recorder.num_views)


class _Recorder(AtenMode):  # type: ignore[no-untyped-call]
    """The dispatch mode that sees every ATen call of the recording thread."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.names: list[str] = []
        self.num_views = 0
        self.error: DeviceError | None = None
        self._arena = arena
        self._owned: dict[tuple[object, ...], Tensor] = {}
        self._temporaries: list[tuple[weakref.ref[Tensor], str]] = []

    def on_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run and record one call; what it returns lies at the address that replays will write."""
        if _is_composite(func):
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        try:
            with _plain_tensors():
                return self._record(func, args, kwargs)
        except DeviceError as error:
            self.error = self.error or error
            raise

    def check_temporaries(self) -> None:
        """Raise if a temporary outlived the recording: the next segment's would overwrite it.

        Raises:
            DeviceError: naming the op that made it.
        """
        if any(ref() is not None for ref, _ in self._temporaries):
            gc.collect()  # garbage in a reference cycle has not outlived anything
        kept = [name for ref, name in self._temporaries if ref() is not None]
        if kept:
            raise DeviceError(
                f"the result of {kept[0]} outlives its segment ({len(kept)} such tensors): its memory is shared with "
                "other segments; declare a BufferSpec and copy the result into that buffer"
            )

    def _record(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(func, OpOverload):
            refuse(str(func), "only ATen and registered custom ops can be captured")
        check_permitted(func, args, kwargs)
        inputs = {_storage(leaf) for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)}
        written = _written(func, args, kwargs)
        before = [(t, t.data_ptr(), t.size(), t.clone()) for t in written]
        result = func(*args, **kwargs)
        if any((t.data_ptr(), t.size()) != (address, size) for t, address, size, _ in before):
            refuse(str(func), "it gave its output other memory (a size that does not fit), and addresses are frozen")
        fresh = [t for t in tree_iter(result) if isinstance(t, Tensor) and _storage(t) not in inputs]
        if func.namespace == "aten" and func.overloadpacket.__name__ == "lift_fresh":
            return self._constant(result)
        if not fresh:
            return self._record_in_place(func, args, kwargs, result, [(t, value) for t, _, _, value in before])
        temporaries = {id(t): self._temporary(func, t) for t in fresh}
        if func.overloadpacket.__name__ not in _UNDEFINED_CONTENTS:
            targets = [temporaries.get(id(t)) for t in tree_iter(result)]
            self._append(func, self._fill_call(func, args, kwargs, fresh, targets))
        return tree_map_only(Tensor, lambda t: temporaries.get(id(t), t), result)

    def _record_in_place(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        before: Sequence[tuple[Tensor, Tensor]],
    ) -> Any:
        """Record a call that made no new memory: it wrote into its arguments, or it is a view and needs no replay."""
        returns_nothing = not func._schema.returns
        if torch.Tag.inplace_view not in func.tags and (func._schema.is_mutable or returns_nothing):
            self._append(func, self._in_place_call(func, self._own(args), self._own(kwargs), before))
            return result
        self.num_views += 1
        for view in tree_iter(result):
            if isinstance(view, Tensor) and self._arena.owns(view):
                self._watch(func, view)
        return result

    def _in_place_call(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        before: Sequence[tuple[Tensor, Tensor]],
    ) -> Call:
        """The call that does what `func` did to the one tensor in `before` (and what it held until then)."""
        if len(before) == 1:
            target, value = before[0]
            after = target.clone()
            for call in in_place_calls(func, args, kwargs):
                target.copy_(value)
                if _gives(call, (target,), (after,)):
                    return call
            target.copy_(after)
        return func._op, args, kwargs

    def _fill_call(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        fresh: Sequence[Tensor],
        targets: Sequence[Tensor | None],
    ) -> Call:
        """The call that fills the temporaries in `targets`; they hold the bits of `fresh` when this returns."""
        args, kwargs = self._own(args), self._own(kwargs)
        owned: list[Tensor] = self._own([target for target in targets if target is not None])
        if not func._schema.is_mutable and len(owned) == len(targets):
            for call in out_calls(func, args, kwargs, owned):
                if _gives(call, owned, fresh):
                    return call
        for target, value in zip(owned, fresh, strict=True):
            target.copy_(value)
        positions = tuple(i for i, target in enumerate(targets) if target is not None)
        return _rerun, (func._op, args, kwargs, positions, tuple(owned)), {}

    def _constant(self, value: Tensor) -> Tensor:
        """A number brought from Python: refilled at each replay, since later calls may write to it."""
        temporary = self._arena.take(value.size(), value.stride(), value.dtype)
        temporary.copy_(value)
        self._append(torch.ops.aten.copy_.default, (Tensor.copy_, (self._own(temporary), value), {}))
        self._watch(torch.ops.aten.lift_fresh.default, temporary)
        return temporary

    def _temporary(self, func: OpOverload, value: Tensor) -> Tensor:
        if value.layout is not torch.strided or value.device.type != "cpu":
            refuse(
                str(func), f"its result has layout {value.layout} on {value.device}; this device captures strided ones"
            )
        temporary = self._arena.take(value.size(), value.stride(), value.dtype)
        self._watch(func, temporary)
        return temporary

    def _watch(self, func: OpOverload, temporary: Tensor) -> None:
        self._temporaries.append((weakref.ref(temporary), str(func)))

    def _append(self, func: OpOverload, call: Call) -> None:
        self.calls.append(call)
        self.names.append(str(func))

    def _own(self, tree: Any) -> Any:
        """`tree` with each tensor replaced by the tape's own alias of it, so that the caller's objects can die."""
        return tree_map_only(Tensor, self._alias, tree)

    def _alias(self, tensor: Tensor) -> Tensor:
        key = (_storage(tensor), tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype,
               tensor.is_conj(), tensor.is_neg())  # fmt: skip
        alias = self._owned.get(key)
        if alias is None:
            alias = self._owned[key] = tensor.detach()
        return alias


@contextmanager
def _plain_tensors() -> Iterator[None]:
    """Neither grad nor inference mode: a tape's tensors may be written later, in any mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _is_composite(func: Any) -> bool:
    """Whether `func` is made of other ATen calls; in inference mode torch shows it before taking it apart."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return (
        isinstance(func, OpOverload)
        and has_kernel(str(func._name), _COMPOSITE)
        and not has_kernel(str(func._name), "CPU")
    )


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _written(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors whose bytes a call writes; none for calls that change sizes and strides alone (`t_`, `squeeze_`)."""
    if not func._schema.is_mutable or torch.Tag.inplace_view in func.tags:
        return []
    arguments = func._schema.arguments
    is_written = [a.alias_info is not None and a.alias_info.is_write for a in arguments]
    values = [value for value, is_write in zip(args, is_written, strict=False) if is_write]
    values += [
        kwargs[a.name] for a, is_write in zip(arguments, is_written, strict=True) if is_write and a.name in kwargs
    ]
    return [t for t in tree_iter(values) if isinstance(t, Tensor)]


def _gives(call: Call, targets: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Whether `call` writes exactly the bits of `expected` into `targets`, and leaves them where they are."""
    function, args, kwargs = call
    before = [(t.data_ptr(), t.size(), t.stride()) for t in targets]
    try:
        function(*args, **kwargs)
    except (TypeError, RuntimeError):
        return False
    assert before == [(t.data_ptr(), t.size(), t.stride()) for t in targets], f"{function} moved its output"
    return all(_same_bits(*pair) for pair in zip(targets, expected, strict=True))


def _same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.contiguous().flatten().view(torch.uint8), right.contiguous().flatten().view(torch.uint8))


def _rerun(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    positions: Sequence[int],
    targets: Sequence[Tensor],
) -> None:
    """Call `function` and copy its fresh results into `targets`."""
    results = function(*args, **kwargs)
    flat = (results,) if isinstance(results, Tensor) else tuple(tree_iter(results))
    for position, target in zip(positions, targets, strict=True):
        target.copy_(flat[position])
