"""Options of the `agent` loop."""

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Literal

from rl_core.errors import SettingsError
from rl_core.record_fields import settings_record
from rl_rollout.gateway import GatewayOptions, SessionLimits


@settings_record
class AgentSandbox:
    """What an agent that nobody trusts may reach and take.

    It writes its session's folder alone, and reads Python, the system's programs and `readable`.

    Attributes:
        network: "gateway" lets it reach nothing else; "allow" gives it this machine's network.
        readable: More files and folders that it may read, such as that of its program.
        memory_bytes: Resident memory of all its processes.
        processes: Processes and threads at once.
        file_bytes: Size of a file, and of all files in /tmp.
        open_files: File descriptors of each process.
        cpu_s: Processor seconds of each process.
    """

    network: Literal["gateway", "allow"] = "gateway"
    readable: tuple[str, ...] = ()
    memory_bytes: int = 4 << 30
    processes: int = 256
    file_bytes: int = 1 << 30
    open_files: int = 1024
    cpu_s: float = 3600.0


@settings_record
class AgentOptions:
    """Options of the `agent` loop: one of `command`, `function` and `remote`, and how it is run.

    Attributes:
        command: Program and arguments, where {prompt}, {prompt_file}, {workspace} and {cwd} (where the run was started)
            are filled in; a first "python" is the interpreter that runs this.
        function: Name, or `path.py:name`, of an `async def agent(task)` of this process, which may give the reward.
        remote: Workers elsewhere claim sessions at the gateway, with `gateway.owner_key`.
        env: More environment variables, with the same placeholders, {base_url} and {api_key}; in settings "$NAME" takes
            a variable of this process.
        workspace: Folder that each session gets a copy of to work in; None gives an empty one.
        columns: Columns of the prompt's row that the program is shown; the others may tell the answer.
        time_limit_s: Seconds until everything is killed; of a remote session until it fails.
        max_output_bytes: Printed output after which everything is killed; the last 64 KiB are kept.
        max_concurrent: Agents at once; other sessions wait.
        sandbox: Keeps the program in; None runs it with all that this user may do.
        limits: How far a session goes.
        gateway: How the gateway listens, and how it answers.
    """

    command: tuple[str, ...] = ()
    function: str | None = None
    remote: bool = False
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    workspace: Path | None = None
    columns: tuple[str, ...] = ()
    time_limit_s: float = 600.0
    max_output_bytes: int = 1 << 26
    max_concurrent: int = 32
    sandbox: AgentSandbox | None = None
    limits: SessionLimits = field(default_factory=SessionLimits)
    gateway: GatewayOptions = field(default_factory=GatewayOptions)

    def __post_init__(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            SettingsError: There is not one kind of agent, a limit is not positive, or clients would decide on what
                trains.
        """
        num_kinds = sum(map(bool, (self.command and self.command[0], self.function, self.remote)))
        if num_kinds != 1:
            raise SettingsError(
                f"found {num_kinds} of these; "
                'an agent needs one of command, such as ["python", "{cwd}/agent.py"], function, such as '
                '"agent.py:agent", and remote = true.'
            )
        if self.remote and not self.gateway.owner_key:
            raise SettingsError("remote agents need gateway.owner_key, at least 32 characters chosen at random.")
        for name in ("time_limit_s", "max_output_bytes", "max_concurrent"):
            if not getattr(self, name) > 0:
                raise SettingsError(f"{name} of an agent must be above 0; found {getattr(self, name)}.")
        if self.time_limit_s > self.limits.wall_s:
            raise SettingsError(
                f"limits.wall_s ({self.limits.wall_s:g}) must be at least time_limit_s ({self.time_limit_s:g}): later "
                "requests of the agent would be refused."
            )
        if self.gateway.service.decided_by != "run":
            raise SettingsError('gateway.service.decided_by must be "run" where sessions train.')
