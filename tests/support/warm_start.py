"""Starts our trainers and roles from a process that has imported torch, transformers, Megatron and vLLM already.

`install()` replaces `subprocess.Popen`. A child that runs `python -m MODULE`, with a module in `MODULES`, or a script
in `SCRIPTS`, is forked from a server instead of started from scratch, which saves seconds of imports in each of some
hundred processes. The fork is a direct child of its caller and has the caller's descriptors, the requested environment
and session, and its mark in /proc, so signals, waiting, guards and kills work as for any other child. It gets its own
server for the processes it starts. Children with other thread counts, other programs, and all children on a machine
with a GPU start from scratch. So does everything with RL_TESTS_COLD=1, which `nox -s soak` sets.

The server is `python -c "import warm_start; warm_start.serve()" FD`. It has one thread and ends with its caller.
"""

import ctypes
import faulthandler
import fcntl
import gc
import importlib
import importlib.util
import inspect
import json
import os
import platform
import runpy
import signal
import socket
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import chaos_clock

from rl_core.files.durable import current_umask

MODULES = {
    "adapter_killer",
    "async_driver",
    "chaos_driver",
    "distillation_driver",
    "pretend_steps",
    "rl_async_trainer.main",
    "rl_core.cluster.processes.child",
    "rl_core.queue.shared_memory.server_process",
    "rl_service.main",
    "rl_sync_trainer.main",
    "test_megatron_two_ranks",
}
"""Programs that may be forked because most of their start-up is imports."""
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPTS = (BENCHMARKS, BENCHMARKS / "peers")
"""Folders of scripts that may be forked too."""
PRELOADED = (
    "torch",
    "transformers",
    "transformers.models.qwen3.modeling_qwen3",
    "pyarrow.dataset",
    "safetensors.torch",
    "rl_distill.megatron.learner",
    "rl_rollout.engines.transformers",
    "rl_sync_trainer.training_run",
    "rl_async_trainer.training_run",
    "rl_rollout.rollouter.rollouter",
    "rl_async_trainer.roles.learner",
    "rl_rollout.engines.vllm.stepper",
    "rl_rollout.engines.vllm.worker",
    "rl_service.routes",
)
COLD_VARIABLE = "RL_TESTS_COLD"
FIXED = ("OMP_NUM_THREADS", "PYTHONOPTIMIZE", "LD_PRELOAD", "HF_HUB_OFFLINE", COLD_VARIABLE)
"""Variables that an interpreter or a library reads only once, when it starts."""
MARKS = {"TINY_RUN_MARK": 32, "RL_ROLE_MARKS": 330}
"""Variables that identify a process in /proc, and the bytes that the server reserves for each."""
ALONE = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Keeps libraries from starting threads, which a fork would lose."""

CLONE_CALLS = {"x86_64": 56, "aarch64": 220}
CLONE_PARENT, CLONE_CHILD_SETTID, CLONE_CHILD_CLEARTID = 0x8000, 0x01000000, 0x00200000
PR_GET_TID_ADDRESS = 40


class WarmPopen(subprocess.Popen):  # type: ignore[type-arg]
    """A `Popen` whose child may be forked from the server."""

    def _execute_child(self, *arguments: Any) -> None:
        given = dict(zip(_EXECUTE_CHILD, arguments, strict=True))
        server = _server_for(given)
        if server is None:
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        pipes = [given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        try:
            self.pid = server.fork(given)
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


_EXECUTE_CHILD = list(inspect.signature(subprocess.Popen._execute_child).parameters)[1:]  # type: ignore[attr-defined]


class Server:
    """The caller's side of a server."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._owner = os.getpid()

    @property
    def is_ours(self) -> bool:
        """False after an ordinary `os.fork`: the server would make children of our parent."""
        return self._owner == os.getpid()

    def fork(self, given: Mapping[str, Any]) -> int:
        """Ask for a child and return its process id."""
        streams = [
            given[name] if given[name] != -1 else n for n, name in enumerate(("p2cread", "c2pwrite", "errwrite"))
        ]
        passed = sorted(given["pass_fds"])
        request = {
            "words": [str(word) for word in given["args"][1:]],
            "environment": dict(os.environ if given["env"] is None else given["env"]),
            "directory": str(Path(given["cwd"] or ".").absolute()),
            "descriptors": [0, 1, 2, *passed],
            "has_session": given["start_new_session"],
            "umask": current_umask() if given["umask"] == -1 else given["umask"],
        }
        content = json.dumps(request).encode()
        with self._lock:
            socket.send_fds(self._connection, [len(content).to_bytes(8, "big")], [*streams, *passed])
            self._connection.sendall(content)
            answer = self._connection.recv(8)
        if not answer:
            raise RuntimeError("the server of warm starts has ended.")
        return int.from_bytes(answer, "big")


_servers: list[Server] = []


def install() -> None:
    """Start our own programs warm from now on, if this machine and environment allow it."""
    can = sys.platform == "linux" and platform.machine() in CLONE_CALLS and not Path("/dev/nvidiactl").exists()
    if can and importlib.util.find_spec("transformers") and not os.environ.get(COLD_VARIABLE):
        subprocess.Popen = WarmPopen  # type: ignore[misc]


def _server_for(given: Mapping[str, Any]) -> Server | None:
    """This process's server, started on first use; None if the child must start from scratch."""
    words = given["args"]
    if isinstance(words, str | bytes | os.PathLike) or len(words) < 2 or words[0] != sys.executable:
        return None
    is_known = words[2] in MODULES if words[1] == "-m" else Path(os.fsdecode(words[1])).parent in SCRIPTS
    environment = os.environ if given["env"] is None else given["env"]
    is_plain = (
        given["close_fds"] and not given["shell"] and given["preexec_fn"] is None and given["process_group"] == -1
    )
    is_same = all(environment.get(name) == os.environ.get(name) for name in FIXED)
    has_room = all(len(environment.get(name, "")) <= room for name, room in MARKS.items())
    if not (is_known and is_plain and is_same and has_room):
        return None
    if not _servers or not _servers[-1].is_ours:
        _servers.append(_start())
    return _servers[-1]


def _start() -> Server:
    """Start a server, which ends when this process closes the connection."""
    ours, theirs = socket.socketpair()
    environment = {**os.environ, **ALONE, **{name: " " * room for name, room in MARKS.items()}}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", "import warm_start; warm_start.serve()", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    weakref.finalize(process, _end, process, ours)
    _processes.append(process)
    if ours.recv(8) != b"is ready":
        raise RuntimeError("the server of warm starts did not start; what it said stands above.")
    return Server(ours)


_processes: list["subprocess.Popen[bytes]"] = []


def _end(process: "subprocess.Popen[bytes]", connection: socket.socket) -> None:
    connection.close()
    process.wait()


class Request(NamedTuple):
    """Describes the child to make.

    Attributes:
        words: Arguments of `python`.
        environment: The whole environment.
        directory: Working directory.
        descriptors: Number of each file of `received` in the child; the first three are the standard streams.
        received: Open files, as the server numbers them.
        has_session: Whether it leads a new session.
        umask: The caller's.
    """

    words: Sequence[str]
    environment: Mapping[str, str]
    directory: str
    descriptors: Sequence[int]
    received: Sequence[int]
    has_session: bool
    umask: int


def serve() -> None:
    """Import the libraries, then make children on request; returns only in a child, to run its program."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    libc = ctypes.PyDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    marks = {name: libc.getenv(name.encode()) for name in MARKS}  # addresses that /proc/PID/environ reads
    with suppress(ModuleNotFoundError):  # when a package is tested alone
        importlib.import_module("rl_rollout.engines.vllm.environment").prepare_environment()
    for name in PRELOADED:
        with suppress(ModuleNotFoundError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    if (threads := len(list(Path("/proc/self/task").iterdir()))) != 1:
        raise RuntimeError(f"only a process with one thread can be forked; the imports started {threads - 1} more.")
    connection.sendall(b"is ready")
    while True:
        request = _next_child(connection, libc)
        connection.close()
        ours, connection = socket.socketpair()
        if os.fork():
            break
        ours.close()  # this process becomes the child's server
        for descriptor in request.received:
            os.close(descriptor)
    connection.close()
    _servers.append(Server(socket.socket(fileno=_moved(ours.detach(), above=max(request.descriptors)))))
    install()
    _become(request, marks)


def _next_child(connection: socket.socket, libc: ctypes.PyDLL) -> Request:
    """Make children on request; returns in each child, never in the server."""
    while True:
        header, received, _, _ = socket.recv_fds(connection, 8, 64)
        if not header:
            os._exit(0)  # the caller has ended
        content = b""
        while len(content) < int.from_bytes(header, "big"):
            part = connection.recv(1 << 20)
            if not part:
                os._exit(0)  # it has ended in the middle of a request
            content += part
        pid = _fork_sibling(libc)
        if pid == 0:
            return Request(**json.loads(content), received=received)
        connection.sendall(pid.to_bytes(8, "big"))
        for descriptor in received:
            os.close(descriptor)


def _fork_sibling(libc: ctypes.PyDLL) -> int:
    """Fork like `os.fork`, but as a child of this process's parent."""
    thread_id = ctypes.c_void_p()  # where the C library keeps the main thread's id, which fork(2) would update
    libc.prctl(PR_GET_TID_ADDRESS, ctypes.byref(thread_id), 0, 0, 0)
    flags = CLONE_PARENT | signal.SIGCHLD | ((CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID) if thread_id else 0)
    x86 = platform.machine() == "x86_64"  # other architectures swap the last two arguments
    last = (thread_id, None) if x86 else (None, thread_id)
    api = ctypes.pythonapi
    api.PyOS_BeforeFork()
    pid = int(libc.syscall(CLONE_CALLS[platform.machine()], flags, None, None, *last))
    if pid == 0:
        api.PyOS_AfterFork_Child()
    else:
        api.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError("no process could be forked.")
    return pid


def _moved(descriptor: int, *, above: int) -> int:
    """Move a descriptor to a larger number, which the request does not use."""
    high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above + 1)
    os.close(descriptor)
    return high


def _become(request: Request, marks: Mapping[str, int]) -> None:
    """Set up the state of a new process, and run the program."""
    if request.has_session:
        os.setsid()
    moved = [_moved(one, above=max(request.descriptors)) for one in request.received]
    for one, number in zip(moved, request.descriptors, strict=True):
        os.dup2(one, number)
        os.close(one)
    os.chdir(request.directory)
    os.umask(request.umask)
    os.environ.clear()
    os.environ.update(request.environment)
    for name, room in MARKS.items():
        ctypes.memmove(marks[name], request.environment.get(name, "").encode().ljust(room, b"\0"), room)
    if file := os.environ.get("RL_TEST_STARTS"):  # like every interpreter of our environments at its start
        with Path(file).open("ab") as starts:
            starts.write(b".")
    warnings._processoptions(filter(None, os.environ.get("PYTHONWARNINGS", "").split(",")))  # type: ignore[attr-defined]
    warnings.filterwarnings("ignore", message=".* found in sys.modules", category=RuntimeWarning)
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    is_module, program = request.words[0] == "-m", request.words[0]
    folder = request.directory if is_module else str(Path(program).parent)
    first = [folder, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[:] = [*first, *(path for path in sys.path if path not in first and path)]
    chaos_clock.install()
    if is_module:
        sys.argv = ["-m", *request.words[2:]]
        runpy.run_module(request.words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(request.words)
        runpy.run_path(program, run_name="__main__")
