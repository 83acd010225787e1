"""Wire format of calls and answers: each frame has several messages, followed by large arrays as raw bytes."""

import pickle
import socket
import struct
from collections.abc import Sequence

from rl_core.cluster.processes.packing import Packed

HEADER_SIZE = struct.Struct("<Q")
SOCKET_BYTES = 4 << 20


Numbered = tuple[int, Packed]
"""A call or an answer, with the call's number."""

QUESTION = Packed(b"", ())
"""Request for stacks; the reader of the other side answers it even if calls hang. A pickle is never empty."""


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets, with buffers as large as the system allows."""
    ends = socket.socketpair()
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    return ends


def send_frame(connection: socket.socket, messages: Sequence[Numbered] | None) -> None:
    """Send messages in one frame; None marks the end.

    Raises:
        OSError: The other side no longer reads.
    """
    buffers = [memoryview(buffer) for _, packed in messages or () for buffer in packed.buffers]
    header = pickle.dumps(
        messages
        and [(number, packed.body, [memoryview(one).nbytes for one in packed.buffers]) for number, packed in messages],
        protocol=5,
    )
    connection.sendall(HEADER_SIZE.pack(len(header)) + header)
    for buffer in buffers:
        connection.sendall(buffer)


def receive_frame(connection: socket.socket) -> list[Numbered] | None:
    """Receive the messages of one frame; None at the end.

    Raises:
        OSError: The connection is broken; EOFError if the other side closed it.
    """
    (size,) = HEADER_SIZE.unpack(_receive(connection, HEADER_SIZE.size))
    header = pickle.loads(_receive(connection, size))  # noqa: S301 - from our own process, see packing.py
    if header is None:
        return None
    return [(number, Packed(body, [_receive(connection, size) for size in sizes])) for number, body, sizes in header]


def _receive(connection: socket.socket, size: int) -> bytearray:
    buffer = bytearray(size)
    rest = memoryview(buffer)
    while rest:
        received = connection.recv_into(rest)
        if not received:
            raise EOFError("the other side closed the connection.")
        rest = rest[received:]
    return buffer
