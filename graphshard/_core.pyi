"""The extension: driver tables, memory, streams, op lists, graphs, control pages. No policy, no torch.

Every failed driver call raises DriverError with the entry point's name, CUDA's error name and number.
"""

from collections.abc import Callable, Sequence
from types import TracebackType

class DriverError(RuntimeError):
    """`args == (message,)`; `code` is the CUresult, `entry_point` the call that failed."""

    code: int
    entry_point: str

class Driver:
    """A driver library, loaded by absolute path (or SONAME for the vendor's), initialised, with a context retained.

    Use in a forked child raises DriverError (the pid is checked). One Driver per path and device is shared.
    """

    def __init__(self, path: str, device_index: int = 0) -> None: ...
    @property
    def path(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def is_host(self) -> bool:
        """Whether the library is graphshard's own host driver (it exports `gshost_version`)."""
    @property
    def device_name(self) -> str: ...
    @property
    def total_bytes(self) -> int: ...
    @property
    def granularity_bytes(self) -> int: ...
    def attribute(self, attribute: int) -> int: ...

class Memory:
    """One allocation, mapped: a window if `exportable`. Zeroed. Freed when the last reference (buffer views too) dies.

    Supports the buffer protocol on `host` (writable unless imported read-only).
    """

    def __init__(self, driver: Driver, num_bytes: int, exportable: bool = False) -> None: ...
    @staticmethod
    def import_fd(driver: Driver, fd: int, num_bytes: int, read_only: bool = True) -> Memory: ...
    @property
    def address(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def generation(self) -> int:
        """Unique in the process: a new mapping never has an old one's generation, even at the same address."""
    def export_fd(self) -> int:
        """A new file descriptor that the caller closes (or sends away)."""

class Stream:
    def __init__(self, driver: Driver) -> None: ...
    @property
    def handle(self) -> int: ...
    def synchronize(self, timeout_s: float) -> bool:
        """Wait until all work is done; False if `timeout_s` passed first. Releases the GIL. Never unbounded."""
    def is_idle(self) -> bool: ...
    def copy(self, destination: int, source: int, num_bytes: int) -> None: ...
    def fill(self, destination: int, value: int, num_bytes: int) -> None: ...
    def write_value(self, address: int, value: int) -> None: ...
    def wait_value(self, address: int, value: int) -> None:
        """Until the 32-bit word at `address`, as a signed difference, is >= `value`."""
    def call(self, function: Callable[[], object]) -> None:
        """Enqueue a host function; an exception in it is raised by the next `check()`."""
    def check(self) -> None: ...
    def record(self, event: Event) -> None: ...
    def wait(self, event: Event) -> None: ...

class Event:
    """An event of its own, with timing if asked for."""

    def __init__(self, driver: Driver, timing: bool = False) -> None: ...
    def synchronize(self, timeout_s: float) -> bool: ...
    def is_done(self) -> bool: ...
    def elapsed_us(self, earlier: Event) -> float: ...

class Calls:
    """What compute ops call, by index: Python callables or C functions. Owned by whatever runs them.

    The first exception is kept, later calls are skipped until `check()` raises it and clears the state.
    """

    def __init__(self, functions: Sequence[Callable[[], object] | tuple[int, int]]) -> None:
        """A tuple is (address of a `void (*)(void*)`, its argument)."""
    def check(self) -> None: ...

class OpList:
    """Bound ops, issued eagerly or under capture: one list, one loop, two modes.

    `ops` are tuples; streams and events are indices, stream 0 is the origin:
        ("record", stream, event)            ("wait", stream, event)
        ("copy", stream, destination, source, num_bytes)
        ("copy2d", stream, destination, destination_pitch, source, source_pitch, row_bytes, rows)
        ("call", stream, index)              the compute op `index` of the Calls given to issue or capture
        ("fill", stream, destination, value, num_bytes)
        ("write_value", stream, address, value)   ("wait_value", stream, address, value)
    """

    def __init__(
        self, driver: Driver, streams: Sequence[Stream], num_events: int, ops: Sequence[tuple[object, ...]]
    ) -> None: ...
    def __len__(self) -> int: ...
    def issue(self, calls: Calls, begin: int = 0, end: int = -1) -> None:
        """Issue eagerly (events are re-recorded each time). Releases the GIL; returns when all is enqueued."""
    def event_done(self, event: int) -> bool: ...
    def wait_event(self, event: int, timeout_s: float) -> bool:
        """The host waits for an event of the last `issue`."""
    def capture(self, calls: Calls, external_events: Sequence[tuple[int, Event]] = ()) -> Graph:
        """Capture the list from stream 0 with events of its own. On failure the capture is ended and cleaned up.

        (op index, event) pairs add an external event record node after that op (timelines, outputs_ready).
        """

class Graph:
    """A captured graph; keeps its Calls, streams and memory owners alive."""

    def num_nodes(self) -> dict[str, int]:
        """By kind: memcpy, host, kernel, memset, event_record, event_wait, batch_mem_op, empty, graph."""
    def instantiate(self, executor: str = "", seed: int = -1) -> GraphExec:
        """On `host`: executor "cooperative" or "threaded" ("" = cooperative); seed >= 0 picks any runnable stream
        next, -1 creation order, -2 copies earliest, -3 copies latest."""

class GraphExec:
    def launch(self, stream: Stream) -> None:
        """Enqueue on `stream`; launches of one exec are ordered, from whatever stream."""
    def upload(self, stream: Stream) -> None: ...

class ControlPage:
    """4096 shared bytes of one rank, written with release and read with acquire order. Never written from Python.

    Words: magic, version, pid, state (1 live, 2 closed, 3 dead), epoch (odd = being written), step, op, layout digest.
    """

    def __init__(self) -> None:
        """A new page on a memfd."""
    @staticmethod
    def open_fd(fd: int) -> ControlPage: ...
    def fd(self) -> int:
        """A duplicate descriptor that the caller closes (or sends away)."""
    def set_identity(self, pid: int, digest: bytes) -> None:
        """`digest` is 32 bytes."""
    def set_state(self, state: int) -> None: ...
    def set_epoch(self, epoch: int) -> None: ...
    def set_progress(self, step: int, op: int) -> None: ...
    @property
    def pid(self) -> int: ...
    @property
    def state(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def op(self) -> int: ...
    @property
    def digest(self) -> bytes: ...

def memcpy(destination: int, source: int, num_bytes: int) -> None:
    """C's memcpy with the GIL released: the yardstick of `bench gather`."""
