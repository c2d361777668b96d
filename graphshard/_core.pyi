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

    Use in a forked child, in a host function or after the interpreter's exit began raises DriverError.
    One driver per path and device is shared, and stays open until the process ends.
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
    def free_bytes(self) -> int:
        """Memory that can still be allocated, as the driver counts now."""
    @property
    def granularity_bytes(self) -> int: ...
    @property
    def num_retired(self) -> int:
        """Dropped memory, graphs, calls and streams that enqueued work may still use; they go when it is done."""
    def attribute(self, attribute: int) -> int: ...

def device_uuids(path: str) -> list[str]:
    """The UUID of every device that the driver library at `path` shows this process, by index; makes no context."""

class Memory:
    """One allocation, mapped: a window if `exportable`. Zeroed. Freed when the last reference (buffer views too) dies.

    Work that is still enqueued, op lists and graphs keep it too: after a drop it stays until they are done with it.
    Supports the buffer protocol on `host` (writable unless imported read-only).
    """

    def __init__(self, driver: Driver, num_bytes: int, exportable: bool = False, fabric: bool = False) -> None:
        """`fabric`: exportable as a fabric handle too, on devices that have them (an attribute says so)."""
    @staticmethod
    def allocate_host(driver: Driver, num_bytes: int, exportable: bool = False) -> Memory:
        """Pinned memory of the host, which host and device use at one address: for words, or windows if exportable."""
    @staticmethod
    def import_fd(driver: Driver, fd: int, num_bytes: int, read_only: bool = True) -> Memory:
        """Map a peer's window; `fd` stays the caller's, `num_bytes` is what the exporter asked for."""
    @staticmethod
    def import_fabric(driver: Driver, handle: bytes, num_bytes: int, read_only: bool = True) -> Memory:
        """Map the window of a peer in the same NVLink domain, on this machine or another."""
    @property
    def is_read_only(self) -> bool: ...
    @property
    def is_host_readable(self) -> bool:
        """Whether the host may read it: `Word` and the buffer protocol need that. All memory of `host` is."""
    def __buffer__(self, flags: int, /) -> memoryview: ...
    @property
    def address(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def generation(self) -> int:
        """Unique in the process: a new mapping never has an old one's generation, even at the same address."""
    def export_fd(self) -> int:
        """A new file descriptor that the caller closes (or sends away)."""
    def export_fabric(self) -> bytes:
        """The 64 bytes of the fabric handle, for whatever channel reaches the peer; nothing to close."""

class Stream:
    """A stream of its own. All addresses must lie in Memory of the same driver; others are refused by name."""

    def __init__(self, driver: Driver) -> None: ...
    @staticmethod
    def from_handle(driver: Driver, handle: int) -> Stream:
        """Somebody else's stream (torch's current one): never destroyed here.

        It must outlive this object, and every list, graph and step that used it: they ask it whether their work has
        ended when they are dropped, and until it has keep what that work uses.

        DriverError for 0, 1 and 2, the null, legacy and per-thread default streams: they wait for all other streams.
        """
    @property
    def handle(self) -> int: ...
    def begin_capture(self, lock_timeout_s: float = 0.0) -> None:
        """Open a capture on this stream, in thread-local mode, under the process's capture lock.

        Until `end_capture` it takes `Recording.issue` and this thread's `call`; everything else is refused.
        """
    def end_capture(self) -> Graph:
        """End the capture that this thread began. The graph owns the recordings and calls in it."""
    def synchronize(self, timeout_s: float) -> bool:
        """Wait until all work is done; False if `timeout_s` passed first. Releases the GIL. Never unbounded."""
    def is_idle(self) -> bool:
        """Whether all work is done. False as well while a capture is open in this process: nothing is asked then."""
    def copy(self, destination: int, source: int, num_bytes: int) -> None: ...
    def fill(self, destination: int, value: int, num_bytes: int) -> None: ...
    def write_value(self, address: int, value: int) -> None: ...
    def wait_value(self, address: int, value: int) -> None:
        """Until the 32-bit word at `address`, as a signed difference, is >= `value`."""
    def call(self, function: Callable[[], object]) -> None:
        """Enqueue a host function, or capture it; an exception in it is raised by the next `check()`."""
    def check(self) -> None: ...
    def record(self, event: Event) -> None: ...
    def wait(self, event: Event) -> None: ...

class Event:
    """An event of its own, with timing if asked for."""

    def __init__(self, driver: Driver, timing: bool = False) -> None: ...
    def synchronize(self, timeout_s: float) -> bool: ...
    def is_done(self) -> bool: ...
    def elapsed_us(self, earlier: Event) -> float: ...

class NcclError(RuntimeError):
    """`args == (message,)`; `code` is the ncclResult_t (5 invalid usage and 4 invalid argument also for what is refused
    here, 7 in progress for a limit that passed), `entry_point` the call that failed. A call that an op list makes adds
    the op's place."""

    code: int
    entry_point: str

class NcclLibrary:
    """A libnccl, loaded by path: the real one or graphshard's host NCCL. Stays loaded until the process ends.

    NcclError if the file does not load or is no NCCL; one that is too old loads and says what it is `missing`.
    """

    def __init__(self, path: str, driver: Driver) -> None: ...
    @property
    def path(self) -> str:
        """Of the mapped file, which an earlier library of the same SONAME may have replaced."""
    @property
    def version(self) -> int:
        """X * 10000 + Y * 100 + Z, as the loaded library says."""
    @property
    def missing(self) -> list[str]:
        """Entry points that it lacks; with any, no communicator can be made."""
    def unique_id(self) -> bytes:
        """128 bytes that one rank makes and gives to all of a communicator; for one communicator only."""

class Collective:
    """What an op list's collective ops run on; `Communicator` is one."""

    @property
    def world_size(self) -> int: ...
    @property
    def name(self) -> str: ...

class Communicator(Collective):
    """This rank's end of a communicator that uses no SM: zero-CTA policy, blocking, windows registered as symmetric.

    What may wait for peers runs on a helper thread, bounded: when `timeout_s` passes, NcclError names the call, the
    communicator is broken (later calls are refused with the first reason) and the thread is left behind. Errors of the
    library break it too, unless it only refused the arguments. One thread at a time uses it; any may call `async_error`
    and `abort`.

    Ends in the order graphs, windows, communicator, memory: `destroy` refuses while graphs with its collectives are
    alive and deregisters what is left. One that is only dropped is aborted in the background.
    """

    def __init__(
        self, library: NcclLibrary, unique_id: bytes, world_size: int, rank: int, name: str, timeout_s: float
    ) -> None:
        """Collective: every rank with the same `unique_id`. `name` goes into errors, and into NCCL's own log."""
    @property
    def rank(self) -> int: ...
    @property
    def is_broken(self) -> bool:
        """Whether a call failed or did not return in time, or it was aborted. A destroyed one is not broken."""
    def allocate(self, num_bytes: int, timeout_s: float = 60.0) -> Memory:
        """Zeroed memory from ncclMemAlloc, in whole granules; it keeps the library, not this communicator."""
    def register(self, memory: Memory, timeout_s: float) -> None:
        """Collective, in the same order on every rank: all of `memory` becomes a symmetric window, which keeps it.

        NcclError for a null window ("symmetric support is missing"), a second registration, memory that is not
        this driver's own or does not begin at a multiple of 4096 bytes.
        """
    def deregister(self, memory: Memory, timeout_s: float = 60.0) -> None:
        """No enqueued work may use the window any more; refused while graphs with collectives are alive (dropped ones
        that still run are waited for)."""
    def all_gather(
        self, destination: int, source: int, num_bytes: int, stream: Stream, timeout_s: float | None = None
    ) -> None:
        """Enqueue eagerly: rank r's `num_bytes` at `source` go to `destination` + r * num_bytes on every rank.

        With a limit on a helper thread, as the first one of a communicator should be: it sets up and waits for peers.
        Captured calls are ops of an OpList. Addresses outside of Memory raise DriverError.
        """
    def reduce_scatter(
        self,
        destination: int,
        source: int,
        num_elements: int,
        dtype: str,
        stream: Stream,
        timeout_s: float | None = None,
    ) -> None:
        """Enqueue eagerly: the sum over ranks of elements [rank * num_elements, (rank + 1) * num_elements) at `source`.

        `dtype` is "float16", "float32" or "bfloat16".
        """
    def async_error(self) -> str | None:
        """What went wrong in the background, or why calls are refused, with this communicator's name; never waits."""
    def abort(self, timeout_s: float) -> bool:
        """Local; also while another call is stuck. False if it has not ended in time: it goes on, ask again."""
    @staticmethod
    def abort_all(communicators: Sequence[Communicator], timeout_s: float) -> list[bool]:
        """Abort in parallel under one limit: one after the other, the first can wait for the second."""
    def destroy(self, timeout_s: float) -> bool:
        """Collective: deregister windows, finalize, destroy. False if it has not ended in time (it is broken then).

        True at once if it was ended before. NcclError if it is broken (abort it), or if graphs with its collectives are
        alive; dropped ones that still run are waited for.
        """

class Calls:
    """What compute ops call, by index: Python callables or C functions. Owned by whatever runs them.

    The first exception is kept, later calls are skipped until `check()` raises it and clears the state.
    A callable must not own what owns these Calls: gc does not see such a cycle.
    """

    def __init__(self, functions: Sequence[Callable[[], object] | tuple[int, int]]) -> None:
        """A tuple is (address of a `void (*)(void*)`, its argument)."""
    def __len__(self) -> int: ...
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
        ("values", stream, batch)            1 to 256 of ("write" | "wait" | "wait_equal", address, value), in order
        ("all_gather", stream, collective, destination, source, num_bytes)      num_bytes of each rank
        ("reduce_scatter", stream, collective, destination, source, num_elements, dtype)
                                             num_elements of each rank; dtype "float16", "float32" or "bfloat16"
    Addresses are looked up when the list is made: outside of Memory or misaligned raises DriverError with the op index,
    and the memory is kept alive, as are the `collectives`, which ops name by index. A tuple or an index that cannot be
    raises ValueError. A copy of exactly 512 MiB, 1 GiB or 2 GiB is made in pieces of 256 MiB: graph nodes of these very
    sizes are slow.
    """

    def __init__(
        self,
        driver: Driver,
        streams: Sequence[Stream],
        num_events: int,
        ops: Sequence[tuple[object, ...]],
        collectives: Sequence[Collective] = (),
    ) -> None: ...
    def __len__(self) -> int: ...
    def issue(self, calls: Calls, begin: int = 0, end: int = -1) -> None:
        """Issue eagerly (events are re-recorded each time). Releases the GIL; returns when all is enqueued."""
    def event_done(self, event: int) -> bool: ...
    def wait_event(self, event: int, timeout_s: float) -> bool:
        """The host waits for an event of the last `issue`."""
    def capture(
        self, calls: Calls, external_events: Sequence[tuple[int, Event]] = (), lock_timeout_s: float = 0.0
    ) -> Graph:
        """Capture the list from stream 0 with events of its own. On failure the capture is ended and cleaned up.

        A second capture in the process is refused, or waits up to `lock_timeout_s` for the first to end.
        (op index, event) pairs add an external event record node after that op (timelines, outputs_ready).
        """
    def ops(self) -> list[tuple[int, str, int, int, int, int, int]]:
        """Each op as (its index, kind, stream, event or call or collective, destination, source, bytes moved in all).

        An all-gather moves all ranks' bytes; what an op does not have is 0.
        """
    def set_trace(self, is_on: bool) -> None:
        """From now on `issue` notes each op that the driver took, or no more. Off by default."""
    def take_trace(self) -> list[tuple[int, str, int, int, int, int, int]]:
        """What was noted since tracing began or was last asked, in that order, as in `ops`; forgotten then."""
    def recording(self) -> Recording:
        """The same ops for one capture that somebody else opens on stream 0 (torch.cuda.graph)."""

class Recording:
    """A list's ops inside a capture that the caller opened on the list's stream 0, under `CaptureLock`, and will end.

    For one capture. The graph points at its events, memory and calls, so whoever keeps the graph keeps it too (a graph
    that `Stream.end_capture` returns does so itself).
    """

    def __len__(self) -> int: ...
    def issue(self, calls: Calls, begin: int = 0, end: int = -1) -> None:
        """Issue ops into the open capture; between two calls the caller may enqueue work of its own on stream 0.

        `calls` need only cover the "call" ops in the range. A stream joins by waiting for an event of the capture; an
        op on another raises DriverError before anything is enqueued.
        """
    def spans(self) -> list[tuple[int, int, int, int]]:
        """As `Graph.spans`, for the graph of the capture; nodes in no span are the caller's own."""

class CaptureLock:
    """The process-wide capture lock as a context manager, for captures made by others (torch.cuda.graph, recording)."""

    def __init__(self, lock_timeout_s: float = 0.0) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

class Graph:
    """A captured graph; keeps its Calls, streams and memory owners alive."""

    @staticmethod
    def from_handle(driver: Driver, handle: int, owner: object) -> Graph:
        """Somebody else's graph (torch's `raw_cuda_graph()`), never destroyed here.

        `owner` is kept by it and by what it instantiates: the graph, and whatever its nodes point at.
        """
    def num_nodes(self) -> dict[str, int]:
        """By kind: memcpy, host, kernel, memset, event_record, event_wait, batch_mem_op, empty, graph."""
    @property
    def handle(self) -> int:
        """The CUgraph, for tools of the same driver library; it stays this object's own."""
    def spans(self) -> list[tuple[int, int, int, int]]:
        """(op, stream, first node, node after the last) of each op that became nodes, in the order of the capture.

        Empty for a graph whose ops went through a `Recording`, which has them.
        """
    def instantiate(self, executor: str = "", seed: int = -1) -> GraphExec:
        """On `host`: executor "cooperative" or "threaded" ("" = cooperative); seed >= 0 picks any runnable stream
        next, -1 creation order, -2 copies earliest, -3 copies latest."""

class GraphExec:
    def launch(self, stream: Stream) -> None:
        """Enqueue on `stream`; launches of one exec are ordered, from whatever stream."""
    def upload(self, stream: Stream) -> None: ...

class StepOrder:
    """What embedded steps over the same slots share: one last use, and what the slots hold."""

    def __init__(self, driver: Driver) -> None: ...
    def forget(self) -> None:
        """Rely on nothing that the slots hold: others wrote to them (an update)."""
    def leave(self, stream: Stream) -> None:
        """Others used the slots, on `stream`: C's next replay comes after that, and relies on nothing they hold."""
    def synchronize(self, timeout_s: float) -> bool:
        """Until C's last replay and prefetch have ended; False if `timeout_s` passed first."""
    @property
    def num_replays(self) -> int:
        """Replays by C so far."""
    @property
    def num_uses(self) -> int:
        """Replays and prefetches by C so far: what Python knew of the slots before them is worth nothing."""

class Step:
    """A captured step for a server: `gs_step_open(handle)` of graphshard.h takes a reference that outlives this one.

    Owns all that it is made of: the graph, calls, streams and lists, and the objects in `keep` (buffers' memory, a
    torch graph with its pool). Objects in `keep` must not own the Step: gc does not see such a cycle.
    """

    def __init__(
        self,
        exec: GraphExec,
        stream: Stream,
        shape: tuple[int, int],
        inputs: Sequence[tuple[str, int, int]],
        outputs: Sequence[tuple[str, int, int]],
        calls: Calls | None = None,
        order: StepOrder | None = None,
        prefetch: OpList | None = None,
        prefetch_stream: Stream | None = None,
        slots: tuple[int, int] = (0, 0),
        done: Word | None = None,
        page: ControlPage | None = None,
        keep: Sequence[object] = (),
        transport: str = "",
        needs_peers: bool = False,
    ) -> None:
        """`exec` was captured from `stream`; buffers are (name, address, num_bytes); shape is (batch, tokens of each).

        `slots` says by numbers of the caller's what they hold when the step begins and when it has ended (0: nothing);
        `prefetch` brings the first, on `prefetch_stream`. The graph writes 1 to `done` when outputs may be read. With
        `page`, replays are refused while its epoch is odd. A wait that is late names the `transport`, and with
        `needs_peers` says that a peer may not have replayed the step.
        """
    @property
    def handle(self) -> int:
        """For `gs_step_open`, while this object lives."""
    @property
    def num_references(self) -> int:
        """This one and C's."""

class FlagBarrier:
    """The flag protocol between ranks, of captured mode: its values are constants, for eager issues and captures alike.

    See csrc/runtime/flags.h. An entry and an exit take turns; each is two batches for `("values", stream, batch)`, what
    to write, then what to wait for and reset.
    """

    def __init__(self, areas: Sequence[int], rank: int) -> None:
        """`areas`: the address here of each rank's area of `area_bytes`, by rank, zero at first."""
    @staticmethod
    def area_bytes(world_size: int) -> int: ...
    def entry(self, header: int) -> tuple[list[tuple[str, int, int]], list[tuple[str, int, int]]]:
        """`header` is equal on all ranks, or all wait: a hash of what follows."""
    def exit(self) -> tuple[list[tuple[str, int, int]], list[tuple[str, int, int]]]: ...
    def address(self, owner: int, writer: int, word: str) -> int:
        """Of the word `entry`, `exit` or `header` in `writer`'s cell of `owner`'s area."""

class Word:
    """A 32-bit word in `memory` that streams write (`write_value`) and the host waits for. Never stale, unlike an event
    that a graph records on each launch: clear it, launch, wait."""

    def __init__(self, memory: Memory, offset: int = 0) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def value(self) -> int: ...
    def store(self, value: int) -> None:
        """With release order; wakes whoever waits."""
    def wait(self, value: int, timeout_s: float) -> bool:
        """Until the word, as a signed difference, is >= `value`; False if `timeout_s` passed first."""

class ControlPage:
    """4096 shared bytes of one rank, written with release and read with acquire order, never by plain stores.

    Words: magic, version, pid, state (1 live, 2 closed, 3 dead), epoch (odd = being written), step, op, layout digest;
    under a collective transport also what was begun, the latest batches of collectives, and why the rank gave up.
    """

    def __init__(self) -> None:
        """A new page on a memfd."""
    @staticmethod
    def open_fd(fd: int) -> ControlPage:
        """Map a peer's page; DriverError if `fd` is no page of this version. `fd` stays the caller's."""
    def fd(self) -> int:
        """A duplicate descriptor that the caller closes (or sends away)."""
    def set_identity(self, pid: int, digest: bytes) -> None:
        """`digest` is 32 bytes."""
    def set_state(self, state: int) -> None: ...
    def set_epoch(self, epoch: int) -> None: ...
    def set_progress(self, step: int, op: int) -> None: ...
    def set_begun(self, step: int, op: int) -> None: ...
    @property
    def begun_step(self) -> int: ...
    @property
    def begun_op(self) -> int: ...
    def post_issue(self, hash: int, what: int) -> int:
        """Post the next batch of collectives, 64 bits each; returns its number, from 1 on. One thread at a time."""
    def issue(self, number: int) -> tuple[int, int] | None:
        """`(hash, what)` of a batch; None if it was not posted yet, or 64 batches ago."""
    @property
    def num_issues(self) -> int: ...
    def set_num_finished(self, value: int) -> None: ...
    @property
    def num_finished(self) -> int: ...
    def post_failure(
        self, text: str, kind: int, unit: int = -1, op: int = -1, step: int = -1, culprit: int = -1
    ) -> None:
        """Why this rank gave up, for its peers; the first one stays, and 1280 bytes of its text."""
    @property
    def has_failed(self) -> bool: ...
    def claim_first(self, rank: int) -> int:
        """On rank 0's page, the one word that every rank may write: `rank` posted its failure; whose came first?"""
    @property
    def first_failed(self) -> int | None:
        """On rank 0's page: the rank whose failure is everybody's; None while nobody claimed."""
    @property
    def failure(self) -> tuple[str, int, int, int, int, int] | None:
        """`(text, kind, unit, op, step, culprit)`, -1 where nothing is known."""
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
