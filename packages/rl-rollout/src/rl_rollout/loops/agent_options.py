"""Options of the `agent` loop."""

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Gt

from rl_core.errors import SettingsError
from rl_core.record_fields import PositiveInt, settings_record
from rl_rollout.gateway import GatewayOptions, SessionLimits


@settings_record
class AgentSandbox:
    """Permissions and limits of a sandboxed agent.

    The agent can write only to its session's folder, and can read Python, the system's programs and `readable`.

    Attributes:
        network: "gateway" allows only the gateway; "allow" gives access to this machine's network.
        readable: Further readable files and folders, such as the program's folder.
        memory_bytes: Maximum resident memory of all its processes.
        processes: Maximum number of concurrent processes and threads.
        file_bytes: Maximum size of one file, and of all files in /tmp.
        open_files: Maximum number of file descriptors per process.
        cpu_s: Maximum CPU seconds per process.
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
    """Options of the `agent` loop: exactly one of `command`, `function` and `remote`, and how to run it.

    Attributes:
        command: Program and arguments. {prompt}, {prompt_file}, {workspace} and {cwd} (the run's working directory) are
            replaced; a leading "python" means the current interpreter.
        function: Name, or `path.py:name`, of an `async def agent(task)` that runs in this process and may return the
            reward.
        remote: True for remote workers, which claim sessions at the gateway with `gateway.owner_key`.
        env: Additional environment variables, with the same placeholders, {base_url} and {api_key}; in settings,
            "$NAME" refers to a variable of this process.
        workspace: Template folder that is copied for each session; None creates an empty folder.
        columns: Columns of the prompt's row that the program can see; other columns may reveal the answer.
        time_limit_s: Seconds until all processes are killed; for a remote session, until it fails.
        max_output_bytes: Maximum size of the output before all processes are killed; the last 64 KiB are kept.
        max_concurrent: Maximum number of concurrent agents; other sessions wait.
        sandbox: Sandbox of the program; None runs it with all permissions of this user.
        limits: Limits of a session.
        gateway: Options of the gateway.
    """

    command: tuple[str, ...] = ()
    function: str | None = None
    remote: bool = False
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    workspace: Path | None = None
    columns: tuple[str, ...] = ()
    time_limit_s: Annotated[float, Gt(0)] = 600.0
    max_output_bytes: PositiveInt = 1 << 26
    max_concurrent: PositiveInt = 32
    sandbox: AgentSandbox | None = None
    limits: SessionLimits = field(default_factory=SessionLimits)
    gateway: GatewayOptions = field(default_factory=GatewayOptions)

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            SettingsError: There is not exactly one kind of agent, or clients control sampling.
        """
        num_kinds = sum(map(bool, (self.command and self.command[0], self.function, self.remote)))
        if num_kinds != 1:
            raise SettingsError(
                'an agent needs exactly one of command, such as ["python", "{cwd}/agent.py"], function, such as '
                f'"agent.py:agent", and remote = true; found {num_kinds} of them.'
            )
        if self.remote and not self.gateway.owner_key:
            raise SettingsError("remote agents need gateway.owner_key, at least 32 random characters.")
        if self.time_limit_s > self.limits.wall_s:
            raise SettingsError(
                f"limits.wall_s ({self.limits.wall_s:g}) must be at least time_limit_s ({self.time_limit_s:g}); "
                "otherwise later requests of the agent would be refused."
            )
        if self.gateway.service.decided_by != "run":
            raise SettingsError('gateway.service.decided_by must be "run" for sessions that train.')
