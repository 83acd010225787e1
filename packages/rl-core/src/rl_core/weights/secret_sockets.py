"""TCP between two processes that share a secret, on one address; unknown peers receive only 32 random bytes.

Each side sends a nonce and proves the secret with an HMAC of both nonces before either reads anything else. Later
traffic is neither encrypted nor signed: anyone who can read or change the network traffic between two machines can also
read or change it here.
"""

import hmac
import ipaddress
import json
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from rl_core.errors import SettingsError

SECRET_BYTES = NONCE_BYTES = PROOF_BYTES = 32
MAX_MESSAGE_BYTES = 1 << 16
MAX_STRANGERS = 64
"""Maximum number of connections that have not proved the secret; beyond it, the oldest is closed."""
HANDSHAKE_S = 10.0
REOPENS_S = 10.0
"""Maximum time that a port may be closed before its sender counts as ended; it listens only for missing receivers."""
PAUSE_S = 0.02


class SecretListener:
    """Accepts connections on one address; each one that proves the secret is handled in its own thread."""

    def __init__(self, host: str, secret: bytes, on_known: Callable[[socket.socket], None]) -> None:
        """Bind a free port and listen.

        Args:
            host: Address or name of this machine.
            secret: Secret that a connection must prove.
            on_known: Called with each connection that proved the secret, in its own thread; closes it at the end.

        Raises:
            SettingsError: This machine does not have the address, or it is a wildcard address.
        """
        self._socket = _bind(host)
        self.port: int = self._socket.getsockname()[1]
        self._secret, self._on_known = secret, on_known
        self._changed = threading.Condition()
        self._strangers: deque[socket.socket] = deque()
        self._is_open = self._is_closed = False
        self.set_open(True)
        self._thread = threading.Thread(target=self._accept, name="accept receivers of weights", daemon=True)
        self._thread.start()

    def set_open(self, is_open: bool) -> None:
        """Listen, or refuse all connections while keeping the port. No effect once closed."""
        with self._changed:
            if is_open == self._is_open or self._is_closed:
                return
            self._is_open = is_open
            # Reused while it listens, because connections of this port may still exist; not otherwise, because another
            # process could take it.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, is_open)
            if is_open:
                self._socket.listen(socket.SOMAXCONN)
            else:
                self._socket.shutdown(socket.SHUT_RDWR)
            self._changed.notify_all()

    def close(self) -> None:
        """Refuse all connections from now on. Can be called twice."""
        self.set_open(False)
        with self._changed:
            self._is_closed = True
            strangers = list(self._strangers)
            self._changed.notify_all()
        for connection in strangers:
            hang_up(connection)
        self._thread.join()
        self._socket.close()

    def _accept(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_open or self._is_closed)
                if self._is_closed:
                    return
            try:
                connection, _ = self._socket.accept()
                self._admit(connection)
            except (OSError, RuntimeError):  # closed, or out of descriptors or threads
                time.sleep(PAUSE_S)

    def _admit(self, connection: socket.socket) -> None:
        with self._changed:
            self._strangers.append(connection)
            oldest = self._strangers[0] if len(self._strangers) > MAX_STRANGERS else None
        if oldest is not None:
            self._forget(oldest)
            hang_up(oldest)
        try:
            threading.Thread(target=self._meet, args=(connection,), name="meet a receiver", daemon=True).start()
        except RuntimeError:
            self._forget(connection)
            connection.close()
            raise

    def _meet(self, connection: socket.socket) -> None:
        try:
            _demand_proof(connection, self._secret, ends_at=time.monotonic() + HANDSHAKE_S)
        except OSError:
            connection.close()
            return
        finally:
            self._forget(connection)
        self._on_known(connection)

    def _forget(self, connection: socket.socket) -> None:
        with self._changed, suppress(ValueError):
            self._strangers.remove(connection)


def connect(host: str, port: int, secret: bytes, *, deadline_s: float) -> socket.socket:
    """Connect to a `SecretListener`; both sides prove the secret.

    Raises:
        OSError: No process listens, or the listener does not know the secret; TimeoutError if it does not answer.
    """
    reopens_at = time.monotonic() + min(REOPENS_S, deadline_s)
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=deadline_s)
            try:
                _prove(connection, secret, ends_at=time.monotonic() + deadline_s)
            except BaseException:
                connection.close()
                raise
        except ConnectionError:
            if time.monotonic() > reopens_at:
                raise
            time.sleep(PAUSE_S)
        else:
            return connection


def send(connection: socket.socket, content: bytes | memoryview, *, ends_at: float) -> None:
    """Send everything.

    Raises:
        OSError: The other side has ended; TimeoutError if it stopped reading.
    """
    connection.settimeout(_left_s(ends_at))
    connection.sendall(content)


def receive_into(connection: socket.socket, content: memoryview, *, ends_at: float) -> None:
    """Fill a buffer.

    Raises:
        OSError: The other side has ended; TimeoutError if it stopped sending.
    """
    while len(content):
        connection.settimeout(_left_s(ends_at))
        count = connection.recv_into(content)
        if not count:
            raise ConnectionResetError("the other side closed the connection")
        content = content[count:]


def is_readable(connection: socket.socket) -> bool:
    """Return True if the other side has sent unread data, or has ended."""
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        return bool(selector.select(0))


def wait_readable(connection: socket.socket, *, unless: socket.socket | None) -> None:
    """Wait until the other side has sent data or ended, or until another connection has.

    Raises:
        ConnectionResetError: The peer of the other connection has ended.
    """
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        if unless is not None:
            selector.register(unless, selectors.EVENT_READ)
        ready = [key.fileobj for key, _ in selector.select()]
    if connection not in ready:
        raise ConnectionResetError("its engine disconnected")


def send_message(connection: socket.socket, message: Mapping[str, Any], *, deadline_s: float) -> None:
    """Send a JSON object; raises as `send`."""
    content = json.dumps(message).encode()
    send(connection, len(content).to_bytes(4, "big") + content, ends_at=time.monotonic() + deadline_s)


def receive_message(connection: socket.socket, *, deadline_s: float) -> dict[str, Any]:
    """Receive a JSON object.

    Args:
        connection: The connection.
        deadline_s: Maximum wait; infinity waits while the other side is alive.

    Raises:
        OSError: As in `receive_into`; ConnectionError also for an invalid message.
    """
    ends_at = time.monotonic() + deadline_s
    size = int.from_bytes(_receive(connection, 4, ends_at=ends_at), "big")
    if size > MAX_MESSAGE_BYTES:
        raise ConnectionError(f"a message must have at most {MAX_MESSAGE_BYTES} bytes; found {size}")
    content = _receive(connection, size, ends_at=ends_at)
    try:
        message = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConnectionError(f"a message must be JSON; found {content[:80]!r}") from error
    if not isinstance(message, dict):
        raise ConnectionError(f"a message must be a JSON object; found {content[:80]!r}")
    return message


def hang_up(connection: socket.socket) -> None:
    """Shut down a connection that another thread may be waiting on; that thread then closes it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _bind(host: str) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host or "missing", 0, type=socket.SOCK_STREAM)[0]
        if ipaddress.ip_address(str(address[0]).partition("%")[0]).is_unspecified:
            raise OSError("it is a wildcard address")
        with socket.socket(family) as probe:
            probe.bind(address)
            place = probe.getsockname()
        bound = socket.socket(family)
        bound.bind(place)  # explicit port: the system reclaims a port of its own choice once listening ends
    except OSError as error:
        raise SettingsError(
            f"weights are sent from one address of this machine; found {host!r} ({error}). Set weights.host to an "
            "address at which engines can reach this machine."
        ) from error
    return bound


def _prove(connection: socket.socket, secret: bytes, *, ends_at: float) -> None:
    theirs = _receive(connection, NONCE_BYTES, ends_at=ends_at)
    ours = secrets.token_bytes(NONCE_BYTES)
    send(connection, ours + _proof(secret, b"receiver", theirs + ours), ends_at=ends_at)
    if not hmac.compare_digest(
        _receive(connection, PROOF_BYTES, ends_at=ends_at), _proof(secret, b"sender", theirs + ours)
    ):
        raise ConnectionError("the other side does not know the secret of this transport")
    _watch(connection)


def _demand_proof(connection: socket.socket, secret: bytes, *, ends_at: float) -> None:
    ours = secrets.token_bytes(NONCE_BYTES)
    send(connection, ours, ends_at=ends_at)
    answer = _receive(connection, NONCE_BYTES + PROOF_BYTES, ends_at=ends_at)
    theirs, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(secret, b"receiver", ours + theirs)):
        raise ConnectionError("the other side does not know the secret of this transport")
    send(connection, _proof(secret, b"sender", ours + theirs), ends_at=ends_at)
    _watch(connection)


def _proof(secret: bytes, side: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, side + nonces, "sha256")


def _watch(connection: socket.socket) -> None:
    """Detect a lost machine within 11 s, and send small messages immediately."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _receive(connection: socket.socket, size: int, *, ends_at: float) -> bytes:
    content = bytearray(size)
    receive_into(connection, memoryview(content), ends_at=ends_at)
    return bytes(content)


def _left_s(ends_at: float) -> float | None:
    left_s = ends_at - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    return None if left_s == float("inf") else left_s
