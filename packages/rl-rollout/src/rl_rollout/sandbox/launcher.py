"""First process of a sandbox: sets it up, runs one program in it, and ends everything that the program left.

The package starts this file as an isolated script, so it imports only the standard library. Its standard input begins
with a specification. Its standard output and error are the program's. The outcome goes to a pipe that the program does
not have.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import signal
import socket
import stat
import struct
import sys
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).parent))  # an isolated Python does not search its script's folder
from watch import awaited_signals, become, report, supervise  # type: ignore[import-not-found]

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
PR_SET_THP_DISABLE = 41
NEW_MOUNTS, NEW_UTS, NEW_IPC, NEW_USER, NEW_PIDS, NEW_NETWORK = 1 << 17, 1 << 26, 1 << 27, 1 << 28, 1 << 29, 1 << 30
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 1 << 12, 1 << 14, 1 << 18
READ_ONLY, NO_SUID, NO_DEVICES, RECURSIVE = 1, 2, 4, 0x8000
SYS_MOUNT_SETATTR, MNT_DETACH = 442, 2
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
DEVICES = ("null", "zero", "full", "random", "urandom")
WORK = "/tmp"  # noqa: S108 (the sandbox's own, inside its own root)
INNER_UID = 65534
RLIMIT_SIGPENDING = 11
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
LIBC = ctypes.CDLL(None, use_errno=True)

Spec = dict[str, Any]


def main() -> None:
    """Run the program of the specification, and report the outcome."""
    status_fd, handout_fd = map(int, sys.argv[1:])
    os.set_inheritable(status_fd, False)
    os.set_inheritable(handout_fd, False)
    spec = read_spec()
    os.umask(0o022)  # the program's user must be able to enter the folders that are made for it
    try:
        if spec["level"].endswith("namespaces"):
            run_in_namespaces(spec, status_fd, socket.socket(fileno=handout_fd))
        else:
            run_without_namespaces(spec, status_fd)
    except OSError as error:
        report_error(status_fd, error, where="in the launcher")


def read_spec() -> Spec:
    """Read the specification: its length in 8 bytes, then JSON. The rest is the program's input."""
    return dict(json.loads(read_exactly(int.from_bytes(read_exactly(8), "little"))))


def read_exactly(size: int) -> bytes:
    """Read this many bytes of standard input, and not one more."""
    received = bytearray()
    while len(received) < size:
        piece = os.read(0, size - len(received))
        if not piece:
            raise SystemExit("the specification ended early")
        received += piece
    return bytes(received)


def report_error(status_fd: int, error: OSError, *, where: str) -> None:
    """Report that the sandbox could not be set up."""
    report(status_fd, {"error": f"{error.strerror} ({error.filename or where})"})


def run_in_namespaces(spec: Spec, status_fd: int, handout: socket.socket) -> None:
    """Run in new process, mount, network and IPC namespaces. The kernel ends all processes with the first one."""
    flags = NEW_PIDS | NEW_MOUNTS | NEW_IPC | NEW_UTS | (0 if spec["network"] == "allow" else NEW_NETWORK)
    if spec["level"] == "user_namespaces":
        if spec["uid"] is not None:
            become(spec["uid"])
        enter_user_namespace(flags)
    else:
        check(LIBC.unshare(flags), "unshare")
    if spec["port"] and spec["network"] == "gateway":
        hand_out_listener(spec["port"], handout)
    handout.close()
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    first = os.fork()
    if first == 0:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            build_root(spec)
            supervise(spec, status_fd, start(spec, status_fd, folder=spec["cwd"] or WORK))
        except OSError as error:
            report_error(status_fd, error, where="in the first process")
        os._exit(0)
    close_standard_streams()
    os.waitpid(first, 0)


def run_without_namespaces(spec: Spec, status_fd: int) -> None:
    """Run with limits as another user or as this one, then find and end what the program left."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    check(LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1), "PR_SET_CHILD_SUBREAPER")
    Path(f"/proc/self/task/{os.getpid()}/children").read_text()  # raises if the kernel does not support it
    folder = spec["folder"]
    write_files(spec, folder)
    if spec["uid"] is not None:
        for name in ("", *spec["files"]):
            os.chown(Path(folder, name), spec["uid"], spec["uid"])
    supervise(spec, status_fd, start(spec, status_fd, folder=spec["cwd"] or folder))


def hand_out_listener(port: int, handout: socket.socket) -> None:
    """Listen in the new network and hand out the socket, which accepts in this network wherever it is used."""
    with socket.socket() as anyone:
        fcntl.ioctl(anyone, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))
    with socket.create_server(("127.0.0.1", port), backlog=128) as listening:
        socket.send_fds(handout, [b"1"], [listening.fileno()])


def enter_user_namespace(flags: int) -> None:
    """Become a user without rights outside, but with all rights in the new namespaces."""
    uid, gid = os.getuid(), os.getgid()
    check(LIBC.prctl(PR_SET_DUMPABLE, 1), "PR_SET_DUMPABLE")  # changing the user revoked access to /proc/self
    check(LIBC.unshare(flags | NEW_USER), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{INNER_UID} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{INNER_UID} {gid} 1")


def build_root(spec: Spec) -> None:
    """Build a root of read-only system folders, with devices, /proc, and a folder of limited size."""
    root = spec["folder"]
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    sources = [(path, os.open(path, os.O_PATH)) for path in spec["readable"] if not Path(path).is_symlink()]
    work = os.open(spec["work"], os.O_PATH) if spec["work"] else -1
    devices = [(f"/dev/{name}", os.open(f"/dev/{name}", os.O_PATH)) for name in DEVICES]  # the new root may hide them
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    make_work_folder(spec, root)  # first: readable paths may lie below it, such as a Python in /tmp
    for path, source in sources:
        bind(source, root + path)
        set_attributes(root + path, READ_ONLY | NO_SUID | NO_DEVICES, flags=RECURSIVE)
    for path in spec["readable"]:
        if Path(path).is_symlink() and not Path(root + path).exists():
            Path(root + path).parent.mkdir(parents=True, exist_ok=True)
            Path(root + path).symlink_to(Path(path).readlink())
    for path, source in devices:
        bind(source, root + path)
    if spec["work"]:  # at the same path as outside, below /tmp or not
        bind(work, root + spec["work"])
        set_attributes(root + spec["work"], NO_SUID | NO_DEVICES)
        Path(root, "dev/fd").symlink_to("/proc/self/fd")
    Path(root, "proc").mkdir()
    with contextlib.suppress(OSError):  # not allowed in a container that hides parts of its own /proc
        mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    os.chdir(root)
    check(LIBC.syscall(SYS_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    check(LIBC.umount2(b".", MNT_DETACH), "umount2")
    os.chdir("/")
    set_attributes("/", READ_ONLY)


def make_work_folder(spec: Spec, root: str) -> None:
    """Make the only folder that the program can write to, with its files."""
    uid = spec["uid"] if spec["level"] == "namespaces" else INNER_UID
    own_size = sum(len(text.encode(errors="surrogatepass")) for text in spec["files"].values())
    size = spec["limits"]["file_bytes"] + own_size + (1 << 16)
    Path(root + WORK).mkdir()
    mount(
        "tmpfs", root + WORK, "tmpfs", MS_NOSUID | MS_NODEV, f"size={size},nr_inodes=4096,mode=700,uid={uid},gid={uid}"
    )
    write_files(spec, root + WORK)


def write_files(spec: Spec, folder: str) -> None:
    """Write the program's files."""
    for name, text in spec["files"].items():
        path = Path(folder, name)
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        path.chmod(0o644)


def bind(source: int, target: str) -> None:
    """Mount an open folder or file at another path."""
    path = Path(target)
    if stat.S_ISDIR(os.fstat(source).st_mode):
        path.mkdir(parents=True, exist_ok=True)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    mount(f"/proc/self/fd/{source}", target, None, MS_BIND | MS_REC)
    os.close(source)


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """Mount with the flags and options of the system call."""
    arguments = (source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), options.encode())
    check(LIBC.mount(*arguments), f"mount {target}")


def set_attributes(path: str, attributes: int, *, flags: int = 0) -> None:
    """Add attributes to a mount, or with RECURSIVE also to all mounts below it."""
    given = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    check(LIBC.syscall(SYS_MOUNT_SETATTR, -100, path.encode(), flags, given, ctypes.c_size_t(32)), f"remount {path}")


def start(spec: Spec, status_fd: int, *, folder: str) -> int:
    """Fork the program and return its process id."""
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited_signals())
    program = os.fork()
    if program == 0:
        try:
            become_program(spec, folder)
        except OSError as error:
            report_error(status_fd, error, where="before the program started")
        finally:
            os._exit(127)
    close_standard_streams()
    return program


def become_program(spec: Spec, folder: str) -> NoReturn:
    """Drop all rights, then run the program."""
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    os.chdir(folder)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # when memory runs out, this is killed first
    if spec["uid"] is not None and spec["level"] != "user_namespaces":
        become(spec["uid"])
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if spec["level"] != "unconfined":
        limit(spec)
        LIBC.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)  # in steps of 2 MiB, memory would grow far between two checks
        check(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")
        install_filter(bytes.fromhex(spec["system_calls"]))
    command = spec["command"]
    os.execvpe(command[0], command, {"HOME": folder, **spec["environment"]})  # noqa: S606 (what this is for)


def limit(spec: Spec) -> None:
    """Set the resource limits of each process of the program."""
    limits = spec["limits"]
    cpu_s = max(1, round(limits["cpu_s"]))
    num_processes = limits["processes"] + {"user_namespaces": 1, "same_user": num_threads_of_user()}.get(
        spec["level"], 0
    )
    for name, soft, hard in (
        (resource.RLIMIT_CPU, cpu_s, cpu_s + 1),
        *([] if spec["work"] else [(resource.RLIMIT_AS, limits["memory_bytes"], limits["memory_bytes"])]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"], limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"], limits["open_files"]),
        (resource.RLIMIT_NPROC, num_processes, num_processes),
        (resource.RLIMIT_CORE, 1, 1),  # with 0, the kernel still passes a core to a handler that runs as root
        (RLIMIT_SIGPENDING, 1024, 1024),  # also limits timers, which use kernel memory
        (resource.RLIMIT_MEMLOCK, 0, 0),
    ):
        allowed = resource.getrlimit(name)[1]
        if allowed != resource.RLIM_INFINITY:
            soft, hard = min(soft, allowed), min(hard, allowed)
        resource.setrlimit(name, (soft, hard))


def num_threads_of_user() -> int:
    """Return the number of threads that run as this user, because the process limit counts them too."""
    total = 0
    for path in Path("/proc").glob("[0-9]*/task"):
        with contextlib.suppress(OSError):
            total += path.stat().st_nlink - 2 if path.stat().st_uid == os.getuid() else 0
    return total


def install_filter(program: bytes) -> None:
    """Refuse some system calls from now on, in this process and its descendants."""
    if not program:
        return
    code = ctypes.create_string_buffer(program, len(program))
    given = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))  # struct sock_fprog
    check(LIBC.prctl(PR_SET_SECCOMP, 2, given, 0, 0), "PR_SET_SECCOMP")


def close_standard_streams() -> None:
    """Close this process's copies of the program's pipes."""
    null = os.open("/dev/null", os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    os.close(null)


def check(result: int, what: str) -> None:
    """Raise OSError for a failed system call."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


if __name__ == "__main__":
    main()
