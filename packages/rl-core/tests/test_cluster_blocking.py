"""Roles for synchronous code: waits in any thread, and Ctrl-C during a wait."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading

import pytest

from rl_core.cluster import BlockingGroup, ClusterOptions, ResourcePool, RoleSpec
from rl_core.cluster.processes.guard import ProcessFamily, family_members, is_running
from rl_core.errors import NotReadyError, RoleDiedError, SettingsError
from rl_core.testing import wait_until

START_S = 60.0
SPEC = RoleSpec(name="echo", factory="cluster_conformance.role:EchoRole")


@pytest.fixture(scope="module")
def group():
    group = BlockingGroup.start(ClusterOptions(), SPEC, size=2, deadline_s=START_S)
    yield group
    pids = group.call_all("pid")
    group.close()
    group.close()
    assert not any(map(is_running, pids))
    with pytest.raises(NotReadyError, match="closed"):
        group.call(0, "pid")


def test_calls_wait_for_their_results(group):
    assert group.size == 2
    assert group.is_alive
    assert group.call(1, "greet", "you", mark="?") == "hello you?"
    assert group.call_all("greet", "all") == ["hello all!"] * 2
    assert group.call_each("greet", [("a",), ("b",)]) == ["hello a!", "hello b!"]
    with pytest.raises(TimeoutError, match=r"'wait_forever' within 0\.1 s"):
        group.call_all("wait_forever", deadline_s=0.1)
    with pytest.raises(ValueError, match="rank 1 has no rows") as caught:
        group.call_all("raise_on", 1)
    assert caught.value.rank == 1


def test_stacks_are_asked_for_while_another_thread_waits_for_a_call(group):
    caller = threading.Thread(target=lambda: group.call_all("wait_until_open"))
    caller.start()
    try:
        wait_until(lambda: all("wait_until_open" in text for text in group.stacks(deadline_s=START_S)), "the calls")
        assert "pending calls: 'wait_until_open' for" in group.stacks(deadline_s=START_S)[1]
    finally:
        group.call_all("open")
        caller.join(START_S)
    group.call_all("shut")


class Blocker:
    """A role with a method that blocks its thread."""

    began, may_end = threading.Event(), threading.Event()

    def block(self):
        Blocker.began.set()
        Blocker.may_end.wait(START_S)


def test_stacks_come_where_a_role_in_the_process_blocks_the_thread_of_all():
    spec = RoleSpec(name="blocker", factory=f"{__name__}:Blocker")
    group = BlockingGroup.start(ClusterOptions(kind="inline"), spec, size=1, deadline_s=START_S)
    caller = threading.Thread(target=lambda: group.call(0, "block"))
    caller.start()
    assert Blocker.began.wait(START_S)
    try:
        (text,) = group.stacks(deadline_s=0.1)
    finally:
        Blocker.may_end.set()
    caller.join(START_S)
    assert "has not answered for" in text
    assert "Blocker.may_end.wait(START_S)" in text
    group.close()
    assert group.stacks(deadline_s=START_S) == ["The group of roles is closed, or was called from its own thread."]


def test_a_thread_whose_event_loop_runs_can_wait_too(group):
    async def inside():
        return group.call_all("greet", "you")

    assert asyncio.run(inside()) == ["hello you!"] * 2


def test_threads_call_at_once(group):
    results = {}
    threads = [
        threading.Thread(target=lambda name=name: results.update({name: group.call(name % 2, "echo", name)}))
        for name in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(START_S)
    assert results == {name: name for name in range(8)}


def test_ctrl_c_breaks_a_wait_off_and_the_group_goes_on(group):
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        group.call_all("wait_forever", deadline_s=START_S)
    assert group.call_all("greet", "you") == ["hello you!"] * 2


def test_what_is_refused_at_the_start_leaves_no_thread():
    before = threading.active_count()
    pool = ResourcePool(name="giants", size=2, cpus=10_000)
    with pytest.raises(SettingsError, match="'giants'"):
        BlockingGroup.start(ClusterOptions(), SPEC, size=2, pool=pool, deadline_s=START_S)
    assert threading.active_count() == before


@pytest.mark.one_python("it starts four processes to divide the CPUs")
def test_four_ranks_live_on_few_cpus():
    pool = ResourcePool(name="ranks", size=4, cpus=len(os.sched_getaffinity(0)) / 4)
    group = BlockingGroup.start(ClusterOptions(), SPEC, size=4, pool=pool, deadline_s=START_S)
    assert [place.rank for place in group.call_all("place")] == [0, 1, 2, 3]
    with pytest.raises(RoleDiedError, match=r"echo\[0\].*SIGKILL"):
        group.call(0, "kill")
    assert not group.is_alive
    group.close()


BREAK_OFF = """
import sys
from rl_core.cluster import BlockingGroup, ClusterOptions, RoleSpec

class Slow:
    def __init__(self, path):
        import os, time
        with open(path + str(os.getpid()), "w") as file:
            file.write(os.environ["RL_ROLE_MARKS"])
        time.sleep(3600)

if __name__ == "__main__":
    spec = RoleSpec(name="slow", factory="slow_roles:Slow", kwargs={"path": sys.argv[1]})
    try:
        BlockingGroup.start(ClusterOptions(), spec, size=2, deadline_s=600)
    except KeyboardInterrupt:
        print("broken off", flush=True)
"""


@contextlib.contextmanager
def ended(process):
    """Kill the process on exit, so that a failed test does not wait for it."""
    try:
        yield
    finally:
        process.kill()


def test_ctrl_c_during_a_start_leaves_nothing(tmp_path):
    (tmp_path / "slow_roles.py").write_text(BREAK_OFF)
    command = [sys.executable, str(tmp_path / "slow_roles.py"), str(tmp_path / "mark-")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent, ended(parent):
        marks = lambda: [path.read_text() for path in tmp_path.glob("mark-*")]
        wait_until(lambda: len(list(filter(None, marks()))) == 2, "both factories to run", deadline_s=START_S)
        found = [process for mark in marks() for process in family_members(ProcessFamily(mark))]
        assert len(found) == 2
        parent.send_signal(signal.SIGINT)
        assert parent.communicate(timeout=START_S)[0] == "broken off\n"
    assert parent.returncode == 0
    assert not any(map(is_running, found))
