"""Client of MCP servers over stdin and stdout or streamable HTTP, using the official library."""

import asyncio
import atexit
import base64
import contextlib
import json
import os
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import structlog

from rl_core.cluster.processes import guard
from rl_core.data import Json
from rl_core.errors import MissingExtraError, SettingsError, ToolError
from rl_core.registry import unknown_name
from rl_core.secret_settings import hide
from rl_rollout.rewards.outputs import preview_error
from rl_rollout.tools import server_process
from rl_rollout.tools.mcp_options import McpServerOptions
from rl_rollout.tools.non_protocol_output import TELL, drop_tracebacks
from rl_rollout.tools.protocol import TextAndImages, Tool

try:
    from mcp import Client, StdioServerParameters, stdio_client
    from mcp.client.streamable_http import streamable_http_client
except ImportError as error:
    raise MissingExtraError("MCP servers need the library mcp. Install rl-rollout[mcp] as the README says.") from error

__all__ = ["McpServer"]

log = structlog.get_logger(__name__)

IS_LINUX = sys.platform == "linux"
STDERR_CHARS = 400
CLOSE_S = 15.0
"""Maximum seconds to wait for a server's last coroutine, and for its thread."""
T = TypeVar("T")


class LoopThread:
    """An event loop in a daemon thread. It keeps running while other loops are blocked."""

    def __init__(self, name: str) -> None:
        """Start the thread."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread and wait for it. Cancelling the wait cancels the coroutine."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Run a last coroutine, and end the thread."""
        ending = asyncio.run_coroutine_threadsafe(last, self._loop)
        with contextlib.suppress(TimeoutError):
            ending.result(CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()


class McpTool:
    """A tool of a server, which checks its own parameters. Implements `Tool`."""

    def __init__(self, server: "McpServer", description: Any) -> None:
        """Read the server's description of the tool."""
        self._server = server
        self.name = str(description.name)
        self.description = str(description.description or description.title or "")
        self.parameters: Mapping[str, Json] = dict(description.input_schema)

    async def call(self, arguments: Mapping[str, Json]) -> str | TextAndImages:
        """Run one call, as `Tool.call` does.

        Raises:
            ToolError: The tool failed, or its server died or cannot be restarted.
        """
        return await self._server.call(self.name, arguments)


class McpServer:
    """One MCP server. Its event loop runs in a separate thread, so that blocking code elsewhere does not delay it.

    A server that dies fails its running calls. The next call restarts it, with a longer pause each time that it dies
    without having answered a call.
    """

    def __init__(self, name: str, options: McpServerOptions) -> None:
        """Store the options. Nothing starts yet.

        Args:
            name: Name for messages.
            options: How to start or reach the server.
        """
        self._name = name
        self._options = options
        self._thread: LoopThread | None = None
        self._connection: _ServerConnection | None = None
        self._open: set[_ServerConnection] = set()
        self._starting: asyncio.Task[_ServerConnection] | None = None
        self._probing: asyncio.Task[None] | None = None
        self._failures = 0
        self._not_before = 0.0
        self._reason = ""
        self._has_warned = False
        self._has_started = False

    async def start(self) -> list[Tool]:
        """Start the server, and list its tools. If it dies later, a call to a tool restarts it.

        Raises:
            SettingsError: It does not start, has no tools, or lacks a tool that the options name.
        """
        self._options.check_folder(self._name)
        drop_tracebacks()
        if self._thread is None:
            self._thread = LoopThread(f"mcp-{self._name}")
            atexit.register(self.close)
        try:
            connection = await self._thread.run(self._connected())
        except ToolError as error:
            raise SettingsError(f"{str(error).rstrip('.')}. {self._options.advice}") from error
        self._has_started = True
        tools: dict[str, Tool] = {tool.name: McpTool(self, tool) for tool in connection.tools}
        if not tools:
            raise SettingsError(f"MCP server {self._name!r} has no tools. Use a server that has tools, or remove it.")
        for wanted in self._options.tools:
            if wanted not in tools:
                raise SettingsError(f"MCP server {self._name!r}: {unknown_name('tool', wanted, tools)}")
        return [tool for name, tool in tools.items() if not self._options.tools or name in self._options.tools]

    async def call(self, tool: str, arguments: Mapping[str, Json]) -> str | TextAndImages:
        """Call a tool. There is no deadline; cancel the call instead.

        Raises:
            ToolError: The tool failed, or the server died or is closed.
        """
        if self._thread is None:
            raise ToolError(f"the server {self._name!r} of this tool is closed.")
        return await self._thread.run(self._call(tool, dict(arguments)))

    def close(self) -> None:
        """End the server and everything that it started. Can be called twice."""
        thread, self._thread = self._thread, None
        if thread is not None:
            atexit.unregister(self.close)
            thread.close(self._disconnect())

    async def _call(self, tool: str, arguments: dict[str, Json]) -> str | TextAndImages:
        connection = await self._connected()
        try:
            result = await connection.client.call_tool(tool, arguments)
        except asyncio.CancelledError:
            self._probe(connection)
            raise
        except Exception as error:  # the transports raise many types
            if await self._is_alive(connection):
                self._failures = 0
                raise ToolError(self._hide(f"{tool}: {_leaf(error)}")) from error
            await self._drop(connection, f"died during a call of {tool} ({_leaf(error)}){connection.last_words()}")
            raise ToolError(f"the server of {tool} died; the next call starts it again.") from error
        self._failures = 0
        text = "\n".join(_block_text(block) for block in result.content if block.type != "image")
        if not result.content and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        if result.is_error:
            raise ToolError(text or f"{tool} failed without a message.")
        images = tuple(base64.b64decode(block.data) for block in result.content if block.type == "image")
        return TextAndImages(text, images) if images else text

    async def _connected(self) -> "_ServerConnection":
        if self._connection is not None:
            return self._connection
        if self._starting is None:
            remaining_s = self._not_before - time.monotonic()
            if remaining_s > 0:
                raise ToolError(
                    f"the server {self._name!r} is down ({self._reason}); it can be restarted in {remaining_s:.0f} s."
                )
            self._starting = asyncio.create_task(self._open_connection())
            self._starting.add_done_callback(
                lambda task: task.cancelled() or task.exception()
            )  # marks it as retrieved, in case nothing waits
        return await asyncio.shield(self._starting)  # if this call is cancelled, the next one uses the start

    async def _open_connection(self) -> "_ServerConnection":
        connection = _ServerConnection(self._options, on_garbage=self._warn_of_garbage)
        self._open.add(connection)
        try:
            await connection.open()
        except Exception as error:
            self._open.discard(connection)
            self._failed(f"did not start: {_leaf(error)}{connection.last_words()}")
            raise ToolError(f"MCP server {self._name!r} {self._reason}") from error
        else:
            self._connection = connection
            return connection
        finally:
            self._starting = None

    def _warn_of_garbage(self, line: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning("mcp_server_wrote_no_message", server=self._name, line=self._hide(line))

    def _hide(self, text: str) -> str:
        """Remove the server's secrets from a text."""
        return hide(text, {"env": self._options.env, "headers": self._options.headers, "url": self._options.url or ""})

    def _probe(self, connection: "_ServerConnection") -> None:
        """Check in the background whether a server is alive after a call timed out."""
        if connection is self._connection and (self._probing is None or self._probing.done()):
            self._probing = asyncio.create_task(self._drop_if_dead(connection))

    async def _drop_if_dead(self, connection: "_ServerConnection") -> None:
        if not await self._is_alive(connection):
            await self._drop(connection, f"hangs{connection.last_words()}")

    async def _is_alive(self, connection: "_ServerConnection") -> bool:
        try:
            async with asyncio.timeout(self._options.probe_timeout_s):
                await connection.client.list_tools(cache_mode="bypass")
        except Exception:
            return False
        return True

    async def _drop(self, connection: "_ServerConnection", reason: str) -> None:
        if self._connection is not connection:
            return
        self._connection = None
        self._failed(reason)
        await connection.close()
        self._open.discard(connection)

    def _failed(self, reason: str) -> None:
        pause_s = min(float(1 << min(self._failures - 1, 16)), self._options.max_pause_s) if self._failures else 0.0
        self._failures += 1
        self._not_before = time.monotonic() + pause_s
        self._reason = reason = self._hide(reason)
        if self._has_started:  # otherwise `start` raises it
            log.warning("mcp_server_failed", server=self._name, reason=reason, failures_in_a_row=self._failures)

    async def _disconnect(self) -> None:
        for task in (self._probing, self._starting):
            if task is not None:
                task.cancel()
        self._connection = None
        await asyncio.gather(*(connection.close() for connection in self._open))
        self._open.clear()


class _ServerConnection:
    """A client that is entered and left in one task, as the library requires."""

    def __init__(self, options: McpServerOptions, *, on_garbage: Callable[[str], None]) -> None:
        self.client: Any = None
        self.tools: list[Any] = []
        self._options = options
        self._stop = asyncio.Event()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None
        self._stderr: Any = None
        self._words = ""
        self._status = ""
        self._on_garbage = on_garbage
        self._mark = uuid.uuid4().hex

    async def open(self) -> None:
        """Start the server, and list its tools. On an error, the server is ended before the error is raised."""
        self._task = asyncio.create_task(self._live())
        try:
            async with asyncio.timeout(self._options.start_timeout_s):
                await asyncio.shield(self._ready)
        except BaseException as error:
            await self.close()
            if isinstance(error, TimeoutError) and not self._ready.done():
                raise TimeoutError(f"no answer within {self._options.start_timeout_s:g} s") from None
            raise

    async def close(self) -> None:
        """End the server."""
        if self._task is not None:
            if self._ready.done():
                self._stop.set()
            else:
                self._task.cancel()
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await asyncio.shield(self._task)

    def last_words(self) -> str:
        """Return the end of the server's stderr, and its last HTTP status that was an error."""
        if self._stderr is not None and not self._stderr.closed:
            # pread, because the server writes at the shared file position
            size = os.fstat(self._stderr.fileno()).st_size
            written = os.pread(self._stderr.fileno(), STDERR_CHARS, max(0, size - STDERR_CHARS))
            self._words = _without_traceback(written.decode(errors="replace").strip())
        return (f". It wrote: {self._words}" if self._words else "") + self._status

    async def _live(self) -> None:
        TELL.set(self._on_garbage)
        with tempfile.TemporaryFile("w+", errors="replace") as self._stderr:
            try:
                async with self._transport() as transport, Client(transport) as client:
                    self.client = client
                    self.tools = await _all_tools(client)
                    self._ready.set_result(None)
                    await self._stop.wait()
            except BaseException as error:
                if self._ready.done() or isinstance(error, asyncio.CancelledError):
                    raise
                self._ready.set_exception(error)
            finally:
                self.last_words()
                if IS_LINUX and self._options.command:
                    guard.end_family(guard.ProcessFamily(self._mark))

    @asynccontextmanager
    async def _transport(self) -> AsyncIterator[Any]:
        options = self._options
        if options.url is not None:
            import httpx2  # comes with mcp

            async def note_status(response: httpx2.Response) -> None:
                if response.status_code >= 400:
                    self._status = f". It answered HTTP {response.status_code} {response.reason_phrase}".rstrip()

            timeout = httpx2.Timeout(options.start_timeout_s, read=None)  # calls have their own deadlines
            async with httpx2.AsyncClient(
                headers=dict(options.headers), timeout=timeout, event_hooks={"response": [note_status]}
            ) as http_client:
                yield streamable_http_client(options.url, http_client=http_client)
            return
        command, *arguments = _guarded(options.command, mark=self._mark)
        marks = f"{os.environ.get(guard.MARK_VARIABLE, '')}:{self._mark}"
        parameters = StdioServerParameters(
            command=command,
            args=arguments,
            env={**options.env, guard.MARK_VARIABLE: marks},
            cwd=options.cwd,
            encoding_error_handler="replace",
        )
        yield stdio_client(parameters, errlog=self._stderr)


def _guarded(command: tuple[str, ...], *, mark: str) -> tuple[str, ...]:
    """Wrap a command so that it ends with this process and leaves nothing. See `server_process`."""
    if command[0] == "python":
        command = (sys.executable, *command[1:])
    if not IS_LINUX:
        return command
    return (sys.executable, "-I", "-S", server_process.__file__, guard.__file__, mark, str(os.getpid()), *command)


async def _all_tools(client: Any) -> list[Any]:
    tools: list[Any] = []
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if not cursor:
            return tools


def _block_text(block: Any) -> str:
    """Return a block of a result as text, or its type and kind if it is not text."""
    if block.type == "text":
        return str(block.text)
    if block.type == "resource" and hasattr(block.resource, "text"):
        return str(block.resource.text)
    kind = getattr(block, "mime_type", None) or getattr(block, "uri", None) or ""
    return f"[{block.type} {kind}]".replace(" ]", "]")


def _without_traceback(words: str) -> str:
    """Reduce a text that ends in a Python traceback to the traceback's last line and last location."""
    lines = words.splitlines()
    places = [line.strip() for line in lines if line.startswith('  File "') and '"<frozen ' not in line]
    return f"{lines[-1]} ({places[-1]})" if places else words


def _leaf(error: BaseException) -> str:
    """Describe the first error of a group in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return preview_error(error)
