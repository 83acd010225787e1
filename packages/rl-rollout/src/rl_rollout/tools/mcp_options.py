"""Options to start or reach an MCP server, independent of the client library."""

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Gt

from rl_core.errors import SettingsError
from rl_core.record_fields import settings_record
from rl_core.secret_settings import check_headers, redact_option


@settings_record
class McpServerOptions:
    """One MCP server: a command to start, or the URL of a running server.

    Attributes:
        command: Program and arguments. It speaks MCP over stdin and stdout. "python" is the interpreter of this
            process.
        args: More arguments, as in other clients' settings.
        env: Its environment, in addition to PATH, HOME, USER, SHELL, TERM and LOGNAME; in settings, "$NAME" inserts a
            variable of this process.
        cwd: Its working directory.
        url: URL of a server that speaks streamable HTTP.
        headers: HTTP headers, such as Authorization = "Bearer $NAME".
        tools: Names of the tools to offer to the model; empty offers all.
        start_timeout_s: Maximum seconds until its tools are listed.
        probe_timeout_s: Maximum seconds for the server to answer a check after a call timed out; without an answer it
            is restarted.
        max_pause_s: Maximum pause before a restart. A server that dies repeatedly is restarted after 1, 2, 4, ...
            seconds; until then its tools return an error.
    """

    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    cwd: str | None = None
    url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    tools: tuple[str, ...] = ()
    start_timeout_s: Annotated[float, Gt(0)] = 30.0
    probe_timeout_s: Annotated[float, Gt(0)] = 5.0
    max_pause_s: Annotated[float, Ge(0)] = 60.0

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            SettingsError: Neither or both of command and url are given, or a header is invalid.
        """
        object.__setattr__(self, "command", (*self.command, *self.args))
        object.__setattr__(self, "args", ())
        if bool(self.command) == bool(self.url):
            raise SettingsError(
                f"an MCP server needs either command or url; found command = {list(self.command)} and "
                f"url = {redact_option('url', self.url)!r}."
            )
        check_headers(self.headers, where="headers of an MCP server")

    @property
    def advice(self) -> str:
        """Advice for a server that does not start."""
        if self.url is not None:
            return "Check that it is running, and that url and headers are right."
        return (
            "Try its command in a terminal: it must speak MCP over stdin and stdout. Its environment is PATH, HOME "
            "and similar, plus env. If it is slow, raise start_timeout_s."
        )

    def check_folder(self, name: str) -> None:
        """Check the working directory, because the error of a failed start would name the command instead.

        Raises:
            SettingsError: `cwd` is not a folder.
        """
        if self.cwd is not None and not Path(self.cwd).is_dir():
            raise SettingsError(
                f"MCP server {name!r}: cwd must be a folder; found {self.cwd!r}, which is not a folder in "
                f"{Path.cwd()}. Create it, or correct cwd."
            )
