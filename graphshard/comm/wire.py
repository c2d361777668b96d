"""Frames between two ranks: one unix socket, bytes and file descriptors, never a blocking call.

A frame is a header, the name of the call it belongs to, and a payload. Descriptors travel beside it (SCM_RIGHTS), in
batches of what one message may carry; the first batch rides on the header, each further one on a byte of its own.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from graphshard.core.errors import CommError

_HEADER = struct.Struct("<4sBBHIQQQ")  # magic, kind, is_json, name bytes, descriptors, tag, seq, payload bytes
_MAGIC = b"gsf1"
_MAX_FDS_PER_MESSAGE = 253  # SCM_MAX_FD
_MAX_PAYLOAD_BYTES = 1 << 32
_RECEIVE_BYTES = 1 << 18
_ANCILLARY_BYTES = socket.CMSG_SPACE(_MAX_FDS_PER_MESSAGE * 4)


class Kind(IntEnum):
    """What a frame is."""

    DATA = 1
    FAILED = 2  # the sender gave up on the group `tag`; the payload says why
    BYE = 3  # the sender closed
    BUSY = 4  # the sender works on what it will send in this call


@dataclass(slots=True)
class Frame:
    """One message. Whoever holds a received frame owns its `fds`."""

    kind: Kind
    tag: int
    seq: int
    name: str
    payload: bytes
    is_json: bool = False
    fds: list[int] = field(default_factory=list)

    def close(self) -> None:
        """Close the descriptors that nobody took."""
        while self.fds:
            os.close(self.fds.pop())


@dataclass(slots=True)
class Outgoing:
    """A frame on its way out: what is left of it."""

    head: memoryview
    fds: list[int]
    num_more_messages: int
    """Bytes at the start of what follows the header that carry a batch of descriptors each."""
    body: memoryview
    owns_fds: bool = False
    is_sent: bool = False

    def keep_fds(self) -> None:
        """Have descriptors of our own: the caller may close his before there is room to send them."""
        self.fds = [os.dup(fd) for fd in self.fds]
        self.owns_fds = True

    def take_fds(self, num_fds: int) -> None:
        """Forget the first `num_fds` descriptors, sent or given up."""
        if self.owns_fds:
            for fd in self.fds[:num_fds]:
                os.close(fd)
        del self.fds[:num_fds]


class Channel:
    """One end of a connection to one rank. Not thread-safe: its owner locks."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._received = bytearray()
        self._received_fds: deque[int] = deque()
        self._outgoing: deque[Outgoing] = deque()
        self.is_open = True

    def fileno(self) -> int:
        """The socket's descriptor, for poll."""
        return self._socket.fileno()

    def peer_pid(self) -> int:
        """The pid at the other end as the kernel tells it (0: not visible from here)."""
        return self._credentials()[0]

    def peer_uid(self) -> int:
        """The user at the other end as the kernel tells it."""
        return self._credentials()[1]

    @property
    def has_outgoing(self) -> bool:
        """Whether frames wait for room in the socket."""
        return bool(self._outgoing)

    def post(self, frame: Frame) -> Outgoing:
        """Queue a frame and send as much as fits now. To a peer that is gone it counts as sent: reading tells."""
        name = frame.name.encode()
        header = _HEADER.pack(
            _MAGIC, frame.kind, frame.is_json, len(name), len(frame.fds), frame.tag, frame.seq, len(frame.payload)
        )
        num_more = max(0, -(-len(frame.fds) // _MAX_FDS_PER_MESSAGE) - 1)
        body = b"\0" * num_more + name + frame.payload
        outgoing = Outgoing(memoryview(header), list(frame.fds), num_more, memoryview(body))
        if self.is_open:
            self._outgoing.append(outgoing)
            self.flush()
            if not outgoing.is_sent:
                outgoing.keep_fds()
        else:
            outgoing.is_sent = True
        return outgoing

    def flush(self) -> None:
        """Send what fits without waiting."""
        while self._outgoing:
            outgoing = self._outgoing[0]
            try:
                while not _send_some(self._socket, outgoing):
                    pass
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                self._drop_outgoing()
                return
            outgoing.is_sent = True
            self._outgoing.popleft()

    def receive(self) -> list[Frame]:
        """Every frame that is complete by now; `is_open` turns False at the end of the stream."""
        while self.is_open:
            try:
                data, ancillary, flags, _ = self._socket.recvmsg(
                    _RECEIVE_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                break
            except ConnectionResetError:
                data, ancillary, flags = b"", [], 0
            for level, what, value in ancillary:
                if level == socket.SOL_SOCKET and what == socket.SCM_RIGHTS:
                    fds = array.array("i")
                    fds.frombytes(value[: len(value) - len(value) % fds.itemsize])
                    self._received_fds.extend(fds)
            if flags & socket.MSG_CTRUNC:
                raise CommError(
                    f"file descriptors from pid {self.peer_pid()} were lost: {_count_fds()} are open here; "
                    "raise the limit (ulimit -n)"
                )
            if not data:
                self.is_open = False
                self._drop_outgoing()
            self._received += data
        return self._parse()

    def close(self) -> None:
        """Close the socket and every descriptor that arrived and was not taken."""
        self.is_open = False
        self._drop_outgoing()
        self._socket.close()
        while self._received_fds:
            os.close(self._received_fds.pop())

    def _parse(self) -> list[Frame]:
        frames: list[Frame] = []
        while len(self._received) >= _HEADER.size:
            magic, kind, is_json, name_bytes, num_fds, tag, seq, size = _HEADER.unpack_from(self._received)
            if magic != _MAGIC or size > _MAX_PAYLOAD_BYTES:
                raise CommError(
                    f"pid {self.peer_pid()} does not speak this protocol: it sent {bytes(self._received[:4])!r} "
                    f"instead of {_MAGIC!r}; use one version of graphshard on all ranks"
                )
            num_more = max(0, -(-num_fds // _MAX_FDS_PER_MESSAGE) - 1)
            name_begin = _HEADER.size + num_more
            end = name_begin + name_bytes + size
            if len(self._received) < end:
                break
            name = self._received[name_begin : name_begin + name_bytes].decode()
            payload = bytes(self._received[name_begin + name_bytes : end])
            fds = [self._received_fds.popleft() for _ in range(num_fds)]
            frames.append(Frame(Kind(kind), tag, seq, name, payload, bool(is_json), fds))
            del self._received[:end]
        return frames

    def _drop_outgoing(self) -> None:
        for outgoing in self._outgoing:
            outgoing.take_fds(len(outgoing.fds))
            outgoing.is_sent = True
        self._outgoing.clear()

    def _credentials(self) -> tuple[int, int, int]:
        raw = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iii"))
        pid, uid, gid = struct.unpack("iii", raw)
        return pid, uid, gid


def _send_some(sock: socket.socket, outgoing: Outgoing) -> bool:
    """Send one piece; True when nothing is left. BlockingIOError when there is no room."""
    if outgoing.head:
        batch = outgoing.fds[:_MAX_FDS_PER_MESSAGE]
        sent = _send_with_fds(sock, outgoing.head, batch)
        outgoing.head = outgoing.head[sent:]
        outgoing.take_fds(len(batch))  # descriptors leave with the first byte
    elif outgoing.num_more_messages:
        batch = outgoing.fds[:_MAX_FDS_PER_MESSAGE]
        _send_with_fds(sock, outgoing.body[:1], batch)
        outgoing.take_fds(len(batch))
        outgoing.body = outgoing.body[1:]
        outgoing.num_more_messages -= 1
    elif outgoing.body:
        outgoing.body = outgoing.body[sock.send(outgoing.body, socket.MSG_NOSIGNAL) :]
    return not outgoing.head and not outgoing.body


def _send_with_fds(sock: socket.socket, data: memoryview, fds: Sequence[int]) -> int:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    return sock.sendmsg([data], rights, socket.MSG_NOSIGNAL)


def _count_fds() -> int:
    return len(os.listdir("/proc/self/fd"))
