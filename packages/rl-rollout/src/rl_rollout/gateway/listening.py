"""An HTTP/1.1 server that slow clients cannot block: connections are limited in number and in waiting time."""

import asyncio
import errno
import resource
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import structlog
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from rl_core.errors import NotReadyError, SettingsError
from rl_rollout.gateway.refusals import FaultLog

log = structlog.get_logger(__name__)

START_DEADLINE_S = 30.0
CLOSE_DEADLINE_S = 5
BACKLOG = 128
"""Maximum number of connections that the event loop accepts at once, before they are counted."""


class Listener:
    """Serves an application on a socket."""

    def __init__(
        self,
        application: Starlette,
        *,
        max_connections: int,
        patience_s: float,
        every_second: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Prepare the server, without listening yet.

        Args:
            application: The application to serve.
            max_connections: Beyond this number, connections that have waited longest for their client are closed.
                Capped at half the process's limit on open files.
            patience_s: Maximum wait in seconds for a complete request head, or for a client to read more of its answer.
            every_second: Awaited about once per second.
        """
        most = max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2, 1)
        if max_connections > most:
            log.info("gateway_connections_bounded", max_connections=most, asked=max_connections, by="ulimit -n")
        self._patience_s, self._every_second, self._faults = patience_s, every_second, FaultLog()
        self._server = _Server(
            uvicorn.Config(
                application,
                http=_Connection,  # h11 limits the size of request heads; httptools, if installed, does not
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                limit_concurrency=min(max_connections, most) + 1,
                timeout_keep_alive=60,
                timeout_graceful_shutdown=CLOSE_DEADLINE_S,
                timeout_notify=1,
                callback_notify=self._notified,
            )
        )
        self._socket: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None

    def bind(self, host: str, port: int) -> None:
        """Bind the address; later calls have no effect.

        Raises:
            SettingsError: The address is not available.
        """
        try:
            self._socket = self._socket or socket.create_server((host, port), backlog=BACKLOG)
        except (OSError, OverflowError) as error:
            is_taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            advice = " Choose another port, or 0 for a free one." if is_taken else ""
            reason = str(error).rstrip(".")
            raise SettingsError(f"the server cannot listen on {host}:{port}: {reason}.{advice}") from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it; asyncio omits it

    async def start(self) -> int:
        """Listen on the bound address and return its port."""
        listening = self._socket
        if listening is None:
            raise NotReadyError("the gateway has no address. Call bind first.")
        self._serving = asyncio.ensure_future(self._server.serve(sockets=[listening]))
        async with asyncio.timeout(START_DEADLINE_S):
            while not self._server.started:
                if self._serving.done():
                    self._serving.result()
                    raise NotReadyError("the gateway's server stopped during its start.")
                await asyncio.sleep(0.005)
        return int(listening.getsockname()[1])

    async def close(self) -> None:
        """Stop listening; running requests get CLOSE_DEADLINE_S to finish. Safe to call twice."""
        serving, self._serving = self._serving, None
        self._server.should_exit = True
        try:
            if serving is not None:
                await serving
        finally:  # uvicorn does not close the socket if the event loop ends first
            if self._socket is not None:
                self._socket.close()
                self._socket = None

    async def _notified(self) -> None:
        now = asyncio.get_running_loop().time()
        for connection in list(self._server.server_state.connections):
            if isinstance(connection, _Connection) and connection.waited_s(now) > self._patience_s:
                connection.drop()
        if self._every_second is not None:
            try:
                await self._every_second()
            except Exception as error:
                self._faults.note("gateway_tick_failed", error)


class _Server(uvicorn.Server):
    """A server that does not handle the process's signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield


class _Connection(H11Protocol):
    """A connection that measures how long it has waited for its client."""

    def connection_made(self, transport: Any) -> None:
        """Accept a connection; if there are too many, close those that have waited longest."""
        super().connection_made(transport)
        self._state: tuple[Any, ...] = ()
        self._since = self.loop.time()
        if len(self.connections) >= (self.limit_concurrency or 0):
            idle = (one for one in self.connections if isinstance(one, _Connection) and one.is_idle and one is not self)
            longest = sorted(idle, key=lambda one: one._since)
            for one in longest[: len(longest) // 4 + 1]:  # several at once, so that a flood does not sort each time
                one.drop()

    @property
    def is_idle(self) -> bool:
        """True if no request is in progress."""
        return self.cycle is None or self.cycle.response_complete

    def waited_s(self, now: float) -> float:
        """Return the seconds since the last change that depends on the client."""
        unsent = self.transport.get_write_buffer_size()
        state = (self.cycle, self.is_idle, unsent)
        if state != self._state or not (self.is_idle or unsent):
            self._state, self._since = state, now
        return now - self._since

    def drop(self) -> None:
        """Close the connection immediately and discard unsent data."""
        self.connections.discard(self)
        self.transport.abort()
