"""Module hooks that drive a step: the forward around the layers begins and ends it, each layer's call is one of its."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter
from torch.utils.hooks import RemovableHandle

from graphshard.core.errors import ProgramError
from graphshard.runtime.attach.check import WeightWatch
from graphshard.runtime.attach.layers import LayerStack
from graphshard.runtime.loop import StepLoop
from graphshard.runtime.runtime import Runtime


class LayerHooks:
    """Installed on a module's layers and on what calls them.

    A step begins with the forward of the layers' owner, or with the first layer where that has none; it ends after
    that forward, or after the last layer. A forward that raises gives its step up.
    """

    def __init__(self, module: nn.Module, stack: LayerStack, runtime: Runtime) -> None:
        self._runtime, self._stack = runtime, stack
        self._step: StepLoop | None = None
        self._ends_by_itself = False
        self._handles: list[RemovableHandle] = []
        for index, layer in enumerate(stack.layers):
            self._hook_layer(index, layer)
        if stack.owner is not None:
            self._hook_owner(stack.owner)

    def watch(self, module: nn.Module, watch: WeightWatch) -> None:
        """Let `watch` see the forward of the module and of the layers' owner."""
        watch.progress = self._progress
        for outer in dict.fromkeys((module, self._stack.owner or module)):
            # entered first and left last
            self._handles.append(outer.register_forward_pre_hook(lambda *_: watch.enter(), prepend=True))
            self._handles.append(outer.register_forward_hook(lambda *_: watch.leave(), always_call=True))

    def remove(self) -> None:
        """Take the hooks off the module."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _hook_owner(self, owner: nn.Module) -> None:
        self._handles += [
            owner.register_forward_pre_hook(lambda *_: self._begin(ends_by_itself=False), prepend=True),
            owner.register_forward_hook(lambda *_: self._end()),
            owner.register_forward_hook(lambda *_: self._abort(), always_call=True),
        ]

    def _hook_layer(self, index: int, layer: nn.Module) -> None:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._refuse_gradients(index, layer, args, kwargs)
            if self._mine() is None:
                self._begin(ends_by_itself=True)
            step = self._mine()
            assert step is not None
            if step.due != index or step.is_inside:
                raise self._out_of_order(index, step)
            step.before_layer(index)

        def after(module: nn.Module, args: object, result: object) -> None:
            step = self._mine()
            if step is None:
                raise ProgramError(f"{self._name(index)} ended, but its step was given up while it ran")
            step.after_layer(index)
            self._refuse_backward(index, result)
            if step.due is None and self._ends_by_itself:
                step.end()

        def failed(module: nn.Module, args: object, result: object) -> None:
            step = self._mine()
            if step is not None and step.is_inside and step.due == index:
                step.abort()

        self._handles += [
            layer.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            layer.register_forward_hook(after),
            layer.register_forward_hook(failed, always_call=True),
        ]

    def _mine(self) -> StepLoop | None:
        """The open step, if this thread's hooks began it."""
        step = self._step
        return step if step is not None and step.is_mine and step.is_open else None

    def _begin(self, ends_by_itself: bool) -> None:
        if torch.compiler.is_compiling():
            raise ProgramError("torch.compile does not run the hooks that gather weights; run the module as it is")
        if torch._C._is_tracing():  # torch.jit.is_tracing, without its types
            raise ProgramError(
                "torch.jit.trace would keep the bytes that slots hold now, not the weights; trace the module before it "
                "is attached, or after detach()"
            )
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
            raise ProgramError(
                "make_fx would keep the bytes that slots hold now, not the weights; trace the module before it is "
                "attached, or after detach()"
            )
        step = self._runtime.begin_step()
        self._step, self._ends_by_itself = step, ends_by_itself

    def _end(self) -> None:
        step = self._mine()
        if step is None:
            return
        if step.due is not None:
            due, progress = step.due, step.progress
            step.abort()
            raise ProgramError(
                f"the forward of {type(self._stack.owner).__name__} ended with {progress}: {self._name(due)} was not "
                "called as a module, or was left out; its result may rest on other layers' bytes. Call layers as "
                "modules and name their order with order="
            )
        step.end()

    def _out_of_order(self, index: int, step: StepLoop) -> ProgramError:
        due, progress = step.due, step.progress
        step.abort()
        return ProgramError(
            f"{self._name(index)} was called with {progress}{'' if due is None else f': {self._name(due)}'}; name the "
            "layer of each call with order=, if one forward does not call each layer once, as listed"
        )

    def _abort(self) -> None:
        step = self._mine()
        if step is not None:
            step.abort()

    def _progress(self) -> str:
        step = self._mine()
        return step.progress if step is not None else "no step is open"

    def _name(self, index: int) -> str:
        return f"layer {index} ({self._stack.names[index][0] or 'the module'})"

    # Note [requires_grad stays]: torch folds a matmul or not by its weight's flag, also where autograd is off, so
    # clearing it would change bits. What is refused is a call that would save weights for a backward.
    def _refuse_gradients(self, index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(tensor.requires_grad for tensor in (*tensors, *layer.parameters())):
            raise ProgramError(
                f"{self._name(index)} was called with autograd on and an input or parameter that requires a gradient: "
                "its weights are overwritten before any backward; run it under torch.inference_mode() or no_grad()"
            )

    def _refuse_backward(self, index: int, result: object) -> None:
        """What the call's arguments did not show: inputs inside objects, layers that turn autograd on themselves."""
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_iter(result)):
            self._abort()
            raise ProgramError(
                f"{self._name(index)} gave a result that requires a gradient, and its weights are overwritten before "
                "any backward; run it under torch.inference_mode(), or give it inputs that require none"
            )
