"""Checks specific to roles in processes; the conformance suite covers all placements."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rl_core.cluster import Cluster, ClusterOptions, RoleSpec, open_cluster
from rl_core.cluster.local import LocalLauncher
from rl_core.cluster.processes.guard import MARK_VARIABLE, ProcessFamily, descendants, family_members, is_running
from rl_core.cluster.processes.role_process import describe_exit
from rl_core.cluster.role_spec import load_factory
from rl_core.errors import DeadlineError, NotReadyError, RoleDiedError, SettingsError
from rl_core.testing import wait_until

START_S = 60.0
ECHO = "cluster_conformance.role:EchoRole"


def spec_of(**kwargs):
    return RoleSpec(name="echo", factory=ECHO, kwargs=kwargs, rank=2)


def with_role(use, spec=None, **options):
    """Start a role, use it and close the cluster; fail if the role's process is still running."""

    async def run():
        async with open_cluster(ClusterOptions(**options)) as cluster:
            role = await cluster.start(spec or spec_of(), deadline_s=START_S)
            return role.pid, await asyncio.wait_for(use(role), 60)

    pid, result = asyncio.run(run())
    assert not is_running(pid)
    return result


@pytest.mark.parametrize("kind", ["inline", "process"])
def test_roles_live_where_they_were_placed(kind):
    async def run():
        async with open_cluster(ClusterOptions(kind=kind)) as cluster:
            role = await cluster.start(spec_of(), deadline_s=START_S)
            assert role.pid == await role.call("pid")
            return role.pid

    assert (asyncio.run(run()) == os.getpid()) == (kind == "inline")


def test_an_unknown_kind_is_refused():
    with pytest.raises(SettingsError, match="one of 'inline', 'process', 'ray'; found 'local'"):
        ClusterOptions(kind="local")


def test_large_values_travel_both_ways():
    value = os.urandom(5_000_000)

    async def use(role):
        return await asyncio.gather(*(role.call("echo", value) for _ in range(4)))

    assert with_role(use) == [value] * 4


def test_a_process_gets_its_environment():
    spec = RoleSpec(name="echo", factory=ECHO, environment={"OMP_NUM_THREADS": "3"})
    assert with_role(lambda role: role.call("environment", "OMP_NUM_THREADS"), spec) == "3"


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("rl_core", "module:name"),
        (":EchoRole", "module:name"),
        ("rl_cure:EchoRole", "module 'rl_cure' of the factory 'EchoRole' does not exist"),
        ("cluster_conformance.role:Echo", "has no 'Echo'"),
    ],
)
def test_a_factory_that_is_not_there_is_refused(factory, message):
    with pytest.raises(SettingsError, match=message):
        load_factory(factory)


def test_a_module_that_lacks_an_import_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "role_without_import.py").write_text("import a_module_that_is_not_installed\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_installed"):
        load_factory("role_without_import:Role")


def test_a_role_of_a_script_is_found_by_the_import_path(tmp_path, monkeypatch):
    (tmp_path / "role_of_a_script.py").write_text("class Role:\n    def answer(self):\n        return 42\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = RoleSpec(name="script", factory="role_of_a_script:Role")
    assert with_role(lambda role: role.call("answer"), spec) == 42


@pytest.mark.parametrize(
    ("call", "how"), [(("kill",), r"was killed by signal SIGKILL \(9\)"), (("exit", 7), "ended with status 7")]
)
def test_a_role_that_dies_fails_every_call_and_says_how(call, how):
    async def use(role):
        waiting = [asyncio.create_task(role.call("wait_forever")) for _ in range(2)]
        await role.call("greet", "you")
        waiting.append(asyncio.create_task(role.call(*call)))
        for task, method in zip(waiting, ["wait_forever", "wait_forever", call[0]], strict=True):
            text = rf"echo\[2\] \(pid {role.pid}\) {how} during '{method}'; .* the answer of 'greet'"
            with pytest.raises(RoleDiedError, match=text):
                await asyncio.wait_for(task, 5)
        with pytest.raises(RoleDiedError, match=how):
            await role.call("greet", "you")

    with_role(use)


def test_a_death_is_noticed_though_a_forked_child_keeps_the_socket():
    async def use(role):
        sleeper = await role.call("fork_sleeper")
        with pytest.raises(RoleDiedError, match="SIGKILL"):
            await asyncio.wait_for(role.call("kill"), 5)
        assert not is_running(sleeper)

    with_role(use)


def test_a_role_that_stands_still_holds_up_nobody():
    async def use(role):
        await role.call("greet", "you")
        os.kill(role.pid, signal.SIGSTOP)
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(role.call("echo", bytes(10_000_000)), 0.1)
        await role.close()

    with_role(use, close_deadline_s=0.2)


class HangingLauncher(LocalLauncher):
    """A launcher whose place never answers, such as an unreachable Ray cluster."""

    place = "the cluster at nowhere:1"

    async def open(self):
        await asyncio.Event().wait()


def test_a_place_that_does_not_answer_is_waited_for_until_the_deadline():
    async def run():
        async with Cluster(HangingLauncher(ClusterOptions())) as cluster:
            await asyncio.wait_for(cluster.start(spec_of(), deadline_s=0.1), START_S)

    with pytest.raises(DeadlineError, match=r"echo\[2\] waited 0\.1 s for the cluster at nowhere:1"):
        asyncio.run(run())


def test_a_start_that_is_broken_off_leaves_nothing():
    async def run():
        async with open_cluster(ClusterOptions()) as cluster:
            starting = asyncio.create_task(cluster.start_group(spec_of(), size=2, deadline_s=START_S))
            await asyncio.to_thread(wait_until, lambda: len(children()) == 2, "both processes")
            pids = children()
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
            return pids

    assert [pid for pid in asyncio.run(run()) if is_running(pid)] == []


def test_a_start_that_outlasts_its_cluster_is_broken_off_without_an_error_of_its_own():
    async def run():
        async with open_cluster(ClusterOptions()) as cluster:
            starting = asyncio.create_task(cluster.start(spec_of(), deadline_s=START_S))
            await asyncio.to_thread(wait_until, lambda: len(children()) == 1, "its process")
            raised = asyncio.create_task(cluster.close())  # a failed start of another role closes the cluster
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
            await raised

    asyncio.run(run())


def children():
    """Return the processes of this process's roles, by their mark; the warm-start server's mark is empty."""
    return [pid for pid, _ in descendants(os.getpid()) if is_marked(pid)]


def is_marked(pid):
    mark = re.compile(rb"(^|\0)%s=\s*[^\s\0]" % MARK_VARIABLE.encode())
    with contextlib.suppress(OSError):
        return mark.search(Path(f"/proc/{pid}/environ").read_bytes()) is not None
    return False


def test_a_role_started_in_a_thread_outlives_the_thread():
    """The kernel's parent-death signal, which rl-core avoids, is sent when the thread that forked ends."""
    loop = asyncio.new_event_loop()
    cluster = open_cluster(ClusterOptions())
    roles = []
    starting = cluster.start(spec_of(), deadline_s=START_S)
    thread = threading.Thread(target=lambda: roles.append(loop.run_until_complete(starting)))
    thread.start()
    thread.join()
    try:
        assert loop.run_until_complete(roles[0].call("greet", "you")) == "hello you!"
    finally:
        loop.run_until_complete(cluster.close())
        loop.close()
    with pytest.raises(NotReadyError, match="closed"):
        asyncio.run(roles[0].call("greet", "you"))


def test_lines_of_roles_come_with_their_names(capfd):
    async def use(role):
        await role.call("say", "one\ntwo")

    with_role(use)
    assert capfd.readouterr().err.splitlines() == ["[echo[2]] one", "[echo[2]] two"]


PARENT = """
import asyncio, pathlib, sys
from rl_core.cluster import ClusterOptions, RoleSpec, open_cluster

async def main():
    spec = RoleSpec(name="echo", factory="cluster_conformance.role:EchoRole")
    role = await open_cluster(ClusterOptions()).start(spec, deadline_s=60)
    mark = await role.call("environment", "RL_ROLE_MARKS")
    pid = role.pid
    for own in (False, True):
        await role.call("start_child", own_session=own)
    if sys.argv[1] == "busy":
        asyncio.get_running_loop().create_task(role.call("block", pathlib.Path(sys.argv[2])))
        await asyncio.sleep(0)
    print(mark, pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_a_role_and_its_children_end_when_its_parent_is_killed(state, tmp_path):
    command = [sys.executable, "-c", PARENT, state, str(tmp_path / "blocked")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # roles are in tests/support
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        try:
            mark, pid = parent.stdout.readline().split()
            family = ProcessFamily(mark, int(pid))
            if state == "busy":
                wait_until((tmp_path / "blocked").exists, "the role to be busy")
            assert len(family_members(family)) == 3
        finally:
            parent.kill()
    wait_until(lambda: not family_members(family), "the role and its children to end")


def test_ctrl_c_does_not_end_a_role():
    async def use(role):
        os.kill(role.pid, signal.SIGINT)
        assert os.getsid(role.pid) != os.getsid(0)  # in its own session, a role does not receive a terminal's Ctrl-C
        return await role.call("greet", "you")

    assert with_role(use) == "hello you!"


def test_no_mark_is_nobody_s_mark():
    """Without this check, a guard would end every process of the host."""
    with pytest.raises(ValueError, match="at least 32 characters; found ''"):
        family_members(ProcessFamily(""))
    assert family_members(ProcessFamily("0" * 32)) == []


def test_known_processes_are_told_by_the_time_of_their_start():
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as child:
        ((pid, started),) = [pair for pair in descendants(os.getpid()) if pair[0] == child.pid]
        assert family_members(ProcessFamily("0" * 32, known=frozenset({(pid, started)}))) == [child.pid]
        assert family_members(ProcessFamily("0" * 32, known=frozenset({(pid, started - 1)}))) == []
        child.communicate(b"\n", timeout=START_S)


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (0, "ended with status 0"),
        (3, "ended with status 3"),
        (-9, "was killed by signal SIGKILL (9)"),
        (-11, "was killed by signal SIGSEGV (11)"),
        (-250, "was killed by signal unknown (250)"),
        (None, "no longer answers"),
    ],
)
def test_ends_are_described(status, text):
    assert describe_exit(status) == text
