"""What rank processes do with the runtime in small: serve until told to stop, and die or hang where the test says."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

from mini import TIMEOUT_S, Mini, held
from signs import Stopping, is_ordered, take_order, tell, until

from graphshard._core import Calls, CaptureLock, Memory, OpList, Stream, Word
from graphshard.comm import rejoin, rendezvous
from graphshard.comm.group import Group
from graphshard.comm.launch import RankProcesses
from graphshard.comm.rendezvous import init_group
from graphshard.core.errors import CommError
from graphshard.device import open_device

POINTS = ("connect", "load", "bind", "capture", "replay")
HOW = ("exit", "raise", "os._exit", "SIGKILL")
WHERE = ("idle", "wait", "capture")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def serve(group: Group, folder: str) -> dict[str, Any]:
    """Step until told to stop; take in who comes back; die when the order for this rank says so.

    Orders: `die.RANK` holds the point at which the next process of this rank kills itself; one for which there is a
    `hold.RANK` stops between its group and all else until `go.RANK`; `stop` ends all.
    """
    rank = group.rank
    if is_ordered(folder, f"hold.{rank}"):
        tell(folder, "held")
        until(lambda: is_ordered(folder, f"go.{rank}"), f"go.{rank}")
    point = take_order(folder, f"die.{rank}")
    if point == "told one":
        _die_after_one_announcement()
    if point == "told all":
        rejoin.Newcomer.announce = _then_die(rejoin.Newcomer.announce)  # type: ignore[method-assign]
    mini = Mini(group, lambda here: die() if here == point else None)
    mini.step()
    before = held()
    tell(folder, "ready")
    stopping = Stopping(folder)

    def knows_all() -> bool:
        return all(mini.control.state(peer) != "dead" for peer in range(group.world_size))

    while not stopping.is_due(mini.admit, knows_all):
        for admitted in mini.admit():
            tell(folder, f"admitted {admitted} {mini.control.pages[admitted].pid}")
        mini.step()
        if take_order(folder, f"die.{rank}") == "step":
            die()
    after, states = held(), [mini.control.state(peer) for peer in range(group.world_size)]
    mini.close()
    return {"wrong": mini.wrong, "steps": mini.num_steps, "before": before, "after": after, "states": states}


def _then_die(function: Any) -> Any:
    def call(*arguments: Any) -> None:
        function(*arguments)
        die()

    return call


def _die_after_one_announcement() -> None:
    ask = rejoin._ask

    def once(door: Any, name: str, *more: Any) -> Any:
        answer = ask(door, name, *more)
        die()
        return answer

    rejoin._ask = once


def come_back_lying(folder: str, job: str, rank: int, lie: str) -> str:
    """A newcomer that is not what it should be: how it is refused."""
    del folder
    try:
        group = rejoin.rejoin_group(job, rank, timeout_s=TIMEOUT_S)
        mini = Mini(group, model="other" if lie == "model" else "mini", version=int(lie == "bytes"))
        mini.close()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "came in"


def announce_unchecked(folder: str, job: str, rank: int, lie: str) -> str:
    """As `come_back_lying`, but it does not look at itself: the others do."""
    rejoin.Welcome.check_certificate = lambda *_: None  # type: ignore[method-assign]
    rejoin.Welcome.check_checksums = lambda *_: None  # type: ignore[method-assign]
    Mini.check = lambda *_: None  # type: ignore[method-assign]
    return come_back_lying(folder, job, rank, lie)


def come_back_at_the_second_attempt(folder: str, job: str, rank: int) -> str:
    """One group, two attempts; then this rank closes properly, and its place is free again."""
    del folder
    group = rejoin.rejoin_group(job, rank, timeout_s=TIMEOUT_S)
    try:
        Mini(group, model="other")
    except CommError:
        mini = Mini(group)
        mini.step()
        mini.close()
        return f"came in, wrong: {mini.wrong}"
    return "was not refused"


def step_beside_a_stopped_rank(group: Group, folder: str, num_steps: int) -> dict[str, Any]:
    """Rank 1 stops itself; the others step, and miss it only when they call for it."""
    mini = Mini(group)
    mini.step()
    group.barrier()
    if group.rank == 1:
        tell(folder, "stopping")
        os.kill(os.getpid(), signal.SIGSTOP)
        mini.close()
        return {}
    while mini.control.state(1) != "stopped":
        mini.step()
    begin = mini.num_steps
    while mini.num_steps < begin + num_steps:
        mini.step()
    still = mini.control.state(1)
    try:
        group.barrier(timeout_s=0.3)
        error = ""
    except CommError as failure:
        error = str(failure)
    tell(folder, "went on")
    mini.close()
    return {"wrong": mini.wrong, "still": still, "error": error}


def reach(folder: str, point: str, victims: list[int]) -> dict[str, Any]:
    """Ranks without a group of the launcher's: victims say `here` at `point` and hang there until they are killed.

    Others go on: they return the error that they meet, or step until all victims are dead, and some steps more.
    """
    rank = int(os.environ["RANK"])
    hang = _Hang(folder) if rank in victims else None
    if point == "connect":
        rendezvous._next_frames = _said(folder, "hello", rendezvous._next_frames)
    if hang is not None and point == "connect":
        rendezvous._next_frames = hang.forever  # type: ignore[assignment]
        rendezvous._Leader._hand_out = hang.forever  # type: ignore[method-assign]
    try:
        group = init_group(TIMEOUT_S)
        mini = Mini(group, lambda here: hang.at(here) if hang is not None and here == point else None)
        if hang is not None and point == "replay":
            hang.in_a_replay(mini)
        mini.step()
        while any(mini.control.state(victim) != "dead" for victim in victims):
            mini.step()
        for _ in range(20):
            mini.step()
        mini.close()
        group.close()
        return {"wrong": mini.wrong, "job": group.job}
    except CommError as error:
        return {"error": str(error)}


def _said(folder: str, word: str, function: Any) -> Any:
    def call(*arguments: Any) -> Any:
        tell(folder, word)
        return function(*arguments)

    return call


def stall(mini: Mini) -> None:
    """Launch a graph that waits for a word that nobody writes."""
    word = Word(Memory(mini.device.driver, 4))
    ops = [("wait_value", 0, word.address, 1)]
    OpList(mini.device.driver, [mini.stream], 0, ops).capture(Calls([])).instantiate().launch(mini.stream)


def hold_the_capture() -> None:
    """A thread takes the process's one capture for ever."""
    locked = threading.Event()

    def hold() -> None:
        with CaptureLock():
            locked.set()
            threading.Event().wait()

    threading.Thread(target=hold, daemon=True).start()
    locked.wait()


class _Hang:
    """Says `here`, and never comes back: in Python or in native code."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def forever(self, *_: object) -> Any:
        tell(self._folder, "here")
        while True:
            signal.pause()

    def at(self, point: str) -> None:
        if point == "capture":
            self._in_a_capture()
        self.forever()

    def _in_a_capture(self) -> None:
        """The main thread waits in native code for the process's one capture, which another thread holds."""
        hold_the_capture()
        driver = open_device("host").driver
        stream, memory = Stream(driver), Memory(driver, 4)
        tell(self._folder, "here")
        OpList(driver, [stream], 0, [("fill", 0, memory.address, 0, 4)]).capture(Calls([]), (), 3600.0)

    def in_a_replay(self, mini: Mini) -> None:
        """The main thread waits in native code for a graph, whose executor waits for a word that nobody writes."""
        stall(mini)
        mini.graph.launch(mini.stream)
        tell(self._folder, "here")
        mini.stream.synchronize(3600.0)


def end_each_in_its_own_way(group: Group) -> dict[str, Any]:
    """Rank 1 + i ends in the i-th way of all (HOW, WHERE); rank 0 steps on, and closes. No torch."""
    mini = Mini(group)
    mini.step()
    group.barrier()
    if group.rank == 0:
        others = range(1, group.world_size)
        while any(mini.control.state(rank) != "dead" for rank in others):
            mini.step()
        mini.step()
        try:
            group.barrier()
            error = ""
        except CommError as failure:
            error = str(failure)
        mini.close()
        return {"wrong": mini.wrong, "error": error}
    how, where = [(how, where) for where in WHERE for how in HOW][group.rank - 1]
    if where == "wait":
        stall(mini)
        mini.graph.launch(mini.stream)
        threading.Thread(target=mini.stream.synchronize, args=(3600.0,), daemon=True).start()
    if where == "capture":
        hold_the_capture()
        threading.Thread(target=mini.capture, daemon=True).start()
    if how == "exit":
        sys.exit(7)
    if how == "raise":
        raise RuntimeError("out of luck")
    if how == "os._exit":
        os._exit(8)
    die()
    return {}


def parent_of_ranks(folder: str, point: str) -> None:
    """A launcher that a test kills, with its ranks at `point`."""
    with RankProcesses(f"{__file__}:reach", 2, arguments=[folder, point, [0, 1]], group_timeout_s=None) as ranks:
        ranks.wait(600.0)


if __name__ == "__main__":
    parent_of_ranks(*sys.argv[1:])
