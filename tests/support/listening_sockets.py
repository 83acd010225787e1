"""Listening TCP, UDP and Unix sockets by process, from the kernel."""

import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LISTENS = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}
"""State of a socket that accepts connections or datagrams; connected sockets have another."""
ACCEPTS = 0x10000


@dataclass(frozen=True, slots=True)
class Listening:
    """A socket that others can reach.

    Attributes:
        kind: "tcp", "udp" or "unix".
        address: Address of an interface, or a path; "@" starts an abstract name.
        port: Port; 0 for Unix sockets.
        pid: A process that has it open.
    """

    kind: str
    address: str
    port: int
    pid: int


def listening_sockets(pids: Iterable[int]) -> set[Listening]:
    """Return the listening sockets of these processes; a process that has ended has none."""
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
    """Return the rows of a table of this process's network namespace."""
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
