"""Programs that try to escape from the sandbox or exhaust the machine, at the default level of isolation.

Every run includes a sample; `soak` includes all. A program that succeeds prints SUCCEEDED.
"""

import asyncio
import sys
import textwrap
from pathlib import Path

import pytest

from rl_core.errors import SettingsError
from rl_rollout.sandbox import Sandbox, SandboxLimits, SandboxOptions

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")

LIMITS = SandboxLimits(wall_s=20.0, memory_bytes=128 << 20, processes=8, file_bytes=1 << 20)
HEAD = """
import ctypes, mmap, os, platform, resource, signal, socket, struct, subprocess, sys, threading, time
LIMIT = 128 << 20
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

def succeeded():
    print("SUCCEEDED", flush=True)

def call(on_x86, on_arm, *given):
    "A system call by its number; succeeds unless it is refused as such."
    done = libc.syscall(on_x86 if platform.machine() == "x86_64" else on_arm, *given)
    if done >= 0 or ctypes.get_errno() not in (1, 38):
        succeeded()

def mapped(size, flags, fd=-1):
    at = libc.mmap(None, size, 3, flags, fd, 0)
    return None if at in (None, 2**64 - 1) else at

def fill_and_let_go(at, size):
    for offset in range(0, size, 1 << 20):
        ctypes.memset(at + offset, 1, 1 << 20)
        libc.madvise(at + offset, 1 << 20, 4)

def children(number, act):
    for _ in range(number):
        try:
            if os.fork() == 0:
                try:
                    act()
                finally:
                    os._exit(0)
        except BlockingIOError:
            break
"""

ESCAPES = {
    "reads the user's files": """
        for path in ("/etc/shadow", "/etc/passwd", os.path.expanduser("~root/.bashrc"), "/home", {here!r}):
            try:
                os.listdir(path) if os.path.isdir(path) else open(path).read()
                succeeded()
            except OSError: pass
        """,
    "writes where Python and the system lie": """
        for folder in ("/", "/usr", "/etc", "/dev", "/proc", sys.prefix, *sys.path):
            try:
                open(os.path.join(folder, "sitecustomize.py"), "w")
                succeeded()
            except OSError: pass
        """,
    "connects": """
        for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK, socket.AF_PACKET):
            try:
                socket.socket(family, socket.SOCK_RAW if family == socket.AF_PACKET else socket.SOCK_STREAM)
                succeeded()
            except OSError: pass
        """,
    "sees other processes": """
        if set(name for name in os.listdir("/proc") if name.isdecimal()) - {"1", str(os.getpid())}: succeeded()
        """,
    "kills the process that watches it": """
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP):
            for pid in (1, os.getppid(), -1):
                try: os.kill(pid, number)
                except OSError: pass
        """,
    "has a signal sent by the kernel": """
        import fcntl
        reads, writes = os.pipe()
        try:
            fcntl.fcntl(reads, fcntl.F_SETOWN, 1)
            fcntl.fcntl(reads, 10, signal.SIGKILL)
            succeeded()
        except OSError: pass
        """,
    "traces": "for request in (0, 16, 0x4206): call(101, 117, request, 1, 0, 0)",
    "reads the watching process's memory": """
        for name in ("mem", "environ", "maps", "fd", "cwd", "root/etc/shadow"):
            try:
                path = "/proc/1/" + name
                os.listdir(path) if name in ("fd", "cwd") else open(path, "rb").read(1)
                succeeded()
            except OSError: pass
        """,
    "reads another's memory by a system call": "call(310, 270, 1, 0, 0, 0, 0, 0)",
    "enters a namespace": "call(272, 97, 0x10000000)",
    "makes a namespace with a process": "call(56, 220, 0x10000000 | 17, 0, 0, 0, 0)",
    "makes a namespace by clone3": "call(435, 435, ctypes.byref((ctypes.c_uint64 * 8)(0x10000000)), 64)",
    "mounts": "call(165, 40, b'none', b'/tmp', b'tmpfs', 0, 0); call(428, 428, -100, b'/', 1)",
    "leaves its root": "call(161, 51, b'/tmp'); call(155, 41, b'/tmp', b'/tmp')",
    "becomes root": """
        for become in (os.setuid, os.seteuid, os.setgid, os.setegid):
            try:
                become(0)
                succeeded()
            except OSError: pass
        """,
    "runs what has the right to become root": """
        found = [path for folder in ("/usr/bin", "/bin", "/usr/sbin") if os.path.isdir(folder)
                 for path in (os.path.join(folder, name) for name in os.listdir(folder))
                 if os.path.exists(path) and os.stat(path).st_mode & 0o4000]
        for path in found:
            if path.endswith(("/mount", "/umount")):
                if subprocess.run([path, "/tmp"], capture_output=True).returncode == 0: succeeded()
        """,
    "makes a device": """
        for kind in (0o60660, 0o20660):
            try:
                os.mknod("/tmp/device", kind, os.makedev(8, 0))
                succeeded()
            except OSError: pass
        """,
    "changes the kernel's settings": """
        for path in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/self/oom_score_adj"):
            try:
                open(path, "wb", 0).write(b"-1000")
                succeeded()
            except OSError: pass
        """,
    "loads code into the kernel": "call(321, 280, 0, 0, 0); call(313, 273, 0, b'', 0); call(246, 104, 0, 0, 0, 0)",
    "asks for a ring": "call(425, 425, 8, ctypes.byref((ctypes.c_char * 256)()))",
    "keeps a key": "call(248, 217, b'user', b'name', b'value', 5, -3)",
    "opens by handle": "call(304, 265, -100, 0, 0)",
    "has more than its three streams": """
        for fd in range(3, 64):
            try:
                os.fstat(fd)
                succeeded()
            except OSError: pass
        """,
    "finds secrets in its environment": """
        known = {"HOME", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "LD_LIBRARY_PATH", "LC_CTYPE"}
        if set(os.environ) - known: succeeded()
        """,
}

EXHAUSTS = {
    "shared pages that it lets go": """
        at = mapped(LIMIT // 4, 0x21)
        if at: fill_and_let_go(at, LIMIT // 4); succeeded()
        """,
    "shared pages, validated": "if mapped(1 << 20, 0x23): succeeded()",
    "shared pages of /dev/zero": """
        at = mapped(LIMIT // 4, 0x1, os.open("/dev/zero", os.O_RDWR))
        if at: fill_and_let_go(at, LIMIT // 4); succeeded()
        """,
    "files in memory": "call(319, 279, b'x', 0); call(447, 447, 0)",
    "shared memory of System V": """
        call(29, 194, 0, 1 << 20, 0o1600); call(68, 186, 0, 0o1600); call(64, 190, 0, 1, 0o1600)
        """,
    "page tables": """
        def grow():
            for number in range(1, 25000):
                at = libc.mmap(number << 31, 4096, 1, 0x100022, -1, 0)
                if at not in (None, 2**64 - 1): ctypes.c_char.from_address(at).value
            time.sleep(0.5)
            succeeded()
        children(2, grow)
        time.sleep(15)
        """,
    "behind a first thread that ended": """
        def grow():
            time.sleep(0.1)
            kept = [bytearray(b"x") * (40 << 20) for _ in range(2)]
            time.sleep(1)
            succeeded()
        def end_first():
            threading.Thread(target=grow).start()
            libc.syscall(60 if platform.machine() == "x86_64" else 93, 0)
        children(3, end_first)
        time.sleep(10)
        """,
    "children of threads": """
        def grow():
            kept = bytearray(b"x") * (80 << 20)
            time.sleep(1)
            succeeded()
        thread = threading.Thread(target=lambda: (children(3, grow), time.sleep(5)))
        thread.start()
        thread.join()
        """,
    "pages kept by a pipe": "call(278, 75, 1, 0, 0, 0); call(275, 76, 0, 0, 1, 0, 1, 0); call(276, 77, 0, 1, 1, 0)",
    "files kept by a pipe": "call(40, 71, 1, 0, 0, 1)",
    "large pipes": """
        import fcntl
        try:
            fcntl.fcntl(os.pipe()[1], 1031, 1 << 20)
            succeeded()
        except OSError: pass
        """,
    "large buffers of sockets": """
        try:
            socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)
            succeeded()
        except OSError: pass
        """,
    "memory of one process": """
        try:
            kept = [bytearray(b"x") * (16 << 20) for _ in range(9)]
            succeeded()
        except MemoryError: pass
        """,
    "memory of many processes": """
        def grow():
            kept = bytearray(b"x") * (60 << 20)
            time.sleep(1)
            succeeded()
        children(5, grow)
        time.sleep(10)
        """,
    "huge pages": "if mapped(2 << 20, 0x40022): succeeded()",
    "a fork bomb": """
        children(50, lambda: time.sleep(5))
        if len([name for name in os.listdir("/proc") if name.isdecimal()]) > 10: succeeded()
        """,
    "ten thousand threads": """
        threading.stack_size(65536)
        try:
            for _ in range(10000): threading.Thread(target=time.sleep, args=(3,), daemon=True).start()
        except RuntimeError: pass
        if threading.active_count() > 8: succeeded()
        os._exit(0)
        """,
    "files that fill the disk": """
        total = 0
        try:
            for number in range(64): total += open(f"f{number}", "wb", 0).write(b"x" * (1 << 19))
        except OSError: pass
        if total > 2 << 20: succeeded()
        """,
    "files without a name": """
        total, kept = 0, []
        try:
            for number in range(32):
                kept.append(open("f", "wb", 0))
                os.unlink("f")
                total += kept[-1].write(b"x" * (1 << 19))
        except OSError: pass
        if total > 2 << 20: succeeded()
        """,
    "a hundred thousand empty files": """
        try:
            for number in range(100_000): os.close(os.open(f"f{number}", os.O_CREAT))
            succeeded()
        except OSError: pass
        """,
    "attributes of files": """
        call(188, 5, b"program.py", b"user.x", b"y", 1, 0); call(190, 7, 0, b"user.x", b"y", 1, 0)
        """,
    "forty thousand locks": """
        import fcntl
        try:
            files = [open(f"l{number}", "w") for number in range(50)]
            for start in range(40_000, 0, -1):
                fcntl.lockf(files[start % 50], fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 2 * start)
            time.sleep(0.5)
            succeeded()
        except OSError: pass
        """,
    "ten thousand timers": """
        timer = ctypes.c_void_p()
        made = sum(libc.timer_create(1, None, ctypes.byref(timer)) == 0 for _ in range(10_000))
        if made > 2000: succeeded()
        """,
    "rules of landlock": "call(444, 444, ctypes.byref((ctypes.c_uint64 * 2)(1, 0)), 8, 0)",
    "ten thousand files at once": """
        kept = []
        try:
            while len(kept) < 10_000: kept.append(os.open("/dev/null", os.O_RDONLY))
            succeeded()
        except OSError: pass
        """,
    "a gigabyte of output": """
        for _ in range(1024): os.write(1, b"x" * (1 << 20))
        os.write(1, b"SUCCEEDED")
        """,
    "a stack without end": """
        sys.setrecursionlimit(1 << 30)
        def deep(): return deep()
        try: deep()
        except (RecursionError, MemoryError): pass
        """,
}

IN_EVERY_RUN = {
    *("reads the user's files", "connects", "kills the process that watches it", "has a signal sent by the kernel"),
    *("makes a namespace with a process", "becomes root", "has more than its three streams"),
    *("shared pages that it lets go", "shared pages of /dev/zero", "behind a first thread that ended"),
    *("pages kept by a pipe", "large buffers of sockets", "forty thousand locks", "attributes of files"),
}


def table(programs):
    """Return the programs as parameters; those outside the sample are marked `soak`."""
    return [
        pytest.param(program, id=name, marks=() if name in IN_EVERY_RUN else pytest.mark.soak)
        for name, program in programs.items()
    ]


@pytest.fixture(scope="module")
def sandbox():
    sandbox = Sandbox(SandboxOptions(limits=LIMITS))
    try:
        level = asyncio.run(sandbox.start())
    except SettingsError as error:
        pytest.skip(str(error))
    if level not in ("namespaces", "user_namespaces"):
        pytest.skip("this machine gives programs no namespaces of their own")
    return sandbox


@pytest.mark.parametrize("program", table(ESCAPES | EXHAUSTS))
def test_no_program_escapes_or_exhausts(sandbox, program):
    source = textwrap.dedent(program).replace("{here!r}", repr(str(Path(__file__).parent)))
    run = asyncio.run(sandbox.run(HEAD + source))
    assert b"SUCCEEDED" not in run.stdout
    assert b"SyntaxError" not in run.stderr
    assert b"NameError" not in run.stderr


def test_the_sample_is_of_the_table():
    assert (ESCAPES | EXHAUSTS).keys() >= IN_EVERY_RUN
