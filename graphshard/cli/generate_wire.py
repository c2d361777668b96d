"""What the ranks of `generate` and the command say to each other: JSON, an object a line, over one local socket each.

Tokens go to the command as soon as they are there, so that they survive the rank that made them.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from typing import Any

from graphshard.core.errors import CommError

_BACKLOG = 64
_READ_BYTES = 1 << 16

Message = dict[str, Any]


class Lines:
    """One end of a connection: whole messages in, whole messages out."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = b""
        self.is_open = True
        """Whether the other end may still say something."""

    def fileno(self) -> int:
        """For selectors."""
        return self._sock.fileno()

    def peer_pid(self) -> int:
        """The process at the other end, as the kernel says."""
        return _peer(self._sock)[0]

    def send(self, message: Message) -> None:
        """Send; nothing happens if the other end is gone."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._sock.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Message]:
        """What has come by now; waits for at least something if the socket blocks. Closed at the end: `is_open`."""
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            data = b""
        self.is_open = bool(data)
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Close this end."""
        self._sock.close()


class Listener:
    """The command's end: where ranks connect. Nothing on disk; only processes of the same user are let in."""

    def __init__(self, name: str) -> None:
        self.address = f"\0graphshard-generate-{name}"
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.bind(self.address)
        self._sock.listen(_BACKLOG)
        self._sock.setblocking(False)

    def fileno(self) -> int:
        """For selectors."""
        return self._sock.fileno()

    def accept(self) -> list[Lines]:
        """Everybody who has connected by now. What they are sent waits for room, what they say is never waited for."""
        found: list[Lines] = []
        while True:
            try:
                sock = self._sock.accept()[0]
            except BlockingIOError:
                return found
            if _peer(sock)[1] != os.getuid():
                sock.close()
                continue
            found.append(_Told(sock))

    def close(self) -> None:
        """Close."""
        self._sock.close()


class _Told(Lines):
    """The command's end of a connection: it never waits for a rank, which may be stopped."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        sock.setblocking(False)

    def send(self, message: Message) -> None:
        """Send a word that fits any socket's buffer."""
        with contextlib.suppress(BlockingIOError):
            super().send(message)


def connect(address: str) -> Lines:
    """A rank's end.

    Raises:
        CommError: the command does not listen.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(address)
    except OSError as error:
        sock.close()
        raise CommError(f"the command that started this rank does not listen ({error}); start it anew") from error
    return Lines(sock)


def _peer(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid, uid
