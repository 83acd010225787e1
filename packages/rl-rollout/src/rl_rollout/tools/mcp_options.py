"""How an MCP server is started or reached; free of the library that speaks to it."""

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path

from rl_core.errors import SettingsError
from rl_core.record_fields import settings_record
from rl_core.secret_settings import check_headers, redact_option


@settings_record
class McpServerOptions:
    """One MCP server: a command to start, or the address of one that runs.

    Attributes:
        command: Program and arguments; it speaks MCP over stdin and stdout. "python" is the interpreter that runs this.
        args: More arguments, as other clients' settings have them.
        env: Its environment, beside PATH, HOME, USER, SHELL, TERM and LOGNAME; in settings, "$NAME" takes a variable of
            this process.
        cwd: Its working directory.
        url: Address of a server that speaks streamable HTTP.
        headers: HTTP headers, such as Authorization = "Bearer $NAME".
        tools: Names of the tools that the model gets; empty gives all.
        start_timeout_s: Longest time until its tools are known.
        probe_timeout_s: After a call that took too long, longest time for the server to say that it is alive; one that
            does not is started again.
        max_pause_s: A server that dies again and again is left alone for 1, 2, 4, ... seconds, at most this long; its
            tools answer with an error meanwhile.
    """

    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    cwd: str | None = None
    url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    tools: tuple[str, ...] = ()
    start_timeout_s: float = 30.0
    probe_timeout_s: float = 5.0
    max_pause_s: float = 60.0

    def __post_init__(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            SettingsError: Neither or both of command and url are given, or a limit is not positive.
        """
        object.__setattr__(self, "command", (*self.command, *self.args))
        object.__setattr__(self, "args", ())
        if bool(self.command) == bool(self.url):
            raise SettingsError(
                f"an MCP server needs either command or url; found command = {list(self.command)} and "
                f"url = {redact_option('url', self.url)!r}."
            )
        check_headers(self.headers, where="headers of an MCP server")
        if not self.start_timeout_s > 0 or not self.probe_timeout_s > 0 or not self.max_pause_s >= 0:
            raise SettingsError(
                "an MCP server needs start_timeout_s > 0, probe_timeout_s > 0 and max_pause_s >= 0; found "
                f"{self.start_timeout_s}, {self.probe_timeout_s} and {self.max_pause_s}."
            )

    @property
    def advice(self) -> str:
        """What to do about a server that does not start."""
        if self.url is not None:
            return "Is it running, and are url and headers right?"
        return (
            "Try its command in a terminal: it must speak MCP over stdin and stdout. It gets PATH, HOME and the like, "
            "and what env names; a slow one needs a larger start_timeout_s."
        )

    def check_folder(self, name: str) -> None:
        """Refuse a working directory that is none: the error of a failed start would name the command.

        Raises:
            SettingsError: `cwd` is no folder.
        """
        if self.cwd is not None and not Path(self.cwd).is_dir():
            raise SettingsError(
                f"MCP server {name!r}: cwd must be a folder; found {self.cwd!r}, which is none from {Path.cwd()}. "
                "Create it, or correct cwd."
            )
