"""What listens: sockets of TCP, UDP and unix domains, by the processes that hold them, as the kernel says."""

import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LISTENS = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}
"""State of a socket that takes what comes; of one that is connected to somebody it is another."""
ACCEPTS = 0x10000


@dataclass(frozen=True, slots=True)
class Listening:
    """A socket that a stranger could reach.

    Attributes:
        kind: "tcp", "udp" or "unix".
        address: Of an interface, or the path; "@" begins an abstract name.
        port: 0 for unix domains.
        pid: A process that holds it.
    """

    kind: str
    address: str
    port: int
    pid: int


def listening_sockets(pids: Iterable[int]) -> set[Listening]:
    """What these processes listen on; one that has ended has nothing."""
    found: set[Listening] = set()
    for pid in pids:
        held = _inodes(pid)
        with suppress(OSError):  # it has ended
            for table, state in LISTENS.items():
                for fields in _rows(pid, table):
                    if fields[3] == state and fields[9] in held:
                        address, _, port = fields[1].partition(":")
                        found.add(Listening(table.removesuffix("6"), _address(address), int(port, 16), pid))
            for fields in _rows(pid, "unix"):
                if int(fields[3], 16) & ACCEPTS and fields[6] in held:
                    found.add(Listening("unix", "".join(fields[7:]), 0, pid))
    return found


def _rows(pid: int, table: str) -> list[list[str]]:
    """Rows of a table of this process's network namespace."""
    return [line.split() for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]]


def _inodes(pid: int) -> set[str]:
    inodes = set()
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                inodes.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
    return inodes


def _address(digits: str) -> str:
    words = struct.unpack(f">{len(digits) // 8}I", bytes.fromhex(digits))
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))
