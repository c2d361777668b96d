"""Building a runtime, in the order that loses nothing: choose, verify, reserve, load, agree, bind, check.

Everything that can be refused from the plan alone is refused before a byte is reserved; everything that ranks must
agree on is compared before a graph is captured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch

from graphshard.comm.certificate import Certificate, agree_min, exchange
from graphshard.comm.control import ControlTable
from graphshard.comm.devices import compare_devices, probe_pull
from graphshard.comm.doors import own_record
from graphshard.comm.group import Group
from graphshard.comm.open import open_transport
from graphshard.comm.rejoin import Newcomer, Welcome, open_door
from graphshard.comm.transport import Transport, TransportOpening
from graphshard.core.errors import SpecError
from graphshard.core.plan import Plan
from graphshard.core.specs import BufferSpec, DeviceSpec, StepShape
from graphshard.core.text import digest_of, text_of
from graphshard.device.base import Device
from graphshard.device.cuda import CudaDevice
from graphshard.load.recipe import Recipes
from graphshard.runtime.activations import ActivationMemory
from graphshard.runtime.bind import BlockGround, Hooks
from graphshard.runtime.borrowing import Borrowed
from graphshard.runtime.compiled import Compiled
from graphshard.runtime.compute import ComputeTable, segment_weights
from graphshard.runtime.cuda.torch_cuda import TorchCuda, VendorTorchCuda
from graphshard.runtime.memory import RuntimeMemory
from graphshard.runtime.model import SegmentedModel
from graphshard.runtime.runtime import Runtime
from graphshard.runtime.weights.fill import Filler
from graphshard.schedule.dual import MODES_BY


@dataclass(frozen=True)
class Agreed:
    """What stands before a plan is made, and whom a rank that came back has met."""

    spec: DeviceSpec
    """What every rank's device can do. The only device a plan sees; told to ranks that come back."""
    welcome: Welcome | None = None


@contextmanager
def agree_on_device(group: Group, device: Device) -> Iterator[Agreed]:
    """Agree with all ranks (collective); or, on a rank that came back, meet them and go by what they agreed on."""
    if not isinstance(group, Newcomer):
        yield Agreed(agreed_device_spec(group, device))
        return
    with group.meet() as welcome:
        yield Agreed(DeviceSpec(**welcome.offer["device"]), welcome)


def agreed_device_spec(group: Group, device: Device) -> DeviceSpec:
    """The least of all ranks' numbers (collective). DeviceError if two ranks are on one GPU."""
    compare_devices(group, device)
    spec = device.spec()
    return replace(
        spec,
        memory_bytes=agree_min(group, "memory_bytes", spec.memory_bytes),
        spare_cores=agree_min(group, "spare_cores", spec.spare_cores),
    )


def build_runtime(
    compiled: Compiled,
    segmented: SegmentedModel,
    filler: Filler,
    group: Group,
    device: Device,
    *,
    agreed: Agreed | None = None,
    epoch: int = 0,
    timeout_s: float,
    hooks: Hooks,
    progress: bool = False,
    recipes: Recipes | None = None,
    ignore: Sequence[str] = (),
    borrowed: Borrowed | None = None,
) -> Runtime:
    """Reserve, load, agree and bind on every rank of `group` (collective), or on one that came back.

    Without `agreed` no rank can come back. `epoch` is the version of the weights that `filler` brings.
    With `progress` gathers of a collective transport write how far they are.
    `recipes` and `ignore` are what updates go by; `borrowed` are weights in another runtime's memory.

    Raises:
        SpecError: the plan is for another world size.
        LoadError: what `filler` found wrong; every rank raises the first failing rank's error.
        CommError: ranks disagree, or a peer's memory shows other bytes than it loaded.
    """
    plan = compiled.plan
    welcome = agreed.welcome if agreed is not None else None
    buffers = {shape: tuple(segmented.buffers(shape)) for shape in plan.step_shapes}
    name = plan.transport if plan.units else "pull"  # where nothing is sharded nothing is gathered, by whatever
    opening = group.agree("transport", lambda: open_transport(name, device, group, timeout_s, progress=progress))
    lent = borrowed or Borrowed()
    certificate = _certificate(compiled, device, buffers, opening, lent)
    _compare(group, plan, certificate, welcome)
    with closing(opening):
        if name == "pull" and device.kind == "cuda" and welcome is None and plan.units:
            probe_pull(group, device, timeout_s)
        filler.prepare(compiled, group)
        opening.start()
        filled = _fill(compiled, filler, group, device, buffers, opening, welcome, timeout_s)
        filled.memory.borrowed = lent.weights
        if welcome is None:
            filled.control.mine.set_epoch(epoch)
    runtime = _bound(compiled, segmented, filled, group, device, timeout_s, hooks)
    if lent.lender is not None:
        runtime.borrow_from(lent.lender)
    runtime.load_report = filler.report
    runtime.recipes, runtime.ignore = dict(recipes or {}), tuple(ignore)
    return _checked(runtime, certificate, agreed, filled, opening.why_no_rejoin)


_WHY_NO_REJOIN = (
    "tensor-parallel steps have been taken by all ranks together: start all anew, or plan with dual='gather'"
)


def _bound(
    compiled: Compiled,
    segmented: SegmentedModel,
    filled: _Filled,
    group: Group,
    device: Device,
    timeout_s: float,
    hooks: Hooks,
) -> Runtime:
    shapes = compiled.plan.step_shapes
    weights = segment_weights(compiled.model, compiled.plan, compiled.layout, filled.memory)
    activations, alignment = None, filled.transport.alignment(filled.control, timeout_s)
    if filled.blocks is not None:
        activations = filled.blocks.memory
        joint = [str(shape) for shape in activations.shapes]
        alignment = filled.blocks.exchange.alignment(alignment, filled.control, timeout_s, joint)
    return Runtime(
        compiled,
        group=group,
        driver=device.driver,
        memory=filled.memory,
        transport=filled.transport,
        alignment=alignment,
        control=filled.control,
        compute=ComputeTable(segmented, compiled.model, weights, filled.memory, shapes, activations),
        hooks=hooks,
        torch_cuda=_torch_cuda(device, hooks),
        blocks=filled.blocks,
    )


def _checked(
    runtime: Runtime, certificate: Certificate, agreed: Agreed | None, filled: _Filled, why_no_rejoin: str | None
) -> Runtime:
    """Gather every unit once; then let in whoever comes back (or say why not), and tell that this rank did."""
    group = runtime.group
    if filled.blocks is not None:
        why_no_rejoin = _WHY_NO_REJOIN
    try:
        # kernels are loaded while no peer waits in a gather: loading may wait for the device
        group.agree("warm-up of compute", runtime.warm_up)
        group.agree("check of gathered units", runtime.check_gathers)
        if agreed is not None:
            told = {"certificate": certificate.told(group.world_size), "device": asdict(agreed.spec)}
            offer = told if why_no_rejoin is None else {"why_not": why_no_rejoin}
            shards = filled.memory.shards if why_no_rejoin is None else None
            own = own_record(group, filled.control.mine, shards, filled.checksums)
            runtime.let_in(open_door(group, own, offer, certificate.digest(group.world_size), agreed.welcome))
    except BaseException:
        runtime.close()
        raise
    return runtime


@dataclass(frozen=True)
class _Filled:
    """A rank's memory, loaded, and its ways to the others'."""

    memory: RuntimeMemory
    checksums: Sequence[int]
    control: ControlTable
    transport: Transport
    blocks: BlockGround | None


def _fill(
    compiled: Compiled,
    filler: Filler,
    group: Group,
    device: Device,
    buffers: Mapping[StepShape, Sequence[BufferSpec]],
    opening: TransportOpening,
    welcome: Welcome | None,
    timeout_s: float,
) -> _Filled:
    layout = compiled.layout
    # apart from filling: a source may give up its copies, which must not happen if a peer has too little memory
    memory = group.agree("reserve", lambda: RuntimeMemory(device, layout, buffers, opening.allocate))
    if any(program.blocks for program in compiled.programs.values()):
        reserve = partial(ActivationMemory, device, compiled.model, compiled.programs, group.world_size)
        memory.activations = group.agree("reserve activations", reserve)
    checksums = filler.fill(compiled, group, memory)
    digest = bytes.fromhex(layout.digest)
    if welcome is None:
        control = ControlTable.exchange(group, digest)
        peers = None
    else:
        welcome.check_checksums(checksums)
        control = ControlTable.join(group, digest, welcome.peers)
        control.mine.set_epoch(welcome.epoch)
        peers = welcome.records
    transport = opening.connect(layout, memory.shards, memory.slots, checksums, peers)
    blocks, activations = None, memory.activations
    if activations is not None:
        try:
            exchange = opening.open_activations(transport, activations.staging, activations.places, timeout_s)
        except BaseException:
            transport.close()
            raise
        blocks = BlockGround(activations, exchange)
    return _Filled(memory, checksums, control, transport, blocks)


def _torch_cuda(device: Device, hooks: Hooks) -> TorchCuda | None:
    """Who computes: torch on `device`, if it is a GPU."""
    if not isinstance(device, CudaDevice):
        return None
    return hooks.torch_cuda or VendorTorchCuda(device.index)


def _compare(group: Group, plan: Plan, certificate: Certificate, welcome: Welcome | None) -> None:
    if plan.world_size != group.world_size:
        raise SpecError(
            f"the plan is for {plan.world_size} ranks, the group has {group.world_size}: "
            "make the plan for this group, or start as many ranks as the plan names"
        )
    if welcome is None:
        exchange(group, certificate)
    else:
        welcome.check_certificate(certificate)


def _certificate(
    compiled: Compiled,
    device: Device,
    buffers: Mapping[StepShape, Sequence[BufferSpec]],
    opening: TransportOpening,
    lent: Borrowed,
) -> Certificate:
    return Certificate(
        model=compiled.model.digest,
        model_text=compiled.model.text(),
        plan=compiled.plan.digest,
        layout=compiled.layout.digest,
        programs={str(shape): program.text() for shape, program in compiled.programs.items()},
        settings={
            "transport": compiled.plan.transport,
            "executor": compiled.plan.executor,
            "device": device.kind,
            "torch": torch.__version__,
            **opening.settings,
            **lent.settings,
            **_joint_settings(compiled),
            "buffers": digest_of("".join(f"{shape} {text_of(spec)}" for shape in buffers for spec in buffers[shape])),
        },
    )


def _joint_settings(compiled: Compiled) -> dict[str, str]:
    """Which steps all ranks must take together, and by what modes were chosen; nothing where nothing was."""
    joint = [str(shape) for shape, program in compiled.programs.items() if program.blocks]
    settings = {"step shapes that need all ranks": " ".join(joint)} if joint else {}
    by = [reason.removeprefix(MODES_BY) for reason in compiled.plan.block_reasons if reason.startswith(MODES_BY)]
    return settings | ({"modes": by[0]} if by else {})
