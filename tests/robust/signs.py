"""What tests and rank processes say to each other while both run: words through a named pipe, and files as orders."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Collection
from pathlib import Path

LIMIT_S = 90.0


class Signs:
    """The test's end: waits for words of ranks, gives orders."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        os.mkfifo(folder / "signs")
        self._fd = os.open(folder / "signs", os.O_RDONLY | os.O_NONBLOCK)
        self._keep = os.open(folder / "signs", os.O_WRONLY)  # so that the pipe never ends
        self._buffer = b""
        self.heard: list[tuple[str, int, int]] = []
        """(word, rank, pid) that nobody has waited for yet."""

    def wait_for(self, word: str, ranks: Collection[int], limit_s: float = LIMIT_S) -> dict[int, int]:
        """Until each of `ranks` has said `word` since it was last waited for; their pids by rank."""
        deadline = time.monotonic() + limit_s
        while missing := set(ranks) - {rank for said, rank, _ in self.heard if said == word}:
            poll = select.poll()
            poll.register(self._fd, select.POLLIN)
            left = deadline - time.monotonic()
            assert left > 0 and poll.poll(left * 1000), f"ranks {missing} did not say {word!r}; heard: {self.heard}"
            lines = (self._buffer + os.read(self._fd, 1 << 16)).split(b"\n")
            self._buffer = lines.pop()
            for line in lines:
                said, rank, pid = line.decode().rsplit(" ", 2)
                self.heard.append((said, int(rank), int(pid)))
        found = {rank: pid for said, rank, pid in self.heard if said == word and rank in ranks}
        self.heard = [one for one in self.heard if one[0] != word or one[1] not in ranks]
        return found

    def order(self, what: str, text: str = "") -> None:
        """Leave an order for whoever looks for it."""
        new = self.folder / f"{what}.new"
        new.write_text(text)
        new.rename(self.folder / what)

    def stop(self, ranks: Collection[int], *, all_live: bool = False) -> None:
        """End all `ranks`, see `Stopping`. `all_live`: none is dead, so each waits until it has heard of all."""
        self.order("settle", "all live" if all_live else "")
        self.wait_for("settled", ranks)
        self.order("stop")

    def close(self) -> None:
        os.close(self._fd)
        os.close(self._keep)

    def __enter__(self) -> Signs:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def tell(folder: str, word: str) -> None:
    """Say `word`, as the rank that this process is."""
    fd = os.open(Path(folder) / "signs", os.O_WRONLY)
    os.write(fd, f"{word} {os.environ['RANK']} {os.getpid()}\n".encode())
    os.close(fd)


def is_ordered(folder: str, what: str) -> bool:
    """Whether the test has given this order."""
    return (Path(folder) / what).exists()


def take_order(folder: str, what: str) -> str:
    """The order's text, which is taken away; empty if there is none."""
    place = Path(folder) / what
    with contextlib.suppress(FileNotFoundError):
        text = place.read_text()
        place.unlink()
        return text
    return ""


class Stopping:
    """How serving ranks end together: each takes in who came back, says so, and goes on until all have done so."""

    def __init__(self, folder: str) -> None:
        self._folder, self._is_settled = folder, False

    def is_due(self, settle: Callable[[], object], knows_all: Callable[[], bool] = lambda: True) -> bool:
        """Whether it is time to end; `settle` is called once before, where all live until `knows_all`."""
        if not self._is_settled and is_ordered(self._folder, "settle"):
            settle()
            if (Path(self._folder) / "settle").read_text() == "all live" and not knows_all():
                return False  # who came back has knocked, and is heard in a moment
            self._is_settled = True
            tell(self._folder, "settled")
        return is_ordered(self._folder, "stop")


def until(condition: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
    """Wait for something that nobody can be asked to announce (a process's state)."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s:.0f} s: {what}"
        time.sleep(0.002)
