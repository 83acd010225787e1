"""Roles in processes on this machine: the conformance suite, and checks that need a process."""

import asyncio
import subprocess
import sys
import threading

import pytest
from cluster_conformance import RemoteClusterConformance
from cluster_conformance.checks import START_S, echo

from rl_core.cluster import ClusterOptions, RoleSpec, group, open_cluster
from rl_core.cluster.processes import role_process
from rl_core.cluster.processes.output import PrefixedOutput
from rl_core.errors import RoleDiedError


class TestProcess(RemoteClusterConformance):
    @classmethod
    def make_options(cls, **changes):
        return ClusterOptions(kind="process", **changes)


def test_a_killed_rank_is_the_reason_though_its_end_takes_longer_to_tell_than_its_peers_errors(tmp_path, monkeypatch):
    """A rank's descendants end before its death is reported, which can take long on a busy machine."""
    real_end, real_settle, may_tell = role_process.end_family, group._settle, threading.Event()

    def end_family(family):
        may_tell.wait(60)
        real_end(family)

    async def use():
        async with open_cluster(ClusterOptions(kind="process")) as cluster:
            ranks = await cluster.start_group(echo(), size=2, deadline_s=START_S)

            async def settle(tasks, limit_s):
                if limit_s == group.DEATH_TOLD_S:
                    may_tell.set()
                    await real_settle(tasks, 60)
                while ranks.is_alive:
                    await asyncio.sleep(0.01)

            monkeypatch.setattr(group, "_settle", settle)
            monkeypatch.setattr(role_process, "end_family", end_family)
            with pytest.raises(RoleDiedError, match=r"echo\[1\].*SIGKILL"):
                await ranks.call_all("fail_with", 1, tmp_path / "died")

    asyncio.run(use())


def test_what_a_role_prints_cannot_garble_the_terminal_of_its_owner(capfd):
    spec = RoleSpec(name="talker", factory="subprocess:Popen")
    output = PrefixedOutput(spec)
    text = r"print('\x1b[32mgreen\x1b[0m \x1b]0;owned\x07 caf\xe9\x9b'); print('1%\r99%')"
    child = subprocess.Popen([sys.executable, "-c", text], stdout=output.open_for_child(), stderr=subprocess.STDOUT)
    output.started(child)
    child.wait(60)
    output.tail()
    assert capfd.readouterr().err == f"[{spec}] green \\x1b]0;owned\\x07 café\\x9b\n[{spec}] 99%\n"
