"""A proxy that refuses all connections, for tests that must not use the network."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

DEADLINE_S = 60.0
LAST = b"the test"


@contextmanager
def counting_proxy() -> Iterator[tuple[dict[str, str], list[bytes]]]:
    """Yield variables that direct Python and Go clients to this proxy, and the beginnings of their requests.

    The list is complete after the block.
    """
    callers: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        thread = threading.Thread(target=_count, args=(proxy, callers), daemon=True)
        thread.start()
        address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        names = ("http_proxy", "https_proxy", "all_proxy")
        yield {name: address for lower in names for name in (lower, lower.upper())}, callers
        with socket.create_connection(proxy.getsockname(), timeout=DEADLINE_S) as connection:  # after all others
            connection.sendall(LAST)
        thread.join(DEADLINE_S)
        assert callers.pop() == LAST


def _count(proxy: socket.socket, callers: list[bytes]) -> None:
    while LAST not in callers:
        connection, _ = proxy.accept()
        connection.settimeout(DEADLINE_S)
        with connection:
            callers.append(connection.recv(200))
