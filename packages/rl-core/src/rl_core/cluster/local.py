"""Roles on this machine: objects of this process, or a process each."""

from typing import Any

from rl_core.cluster.calls import Call
from rl_core.cluster.incarnation import Birth, Incarnation
from rl_core.cluster.inline import InlineIncarnation
from rl_core.cluster.options import ClusterOptions
from rl_core.cluster.pools import LOCAL_POOLS, LOCAL_RESERVER
from rl_core.cluster.processes.incarnation import ProcessIncarnation


class InlineLauncher:
    """Objects of this process. They see all its GPUs, and print where it prints."""

    place = "this machine"
    pools = LOCAL_POOLS
    reserver = LOCAL_RESERVER
    settle_s = 0.0  # nobody dies

    def __init__(self, options: ClusterOptions) -> None:
        """Make objects as these options say."""
        self._options = options

    async def open(self) -> None:
        """See `Launcher.open`."""

    def pack(self, call: Call) -> Any:
        """See `Launcher.pack`."""
        return call.args, dict(call.kwargs)

    async def launch(self, birth: Birth) -> Incarnation:
        """See `Launcher.launch`."""
        return await InlineIncarnation.start(birth, self._options)

    async def close(self) -> None:
        """See `Launcher.close`."""


class ProcessLauncher:
    """Child processes of this one."""

    place = "this machine"
    pools = LOCAL_POOLS
    reserver = LOCAL_RESERVER
    settle_s = 1.0

    def __init__(self, options: ClusterOptions) -> None:
        """Start processes as these options say."""
        self._options = options

    async def open(self) -> None:
        """See `Launcher.open`."""

    def pack(self, call: Call) -> Any:
        """See `Launcher.pack`."""
        return call.pack()

    async def launch(self, birth: Birth) -> Incarnation:
        """See `Launcher.launch`."""
        return await ProcessIncarnation.start(birth, self._options)

    async def close(self) -> None:
        """See `Launcher.close`."""
