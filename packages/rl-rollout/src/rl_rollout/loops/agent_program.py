"""An agent's program, started in its own folder with the policy's address, and ended with all its processes."""

import asyncio
import difflib
import json
import os
import re
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from rl_core.errors import RoleError, RolloutError, SettingsError
from rl_rollout.loops.agent_options import AgentOptions
from rl_rollout.loops.protocol import AgentOutcome, AgentTask
from rl_rollout.rewards.protocol import AgentRun
from rl_rollout.sandbox import Command, Sandbox, SandboxLimits, SandboxOptions, sandbox_folder

PASSED_ON = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH")
"""Variables of this process that an agent receives. All others are withheld."""
PLACES = ("prompt", "prompt_file", "workspace", "cwd", "base_url", "api_key")
PLACEHOLDER = re.compile(r"\{(" + "|".join(PLACES) + r")\}")
MAX_VARIABLE_BYTES = 1 << 17
"""The kernel's limit for one argument or variable, in bytes."""
SHOWN_CHARS = 400


class AgentProgram:
    """Runs the program of each session."""

    def __init__(self, options: AgentOptions) -> None:
        """Store the options. Nothing runs yet."""
        self._options = options
        self._sandbox = Sandbox(_sandbox_options(options))

    async def check(self) -> str:
        """Refuse a command that cannot run. Return a line for a plan.

        Raises:
            SettingsError: The command or the workspace does not exist, or no sandbox works here.
        """
        workspace, (program, *arguments) = self._options.workspace, self._options.command
        if workspace is not None and not workspace.is_dir():
            raise SettingsError(f"workspace of an agent must be a folder; found {workspace.absolute()}.")
        for name in arguments:
            is_copied = workspace is not None and (workspace / name).exists()
            if Path(name).is_file() and not Path(name).is_absolute() and not is_copied:
                raise SettingsError(
                    f"command: {name!r} is a file in the current folder, but an agent starts in its own folder. Use "
                    f'"{{cwd}}/{name}", or put the file into the workspace.'
                )
        self._check_places()
        program = _filled(program, {"cwd": str(Path.cwd())})
        is_copied = workspace is not None and "/" in program and (workspace / program).is_file()
        is_there = "{" in program or program == "python" or is_copied
        if not is_there and shutil.which(program, path=self._environment({}).get("PATH")) is None:
            raise SettingsError(
                f"command: program {program!r} is not on the PATH. Install it, or use the full path of an executable "
                "file."
            )
        level = await self._sandbox.start()
        return f"agent ({level}): {' '.join(self._options.command)}"

    def _check_places(self) -> None:
        """Refuse misspelt placeholders, and files that no session would find.

        Raises:
            SettingsError: A placeholder or file is invalid. The message names it.
        """
        own = self._options.sandbox
        readable = [Path(path).resolve() for path in own.readable] if own else []
        for path in readable:
            if not path.exists():
                raise SettingsError(f"sandbox.readable: {path} does not exist.")
        for text in (*self._options.command, *self._options.env.values()):
            for name in re.findall(r"\{([a-z_]+)\}", text):
                if name not in PLACES and (near := difflib.get_close_matches(name, PLACES, n=1, cutoff=0.75)):
                    raise SettingsError(f"command: unknown placeholder {{{name}}}. Did you mean {{{near[0]}}}?")
        for number, text in enumerate(self._options.command):
            if not text.startswith("{cwd}/"):
                continue
            path = Path(text.replace("{cwd}", str(Path.cwd()), 1))
            if number < 2 and not path.exists():
                raise SettingsError(f"command: file {path} does not exist.")
            if own and path.exists() and not any(path.resolve().is_relative_to(one) for one in readable):
                raise SettingsError(
                    f"command: a sandboxed agent cannot read {path}. Add its folder to sandbox.readable, or put the "
                    "file into the workspace."
                )

    @asynccontextmanager
    async def running(self, task: AgentTask) -> AsyncIterator[AgentOutcome]:
        """Yield the program's outcome after all its processes ended. The workspace exists within the context.

        Raises:
            RolloutError: It cannot be started, which is never the program's fault.
        """
        with ExitStack() as opened:
            folder = opened.enter_context(sandbox_folder(None))
            try:
                yield AgentOutcome(run=await self._run(task, folder))
            finally:  # in a thread: removal may take long
                await asyncio.shield(asyncio.to_thread(opened.pop_all().close))

    async def _run(self, task: AgentTask, folder: str) -> AgentRun:
        workspace, prompt_file = Path(folder, "workspace"), Path(folder, "prompt.json")
        await self._fill(workspace)
        Path(folder, "tmp").mkdir()
        prompt_file.write_text(json.dumps(task.shown(self._options.columns)))
        text = task.text.replace("\0", "\ufffd")  # arguments and variables cannot contain NUL
        places = {"prompt": text, "prompt_file": str(prompt_file), "workspace": str(workspace)}
        values = {**places, "cwd": str(Path.cwd()), "base_url": task.base_url}
        program, *arguments = (_filled(one, values) for one in self._options.command)
        command = Command(
            arguments=(sys.executable if program == "python" else program, *arguments),
            folder=folder,
            cwd=str(workspace),
            environment=self._environment({**values, "api_key": task.api_key}),
            stdin=task.text.encode(),
            port=urlsplit(task.base_url).port or 0,
            serve=partial(_relayed, url=task.base_url) if self._has_own_network else None,
        )
        try:
            run = await self._sandbox.run_command(command)
        except (RoleError, OSError) as error:
            raise RolloutError(f"the agent's program cannot run: {error}") from error
        return AgentRun(
            ended=run.ended,
            exit_code=run.exit_code,
            stdout=run.stdout.decode(errors="replace"),
            stderr=run.stderr.decode(errors="replace"),
            workspace=str(workspace),
        )

    async def _fill(self, workspace: Path) -> None:
        """Create a session's workspace.

        Raises:
            RolloutError: The template cannot be copied.
        """
        if self._options.workspace is None:
            workspace.mkdir()
            return
        copying = await asyncio.create_subprocess_exec(
            *("cp", "-a", "--", str(self._options.workspace.resolve()), str(workspace)),
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            _, said = await copying.communicate()
        finally:
            if copying.returncode is None:
                copying.kill()
        if copying.returncode != 0:
            reason = said.decode(errors="replace").strip()[-SHOWN_CHARS:]
            raise RolloutError(f"the agent's workspace cannot be copied: {reason}")

    @property
    def _has_own_network(self) -> bool:
        return self._options.sandbox is not None and self._options.sandbox.network == "gateway"

    def _environment(self, values: Mapping[str, str]) -> dict[str, str]:
        base = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        if values:
            url, key = values["base_url"], values["api_key"]
            base |= {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key}
            base |= {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key}
            base |= {
                "RL_PROMPT_FILE": values["prompt_file"],
                "TMPDIR": str(Path(values["prompt_file"]).with_name("tmp")),
            }
            if len(values["prompt"].encode()) < MAX_VARIABLE_BYTES - 16:
                base["RL_PROMPT"] = values["prompt"]
        return {**base, **{name: _filled(text, values) for name, text in self._options.env.items()}}


def describe_run(run: AgentRun) -> str:
    """Describe in one line how a program ended, with the end of its stderr."""
    how = f"it exited with code {run.exit_code}" if run.ended == "exited" else f"it exceeded its limit on {run.ended}"
    said = " ".join((run.stderr or run.stdout).split())[-SHOWN_CHARS:]
    return f"{how}; its output: {said}" if said else how


def _sandbox_options(options: AgentOptions) -> SandboxOptions:
    limits = SandboxLimits(wall_s=options.time_limit_s, stdout_bytes=options.max_output_bytes)
    own = options.sandbox
    if own is None:
        return SandboxOptions(limits=limits, isolation="none")
    names = ("memory_bytes", "processes", "file_bytes", "open_files", "cpu_s")
    limits = replace(limits, **{name: getattr(own, name) for name in names})
    return SandboxOptions(limits=limits, network=own.network, readable=own.readable)


@asynccontextmanager
async def _relayed(listening: socket.socket, *, url: str) -> AsyncIterator[None]:
    """Forward connections from another network to the gateway."""
    address = urlsplit(url)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := await reader.read(1 << 16):
                writer.write(piece)
                await writer.drain()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            onward, there = await asyncio.open_connection(address.hostname, address.port)
            writers.append(there)
            ways = [asyncio.ensure_future(way) for way in (pump(reader, there), pump(onward, writer))]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
        finally:
            for one in writers:
                one.close()

    async with await asyncio.start_server(relay, sock=listening, start_serving=False) as server:
        await server.start_serving()  # separate, because a cancelled start would never be closed
        yield


def _filled(text: str, values: Mapping[str, str]) -> str:
    return PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), text)
