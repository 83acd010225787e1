"""A local server of a page that updates while runs write."""

import hmac
import json
import secrets
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import structlog

from rl_core.errors import RLError
from rl_core.files import temporary_folder
from rl_metrics.report.packing import folder_blobs
from rl_metrics.report.page import page_head, page_tail, run_names
from rl_metrics.report.writing import MAX_TRAJECTORIES, check_request, pack_runs
from rl_metrics.run_files.run_record import FILES, open_run

log = structlog.get_logger(__name__)

LOOPBACK = "127.0.0.1"
LOOK_EVERY_S = 1.0
"""Interval of checks of the runs' files, in seconds."""

BUSY_SHARE = 0.2
"""Maximum share of time spent on updates."""

HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class ReportServer:
    """Serves the page of runs under a secret address, from memory and a temporary folder."""

    def __init__(self, runs: Sequence[Path], *, port: int = 0, max_trajectories: int = MAX_TRAJECTORIES) -> None:
        """Pack the runs and start the server.

        Args:
            runs: Paths accepted by `open_run`.
            port: Port on loopback; 0 chooses a free one.
            max_trajectories: Maximum number of trajectories per run; larger runs are sampled.

        Raises:
            SettingsError: No run was given, or max_trajectories is below 1.
            DataError: A path is not a run.
            OSError: The port is taken, or a file cannot be read.
        """
        check_request(runs, max_trajectories)
        self._runs = tuple(runs)
        self._max_trajectories = max_trajectories
        self._token = secrets.token_urlsafe(16)
        names = run_names([open_run(path).name for path in runs])
        self.page = page_head(", ".join(names), is_live=True) + page_tail(None)
        self._is_over = threading.Event()
        self._before: set[str] = set()
        self._names: set[str] = set()
        self.manifest = b""
        with ExitStack() as stack:
            self._folder = stack.enter_context(temporary_folder("rl-report-"))
            self._server = _Server((LOOPBACK, port), self)
            self._seen = self._signature()
            self._renew()
            self._remove_folder = weakref.finalize(self, stack.pop_all().close)
        self._threads = [
            threading.Thread(target=self._server.serve_forever, args=(0.1,), name="report-server", daemon=True),
            threading.Thread(target=self._follow, name="report-renewal", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def url(self) -> str:
        """The page's address, which contains a secret; other addresses return nothing."""
        return f"http://{LOOPBACK}:{self.port}/{self._token}/"

    @property
    def port(self) -> int:
        """Port on loopback."""
        port: int = self._server.server_address[1]
        return port

    def wait(self) -> None:
        """Wait until `close` is called; Ctrl-C raises KeyboardInterrupt."""
        self._is_over.wait()

    def close(self) -> None:
        """Stop the server. Idempotent."""
        if self._is_over.is_set():
            return
        self._is_over.set()
        self._server.shutdown()
        self._server.server_close()
        for thread in self._threads:
            thread.join()
        self._remove_folder()

    def answer(self, path: str) -> tuple[bytes, str] | None:
        """Return content and type of the resource at a path, or None without one."""
        _, _, rest = path.partition("/")
        token, _, name = rest.partition("/")
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            return None
        if name == "":
            return self.page, "text/html; charset=utf-8"
        if name == "manifest":
            return self.manifest, "application/json"
        folder, _, blob = name.partition("/")
        if folder == "blob" and blob in self._names | self._before:
            return (self._folder / blob).read_bytes(), "application/octet-stream"
        return None

    def _follow(self) -> None:
        """Update the report after a run has written, within BUSY_SHARE of the time."""
        pause_s = LOOK_EVERY_S
        while not self._is_over.wait(pause_s):
            began = time.monotonic()
            signature = self._signature()
            if signature != self._seen:
                self._seen = signature
                try:
                    self._renew()
                except (RLError, OSError) as error:
                    log.warning("report_not_renewed", error=str(error))
            pause_s = max(LOOK_EVERY_S, (time.monotonic() - began) * (1 / BUSY_SHARE - 1))

    def _renew(self) -> None:
        names: set[str] = set()
        sink = folder_blobs(self._folder, names)
        manifest = pack_runs([open_run(path) for path in self._runs], sink, max_trajectories=self._max_trajectories)
        gone = self._before - self._names - names
        self._before, self._names = self._names, names  # a page may still ask for parts of the last report
        self.manifest = json.dumps(manifest).encode()
        for name in gone:
            (self._folder / name).unlink(missing_ok=True)

    def _signature(self) -> list[tuple[str, int, int]]:
        """Return sizes and times of the runs' files, which show whether any was written."""
        found = []
        for path in self._runs:
            folder = path if path.is_dir() else path.parent
            for file in (path, *(folder / name for name in FILES)):
                with suppress(OSError):
                    state = file.stat()
                    found.append((str(file), state.st_size, state.st_mtime_ns))
        return found


class _Server(ThreadingHTTPServer):
    """HTTP server of a report."""

    def __init__(self, address: tuple[str, int], report: ReportServer) -> None:
        self.report = report
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors, such as a disconnected reader, without output to the terminal."""


class _Handler(BaseHTTPRequestHandler):
    """Handles the requests of a report's readers."""

    server: _Server
    timeout = 30.0
    server_version = "rl-metrics"
    sys_version = ""

    def do_GET(self) -> None:
        """Send the page or one of its parts."""
        port = self.server.report.port
        if self.headers.get("Host", "") not in (f"{LOOPBACK}:{port}", f"localhost:{port}"):  # DNS rebinding
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST)
            return
        found = None
        with suppress(OSError):  # a part that was dropped meanwhile
            found = self.server.report.answer(self.path.partition("?")[0])
        if found is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        content, kind = found
        self.send_response(HTTPStatus.OK)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(content)), **HEADERS}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Write nothing to the terminal."""
