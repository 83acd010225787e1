"""TCP between two processes that share a secret, on one address; unknown peers receive only 32 random bytes.

Each side sends a nonce and proves the secret with an HMAC of both nonces before either reads anything else. Later
traffic is neither encrypted nor signed: anyone who can read or change the network traffic between two machines can also
read or change it here.
"""

import hmac
import ipaddress
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import msgspec

from rl_core.errors import SettingsError

MessageT = TypeVar("MessageT")

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
            if len(self._strangers) > MAX_STRANGERS:
                hang_up(self._strangers.popleft())
        try:
            threading.Thread(target=self._meet, args=(connection,), name="meet a receiver", daemon=True).start()
        except RuntimeError:
            self._forget(connection)
            connection.close()
            raise

    def _meet(self, connection: socket.socket) -> None:
        try:
            _demand_proof(connection, self._secret)
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
                _prove(connection, secret, deadline_s=deadline_s)
            except BaseException:
                connection.close()
                raise
        except ConnectionError:
            if time.monotonic() > reopens_at:
                raise
            time.sleep(PAUSE_S)
        else:
            return connection


def send(connection: socket.socket, content: bytes | memoryview, *, deadline_s: float) -> None:
    """Send everything.

    Raises:
        OSError: The other side has ended; TimeoutError if it stopped reading.
    """
    connection.settimeout(deadline_s)
    connection.sendall(content)


def receive_into(connection: socket.socket, content: memoryview, *, deadline_s: float) -> None:
    """Fill a buffer.

    Raises:
        OSError: The other side has ended; TimeoutError if it stopped sending.
    """
    ends_at = time.monotonic() + deadline_s
    while len(content):
        left_s = ends_at - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(left_s)
        count = connection.recv_into(content)
        if not count:
            raise ConnectionResetError("the other side closed the connection")
        content = content[count:]


def receive(connection: socket.socket, size: int, *, deadline_s: float) -> bytes:
    """Receive bytes; raises as `receive_into`."""
    content = bytearray(size)
    receive_into(connection, memoryview(content), deadline_s=deadline_s)
    return bytes(content)


def send_message(connection: socket.socket, message: msgspec.Struct, *, deadline_s: float) -> None:
    """Send a message; raises as `send`."""
    content = msgspec.json.encode(message)
    send(connection, len(content).to_bytes(4, "big") + content, deadline_s=deadline_s)


def receive_message(connection: socket.socket, decode: Callable[[bytes], MessageT], *, deadline_s: float) -> MessageT:
    """Receive a message, and decode it with a function of `rl_core.weights.messages`.

    Raises:
        OSError: As in `receive_into`; ConnectionError also for any other message.
    """
    size = int.from_bytes(receive(connection, 4, deadline_s=deadline_s), "big")
    if size > MAX_MESSAGE_BYTES:
        raise ConnectionError(f"a message must have at most {MAX_MESSAGE_BYTES} bytes; found {size}")
    content = receive(connection, size, deadline_s=deadline_s)
    try:
        return decode(content)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConnectionError(f"a message must be JSON with its fields; found {content[:80]!r}: {error}") from error


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


def _prove(connection: socket.socket, secret: bytes, *, deadline_s: float) -> None:
    theirs = receive(connection, NONCE_BYTES, deadline_s=deadline_s)
    ours = secrets.token_bytes(NONCE_BYTES)
    send(connection, ours + _proof(secret, b"receiver", theirs + ours), deadline_s=deadline_s)
    _check(receive(connection, PROOF_BYTES, deadline_s=deadline_s), _proof(secret, b"sender", theirs + ours))
    _watch(connection)


def _demand_proof(connection: socket.socket, secret: bytes) -> None:
    """Demand the proof. What is sent fits into the kernel's buffer, so only the answer takes time."""
    ours = secrets.token_bytes(NONCE_BYTES)
    send(connection, ours, deadline_s=HANDSHAKE_S)
    answer = receive(connection, NONCE_BYTES + PROOF_BYTES, deadline_s=HANDSHAKE_S)
    theirs, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    _check(proof, _proof(secret, b"receiver", ours + theirs))
    send(connection, _proof(secret, b"sender", ours + theirs), deadline_s=HANDSHAKE_S)
    _watch(connection)


def _proof(secret: bytes, side: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, side + nonces, "sha256")


def _check(found: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(found, expected):
        raise ConnectionError("the other side does not know the secret of this transport")


def _watch(connection: socket.socket) -> None:
    """Detect a lost machine within 11 s, and send small messages immediately."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
