"""Roles in this process and in their own: called alike, and ended whatever happens."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rl_core.cluster import ClusterOptions, RoleSpec, open_cluster
from rl_core.cluster.process import describe_exit
from rl_core.cluster.roles import load_factory
from rl_core.errors import DeadlineError, NotReadyError, RoleError, SettingsError, WeightProofError
from rl_core.testing import wait_until

START_S = 60.0
PLACEMENTS = ["inline", "process"]


@pytest.fixture(autouse=True)
def importable_roles(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def spec_of(**kwargs):
    return RoleSpec(name="echo", factory="echo_role:EchoRole", kwargs=kwargs, rank=2)


def with_role(placement, use, spec=None, **options):
    """Start a role, use it, close the cluster; fail if its process is left."""

    async def run():
        cluster = open_cluster(ClusterOptions(kind=placement, **options))
        try:
            role = await cluster.start(spec or spec_of(), deadline_s=START_S)
            pid = role.pid
            return role, pid, await asyncio.wait_for(use(role), 60)
        finally:
            await cluster.close()

    role, pid, result = asyncio.run(run())
    assert not role.is_alive
    assert placement == "inline" or not is_running(pid)
    return result


def is_running(pid):
    """True for a process that is there and not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_plain_and_async_methods_are_called_alike(placement):
    async def use(role):
        assert role.is_alive
        assert str(role.spec) == "echo[2]"
        return [
            await role.call("greet", "you"),
            await role.call("greet", "you", mark="?"),
            await role.call("greet_async", "you"),
        ]

    assert with_role(placement, use, spec_of(greeting="hi")) == ["hi you!", "hi you?", "hi you"]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_calls_overlap(placement):
    async def use(role):
        waiting = [asyncio.create_task(role.call("wait_until_open")) for _ in range(3)]
        await role.call("greet", "you")
        assert not any(task.done() for task in waiting)
        await role.call("open")
        return await asyncio.gather(*waiting)

    assert with_role(placement, use) == ["opened"] * 3


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_calls_made_together_begin_together(placement):
    async def use(role):
        return await asyncio.gather(*(role.call("company", bytes(100_000)) for _ in range(30)))

    assert with_role(placement, use) == [30] * 30


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_roles_live_where_they_were_placed(placement):
    pid = with_role(placement, lambda role: role.call("pid"))
    assert (pid == os.getpid()) == (placement == "inline")


def test_large_values_travel_both_ways():
    value = os.urandom(5_000_000)

    async def use(role):
        return await asyncio.gather(*(role.call("echo", value) for _ in range(4)))

    assert with_role("process", use) == [value] * 4


def test_a_process_gets_its_environment():
    spec = RoleSpec(name="echo", factory="echo_role:EchoRole", environment={"OMP_NUM_THREADS": "3"})
    assert with_role("process", lambda role: role.call("environment", "OMP_NUM_THREADS"), spec) == "3"


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_an_error_keeps_its_class_and_what_it_carries(placement):
    async def use(role):
        with pytest.raises(WeightProofError, match="head is stale") as caught:
            await role.call("raise_error", "WeightProofError", "head is stale", tensor="lm_head.weight")
        return caught.value

    error = with_role(placement, use)
    assert error.tensor == "lm_head.weight"
    if placement == "process":
        assert "Traceback in echo[2]" in error.__notes__[0]
        assert "raise_error" in error.__notes__[0]


def test_an_error_of_an_unknown_class_becomes_a_role_error():
    async def use(role):
        with pytest.raises(RoleError, match=r"echo\[2\] raised Unknown: out of luck") as unknown:
            await role.call("raise_error", "Unknown", "out of luck")
        with pytest.raises(RoleError, match="raised CancelledError"):
            await role.call("cancel")
        with pytest.raises(KeyError, match=r"^'name'"):
            await role.call("raise_error", "KeyError", "name")
        return unknown.value

    assert "echo_role.Unknown: out of luck" in with_role("process", use).__notes__[0]


def test_what_cannot_be_sent_is_refused_and_the_role_goes_on():
    async def use(role):
        with pytest.raises((TypeError, AttributeError, RoleError), match="pickle") as result:
            await role.call("unpicklable")
        with pytest.raises((TypeError, AttributeError), match="pickle"):
            await role.call("echo", threading.Lock())
        return result.value, await role.call("greet", "you")

    error, answer = with_role("process", use)
    assert error.__notes__
    assert answer == "hello you!"


def test_an_answer_that_cannot_be_read_ends_the_role_and_every_call():
    async def use(role):
        waiting = asyncio.create_task(role.call("wait_forever"))
        with pytest.raises(RoleError, match=r"echo\[2\] answered with something that cannot be read"):
            await role.call("unreadable")
        with pytest.raises(RoleError, match="this cannot be made again"):
            await waiting

    with_role("process", use)


def test_a_call_that_was_given_up_disturbs_no_other():
    async def use(role):
        for _ in range(20):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(role.call("wait_until_open"), 0.001)
        await role.call("open")
        return await role.call("wait_until_open")

    assert with_role("process", use) == "opened"


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_an_error_at_the_start_is_raised_as_it_was(placement):
    with pytest.raises(SettingsError, match="no such model"):
        with_role(placement, None, spec_of(start_error="no such model"))


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("echo_role", "module:name"),
        (":EchoRole", "module:name"),
        ("echo_rule:EchoRole", "no module 'echo_rule'"),
        ("echo_role:Echo", "has no 'Echo'"),
    ],
)
def test_a_factory_that_is_not_there_is_refused(factory, message):
    with pytest.raises(SettingsError, match=message):
        with_role("inline", None, RoleSpec(name="echo", factory=factory))


def test_a_module_that_lacks_an_import_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "role_without_import.py").write_text("import a_module_that_is_not_installed\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_installed"):
        load_factory("role_without_import:Role")


def test_a_start_that_takes_too_long_is_ended():
    async def run():
        role = asyncio.create_task(open_cluster(ClusterOptions()).start(spec_of(hangs=True), deadline_s=1.0))
        started = time.monotonic()
        with pytest.raises(DeadlineError, match=r"echo\[2\] was not ready 1 s after .*EchoRole was still") as caught:
            await role
        assert time.monotonic() - started < 10
        return int(str(caught.value).partition("(pid ")[2].partition(")")[0])

    assert not is_running(asyncio.run(run()))


@pytest.mark.parametrize(
    ("call", "how"), [(("kill",), r"was killed by signal SIGKILL \(9\)"), (("exit", 7), "ended with status 7")]
)
def test_a_role_that_dies_fails_every_call_at_once(call, how):
    async def use(role):
        waiting = [asyncio.create_task(role.call("wait_forever")) for _ in range(2)]
        await role.call("greet", "you")
        started = time.monotonic()
        waiting.append(asyncio.create_task(role.call(*call)))
        for task, method in zip(waiting, ["wait_forever", "wait_forever", call[0]], strict=True):
            text = rf"echo\[2\] \(pid {role.pid}\) {how} while '{method}' was waited for; .* the answer of 'greet'"
            with pytest.raises(RoleError, match=text):
                await task
        assert time.monotonic() - started < 5
        assert not role.is_alive
        with pytest.raises(RoleError, match=how):
            await role.call("greet", "you")

    with_role("process", use)


def test_a_role_killed_from_outside_is_named_within_seconds():
    async def use(role):
        waiting = asyncio.create_task(role.call("wait_forever"))
        await role.call("greet", "you")
        os.kill(role.pid, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(RoleError, match=r"echo\[2\].*SIGKILL"):
            await waiting
        assert time.monotonic() - started < 5

    with_role("process", use)


def test_a_death_is_noticed_though_a_forked_child_keeps_the_socket():
    async def use(role):
        sleeper = await role.call("fork_sleeper")
        try:
            with pytest.raises(RoleError, match="SIGKILL"):
                await asyncio.wait_for(role.call("kill"), 10)
            await asyncio.wait_for(role.close(), 10)
        finally:
            os.kill(sleeper, signal.SIGKILL)

    with_role("process", use)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_close_closes_the_object_and_can_be_called_twice(placement, tmp_path):
    async def use(role):
        await asyncio.gather(role.close(), role.close())
        await role.close()
        with pytest.raises(NotReadyError, match=r"echo\[2\] was closed"):
            await role.call("greet", "you")

    with_role(placement, use, spec_of(close_file=tmp_path / "plain"))
    assert (tmp_path / "plain").read_text() == "closed"
    spec = RoleSpec(name="echo", factory="echo_role:AsyncCloseRole", kwargs={"close_file": tmp_path / "async"}, rank=2)
    with_role(placement, use, spec)
    assert (tmp_path / "async").read_text() == "closed"


def test_calls_that_wait_at_close_are_told():
    async def use(role):
        waiting = asyncio.create_task(role.call("wait_forever"))
        await role.call("greet", "you")
        await role.close()
        with pytest.raises(NotReadyError, match=r"echo\[2\] was closed"):
            await waiting

    with_role("process", use)


def test_a_role_that_stands_still_holds_up_nobody(monkeypatch):
    monkeypatch.setattr("rl_core.cluster.process.CLOSE_DEADLINE_S", 0.2)

    async def use(role):
        await role.call("greet", "you")
        os.kill(role.pid, signal.SIGSTOP)
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(role.call("echo", bytes(10_000_000)), 0.1)
        await role.close()

    with_role("process", use)


def test_a_role_that_does_not_end_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("rl_core.cluster.process.CLOSE_DEADLINE_S", 0.2)

    async def use(role):
        blocked = asyncio.create_task(role.call("block", tmp_path / "blocked"))
        await asyncio.to_thread(wait_until, (tmp_path / "blocked").exists, "the role to block")
        await role.close()
        with pytest.raises(NotReadyError, match="closed"):
            await blocked

    with_role("process", use)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_cluster_ends_every_role_though_one_fails_to_close(placement, tmp_path):
    async def run():
        cluster = open_cluster(ClusterOptions(kind=placement))
        first = await cluster.start(spec_of(close_file=tmp_path / "first"), deadline_s=START_S)
        bad = RoleSpec(name="bad", factory="echo_role:BadCloseRole")
        await cluster.start(bad, deadline_s=START_S)
        last = await cluster.start(spec_of(close_file=tmp_path / "last"), deadline_s=START_S)
        if placement == "inline":
            with pytest.raises(RuntimeError, match="close failed"):
                await cluster.close()
        await cluster.close()
        return first, last

    assert not any(role.is_alive for role in asyncio.run(run()))
    assert (tmp_path / "first").exists()
    assert (tmp_path / "last").exists()


def test_a_role_started_in_a_thread_outlives_the_thread(tmp_path):
    """The kernel's parent-death signal counts the thread that started a process as its parent."""
    roles = []
    thread = threading.Thread(target=lambda: roles.append(ProcessRole(spec_of())))
    thread.start()
    thread.join()

    async def run():
        await roles[0].call("", "echo_role:EchoRole", {})
        answer = await roles[0].call("greet", "you")
        await roles[0].close()
        return answer

    assert asyncio.run(run()) == "hello you!"


PARENT = """
import asyncio, sys
from rl_core.cluster import ClusterOptions, RoleSpec, open_cluster

async def main():
    sys.path.insert(0, sys.argv[1])
    role = await open_cluster(ClusterOptions()).start(RoleSpec(name="echo", factory="echo_role:EchoRole"), deadline_s=60)
    if sys.argv[2] == "busy":
        asyncio.get_running_loop().create_task(role.call("block", __import__("pathlib").Path(sys.argv[3])))
        await asyncio.sleep(0)
    print(role.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_a_role_ends_when_its_parent_is_killed(state, tmp_path):
    command = [sys.executable, "-c", PARENT, str(Path(__file__).parent), state, str(tmp_path / "blocked")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        try:
            child = int(parent.stdout.readline())
            if state == "busy":
                wait_until((tmp_path / "blocked").exists, "the role to be busy")
            assert is_running(child)
        finally:
            parent.kill()
    wait_until(lambda: not is_running(child), f"process {child} to end", deadline_s=10)


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


def test_ctrl_c_does_not_end_a_process_that_is_still_starting():
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    role = ProcessRole(spec_of())
    try:
        for _ in range(20):  # the interpreter has not even begun to run our code
            os.kill(role.pid, signal.SIGINT)
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask

        async def greet():
            async with asyncio.timeout(START_S):
                await role.call("", "echo_role:EchoRole", {})
                os.kill(role.pid, signal.SIGINT)
                return await role.call("greet", "you")

        assert asyncio.run(greet()) == "hello you!"
    finally:
        asyncio.run(role.close())
