"""Hostile programs, which also limit themselves, at every level of isolation that this machine permits."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from pathlib import Path

import pytest

from rl_core.errors import RoleError, SettingsError
from rl_rollout.sandbox import Sandbox, SandboxLimits, SandboxOptions
from rl_rollout.sandbox.sandbox import NOBODY, _levels, sandbox_folder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")

LEVELS = ("namespaces", "user_namespaces", "other_user", "same_user")
LIMITS = SandboxLimits(wall_s=20.0, memory_bytes=256 << 20, processes=8, file_bytes=1 << 20)
SYSTEM_PYTHON = "/usr/bin/python3"


def sandbox_at(level, **options):
    """Return a sandbox of one level; skip the test if the machine does not permit it."""
    options = {"limits": LIMITS, **options}
    if level == "other_user" and Path(SYSTEM_PYTHON).exists():
        options["python"] = SYSTEM_PYTHON  # another user may lack access to this interpreter
    sandbox = Sandbox(SandboxOptions(**options))
    if level in ("namespaces", "other_user") and os.geteuid() != 0:
        pytest.skip("needs root")
    refusal = asyncio.run(sandbox._try(level))
    if refusal is not None:
        pytest.skip(f"this machine does not permit {level}: {refusal}")
    sandbox._level = level
    return sandbox


@pytest.fixture(scope="module", params=LEVELS)
def sandbox(request):
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "user_namespaces":
            patch.setattr("os.geteuid", lambda: 1000)  # root can use the level of ordinary users
        yield sandbox_at(request.param)


@pytest.fixture
def strong_sandbox(sandbox):
    if sandbox.level == "same_user":
        pytest.skip("this level does not promise it")
    return sandbox


@pytest.fixture
def namespace_sandbox(sandbox):
    if sandbox.level not in ("namespaces", "user_namespaces"):
        pytest.skip("this level does not promise it")
    return sandbox


def run(sandbox, program, **given):
    return asyncio.run(sandbox.run(textwrap.dedent(program), **given))


def limited(sandbox, **limits):
    """Return a sandbox of the same level with other limits."""
    values = {name: getattr(LIMITS, name) for name in LIMITS.__slots__} | limits
    options = {name: getattr(sandbox._options, name) for name in ("network", "isolation", "python")}
    other = Sandbox(SandboxOptions(limits=SandboxLimits(**values), **options))
    other._level = sandbox.level
    return other


def processes_with(marker):
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def wait_until(condition, *, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)


def test_a_program_gets_its_input_and_gives_its_output(sandbox):
    done = run(sandbox, "import sys; print(sys.stdin.read()[::-1]); print('e', file=sys.stderr)", stdin=b"abc")
    assert (done.ended, done.exit_code, done.stdout, done.stderr) == ("exited", 0, b"cba\n", b"e\n")
    assert done.is_success


def test_what_can_be_read_may_lie_in_the_temporary_folder(tmp_path):
    """A Python installation may be there."""
    (tmp_path / "answer.txt").write_text("42")
    tmp_path.chmod(0o755)
    options = SandboxOptions(limits=LIMITS, isolation="any", readable=(str(tmp_path),))
    sandbox = Sandbox(options)
    if asyncio.run(sandbox.start()) not in ("namespaces", "user_namespaces"):
        pytest.skip("this machine gives programs no folders of their own")
    done = run(sandbox, f"open('/tmp/own', 'w').write('x'); print(open('{tmp_path}/answer.txt').read())")
    assert (done.stdout, done.exit_code) == (b"42\n", 0), done.stderr


def test_a_run_that_keeps_its_files_to_itself_can_run_programs(sandbox):
    before = os.umask(0o077)
    try:
        assert run(sandbox, "print(open('more').read())", files={"more": "here"}).stdout == b"here\n"
    finally:
        os.umask(before)


def test_the_folders_of_killed_processes_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    child = os.fork()
    if child == 0:
        with sandbox_folder(NOBODY if os.geteuid() == 0 else None):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    (left,) = tmp_path.iterdir()
    with sandbox_folder(None) as folder:
        assert list(tmp_path.iterdir()) == [Path(folder)]
        assert Path(folder) != left
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_raises_exits_or_reads_nothing(sandbox):
    assert run(sandbox, "raise ValueError('x')").exit_code == 1
    assert run(sandbox, "import os; os._exit(7)").exit_code == 7
    assert run(sandbox, "import os; os.abort()").exit_code < 0
    assert run(sandbox, "pass", stdin=b"x" * (4 << 20)).is_success


def test_an_infinite_loop_is_ended(sandbox):
    started_at = time.monotonic()
    done = run(limited(sandbox, wall_s=0.5), "while True: pass")
    assert (done.ended, done.exit_code) == ("wall_time", None)
    assert time.monotonic() - started_at < 60


def test_sleeping_is_ended_too_and_processor_time_is_bounded(sandbox):
    assert run(limited(sandbox, wall_s=0.3), "import time; time.sleep(60)").ended == "wall_time"
    done = run(
        limited(sandbox, cpu_s=1.0), "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    )
    assert (done.ended, done.exit_code) == ("exited", -signal.SIGKILL)


FORKS = """
import os, time
count = 0
for _ in range(100):
    try:
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        count += 1
    except OSError:
        break
print(count, flush=True)
"""


def test_a_fork_bomb_is_bounded_and_nothing_of_it_stays(sandbox):
    done = run(sandbox, FORKS)
    if sandbox.level in ("same_user", "user_namespaces") and os.getuid() == 0:  # geteuid may be patched
        return  # the kernel does not count root's processes; the sandbox ends all of them, but later
    if done.ended == "exited":
        assert int(done.stdout) < LIMITS.processes
    else:
        assert done.ended == "processes"


def test_threads_are_bounded_too(strong_sandbox):
    program = """
    import threading, time
    count = 0
    try:
        for _ in range(100):
            threading.Thread(target=time.sleep, args=(2,), daemon=True).start()
            count += 1
    except RuntimeError:
        pass
    print(count)
    """
    if os.geteuid() == 0 and strong_sandbox.level == "user_namespaces":
        pytest.skip("the kernel does not count root's threads, wherever they are")
    assert int(run(strong_sandbox, program).stdout) < LIMITS.processes


def test_memory_of_one_process_is_bounded(sandbox):
    done = run(sandbox, "kept = [bytearray(16 << 20) for _ in range(128)]; print('kept')")
    assert not done.is_success
    assert b"MemoryError" in done.stderr or done.ended == "memory"


def test_memory_of_all_processes_together_is_bounded(sandbox):
    program = """
    import os, time
    for _ in range(5):
        if os.fork() == 0:
            kept = bytearray(b"x") * (80 << 20)
            time.sleep(15)
            os._exit(0)
    time.sleep(15)
    """
    assert run(sandbox, program).ended == "memory"


def test_a_gigabyte_of_output_is_cut_off(sandbox):
    program = "import sys\nfor _ in range(1024): sys.stdout.write('x' * (1 << 20))"
    done = run(sandbox, program)
    assert done.ended == "output"
    assert not done.is_success


def test_a_flood_of_errors_is_dropped(sandbox):
    done = run(sandbox, "import sys\nfor _ in range(32): sys.stderr.write('x' * (1 << 20))\nprint('done')")
    assert (done.stdout, len(done.stderr)) == (b"done\n", LIMITS.stderr_bytes)


def test_a_file_is_bounded(sandbox):
    program = """
    try:
        with open("big", "wb") as file:
            for _ in range(64):
                file.write(b"x" * (1 << 20))
    except OSError as error:
        print(type(error).__name__)
    """
    assert run(sandbox, program).stdout == b"OSError\n"


def test_all_files_together_are_bounded_and_no_other_folder_can_be_written(namespace_sandbox):
    program = """
    import os
    written = 0
    try:
        for number in range(64):
            with open(f"file{number}", "wb") as file:
                written += file.write(b"x" * (1 << 19))
    except OSError:
        print(written < 2 << 20)
    for folder, _, _ in os.walk("/"):
        if not folder.startswith(("/proc", "/tmp")):
            try:
                open(os.path.join(folder, "mine"), "w").close()
                print("wrote", folder)
            except OSError:
                pass
        if folder.count("/") > 2:
            break
    """
    assert run(namespace_sandbox, program).stdout == b"True\n"


def test_programs_reach_no_network(sandbox):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        program = f"""
        import socket, subprocess
        for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK):
            try:
                socket.socket(family).close()
                print("open", family)
            except OSError:
                pass
        try:
            socket.create_connection(("127.0.0.1", {port}), timeout=2)
            print("connected")
        except OSError:
            pass
        subprocess.run(["/bin/bash", "-c", "echo hi > /dev/tcp/127.0.0.1/{port} && echo connected"], stderr=-3)
        print("over")
        """
        assert run(sandbox, program).stdout == b"over\n"
        listener.settimeout(0.05)
        with pytest.raises(TimeoutError):
            listener.accept()


def test_network_can_be_allowed(sandbox):
    open_sandbox = sandbox_at(sandbox.level, network="allow")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        program = (
            f"import socket; socket.create_connection(('127.0.0.1', {listener.getsockname()[1]})); print('connected')"
        )
        assert run(open_sandbox, program).stdout == b"connected\n"


def test_no_secrets_of_the_environment(strong_sandbox, monkeypatch):
    monkeypatch.setenv("API_KEY", "secret-of-mine")
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys; print(1, flush=True); sys.stdin.read()"], stdin=-1, stdout=-1
    )
    assert child.stdout.readline()
    program = """
    import glob, os
    for path in glob.glob("/proc/*/environ"):
        try:
            if "secret" + "-of-mine" in open(path, errors="replace").read():
                print(path)
        except OSError:
            pass
    print(sorted(os.environ))
    """
    try:
        done = run(strong_sandbox, program)
    finally:
        child.communicate()
    assert done.stdout == b"['HOME', 'LC_CTYPE', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS']\n"


def test_files_of_this_user_are_out_of_reach(strong_sandbox, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("mine")
    program = f"""
    for mode in "ra":
        try:
            open({str(secret)!r}, mode)
            print("opened")
        except OSError:
            print("refused")
    """
    assert run(strong_sandbox, program).stdout == b"refused\nrefused\n"


def test_other_processes_cannot_be_reached(sandbox):
    program = f"""
    import os, signal
    for pid in (os.getppid(), {os.getpid()}, 1):
        try:
            if pid > 0:
                os.kill(pid, signal.SIGTERM)
        except OSError:
            pass
    print("over")
    """
    victim = subprocess.Popen(["/bin/sleep", "60"])
    try:
        done = run(sandbox, f"import os\ntry:\n    os.kill({victim.pid}, 9)\nexcept OSError: print('refused')")
        assert victim.poll() is None
        assert done.stdout == b"refused\n"
    finally:
        victim.kill()
        victim.wait()
    assert run(sandbox, program).stdout == b"over\n"


def test_dangerous_system_calls_are_refused(sandbox):
    program = """
    import ctypes, os
    libc = ctypes.CDLL(None, use_errno=True)
    results = [libc.unshare(1 << 28), libc.ptrace(0, 0, 0, 0), libc.memfd_create(b"x", 0), libc.mount(0, 0, 0, 0, 0)]
    print(results, os.getresuid().count(0) if os.name else "")
    """
    assert run(sandbox, program).stdout.startswith(b"[-1, -1, -1, -1]")


@pytest.fixture
def marker():
    return f"marker-{uuid.uuid4().hex}"


def daemon(marker):
    """Return a program whose grandchild leaves its session and keeps running with its pipes."""
    return f"""
    import os, sys
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(500)", {marker!r}])
        os._exit(0)
    os.wait()
    print("left")
    """


def test_a_grandchild_that_left_its_session_is_ended_with_the_program(sandbox, marker):
    started_at = time.monotonic()
    done = run(sandbox, daemon(marker))
    assert (done.ended, done.stdout) == ("exited", b"left\n")
    wait_until(lambda: not processes_with(marker))
    assert time.monotonic() - started_at < 60


def sleeper(marker):
    return (
        f"import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(500)', {marker!r}])"
    )


def test_cancelling_ends_the_program(sandbox, marker):
    async def check():
        task = asyncio.create_task(sandbox.run(sleeper(marker)))
        while not processes_with(marker):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(check(), timeout=60))
    wait_until(lambda: not processes_with(marker))


@pytest.fixture
def own_tmp(monkeypatch):
    """Make a temporary folder that only this test's sandboxes use and every user can enter."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_programs_end_with_the_process_that_started_them(sandbox, marker, own_tmp):
    script = f"""
import asyncio, os
from rl_rollout.sandbox import Sandbox, SandboxOptions
if {sandbox.level!r} == "user_namespaces":
    os.geteuid = lambda: 1000
sandbox = Sandbox(SandboxOptions(isolation="any", python={sandbox._options.python!r}))
sandbox._level = {sandbox.level!r}
asyncio.run(sandbox.run({sleeper(marker)!r}))
"""
    trainer = subprocess.Popen([sys.executable, "-c", script])
    try:
        wait_until(lambda: len(processes_with(marker)) > 0)
        wait_until(lambda: any(pid != trainer.pid for pid in processes_with(marker)))
    finally:
        trainer.kill()
        trainer.wait()
    wait_until(lambda: not processes_with(marker))
    assert len(list(own_tmp.iterdir())) == 1  # a killed process leaves only its folder


def test_no_folder_stays_behind(sandbox, own_tmp):
    program = "import os\nfor i in range(300):\n    os.mkdir('d'); os.chdir('d')\nopen('x', 'w').close()"
    assert run(sandbox, program).is_success
    assert list(own_tmp.iterdir()) == []


def test_programs_do_not_meet(sandbox):
    async def check():
        writes = sandbox.run("open('mine', 'w').close(); import time; time.sleep(0.2); import os; print(os.listdir())")
        return await asyncio.gather(writes, sandbox.run("import os; print(os.listdir())"))

    first, second = asyncio.run(check())
    seen_by_first, seen_by_second = set(eval(first.stdout)), set(eval(second.stdout))
    assert "program.py" in seen_by_second
    assert seen_by_first - seen_by_second == {"mine"}


def test_a_sandbox_starts_with_the_strongest_level_that_works():
    sandbox = Sandbox(SandboxOptions(limits=LIMITS, isolation="any"))
    assert sandbox.level is None
    level = asyncio.run(sandbox.start())
    assert sandbox.level == level
    assert level in _levels(sandbox._options)


def test_where_no_sandbox_works_code_does_not_run(monkeypatch):
    async def fails(_self, level):
        return f"no {level}"

    monkeypatch.setattr(Sandbox, "_try", fails)
    with pytest.raises(
        SettingsError, match=r'no sandbox for code works here(.|\n)*isolation = "any"(.|\n)*no user_name'
    ):
        asyncio.run(Sandbox().run("print(1)"))


def test_a_launcher_that_breaks_is_an_error_and_no_verdict(monkeypatch):
    sandbox = Sandbox(SandboxOptions(isolation="any"))
    sandbox._level = "same_user"
    monkeypatch.setattr("rl_rollout.sandbox.launching.LAUNCHER", Path("/nowhere/at/all.py"))
    with pytest.raises(RoleError, match=r"ended without a report; it printed .*all\.py"):
        asyncio.run(sandbox.run("print(1)"))


def test_an_interpreter_that_is_not_there_is_an_error():
    sandbox = Sandbox(SandboxOptions(isolation="any", python="/nowhere/python"))
    sandbox._level = "same_user"
    with pytest.raises(RoleError, match="No such file or directory"):
        asyncio.run(sandbox.run("print(1)"))


@pytest.mark.parametrize("limits", [{"wall_s": 0}, {"memory_bytes": 1000}, {"processes": -1}, {"cpu_s": float("nan")}])
def test_impossible_limits_are_refused(limits):
    with pytest.raises(
        SettingsError, match=f"{next(iter(limits))} of SandboxLimits.* must be a (whole )?number (of at least|above)"
    ):
        Sandbox(SandboxOptions(limits=SandboxLimits(**limits)))


def test_impossible_options_are_refused(monkeypatch):
    for options in ({"network": "some"}, {"isolation": "weak"}):
        with pytest.raises(SettingsError, match="must be one of"):
            Sandbox(SandboxOptions(**options))
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(SettingsError, match="needs Linux; found darwin"):
        Sandbox()
