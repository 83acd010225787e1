"""Roles on this machine, in this process or in one process each."""

from typing import Any

from rl_core.cluster.calls import Call
from rl_core.cluster.inline import InlineProcess
from rl_core.cluster.options import ClusterOptions
from rl_core.cluster.pools import LOCAL_POOLS
from rl_core.cluster.processes.role_process import ChildProcess
from rl_core.cluster.role_process import LaunchRequest, RoleProcess


class LocalLauncher:
    """Starts child processes, or objects in this process that share its GPUs and output."""

    place = "this machine"
    pools = LOCAL_POOLS

    def __init__(self, options: ClusterOptions) -> None:
        """Initialize with these options."""
        self._options = options
        self._is_inline = options.kind == "inline"
        self.settle_s = 0.0 if self._is_inline else 3.0  # inline roles cannot die

    async def open(self) -> None:
        """See `Launcher.open`."""

    def pack(self, call: Call) -> Any:
        """See `Launcher.pack`."""
        return (call.args, dict(call.kwargs)) if self._is_inline else call.pack()

    async def launch(self, request: LaunchRequest) -> RoleProcess:
        """See `Launcher.launch`."""
        if self._is_inline:
            return await InlineProcess.start(request, self._options)
        process = ChildProcess(request, self._options)
        await process.start()
        return process

    async def close(self) -> None:
        """See `Launcher.close`."""
