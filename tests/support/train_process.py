"""The command in a separate process, observed by conditions with deadlines."""

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

from tiny_run import TinyRun

from rl_core.cluster.processes.guard import is_running

DRIVER = Path(__file__).with_name("command_driver.py")
DEADLINE_S = 120.0
TICK_S = 0.02
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONWARNINGS": "ignore",
    "PYTHONFAULTHANDLER": "1",
    "TERM": "xterm-256color",
}


class TrainProcess:
    """A trainer's command with a mark in its environment, by which leftover processes are found."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        output: Path,
        environment: Mapping[str, str],
        module: str = "rl_sync_trainer.main",
        columns: int | None = None,
    ) -> None:
        """Start it.

        Args:
            words: Arguments of the command.
            output: File for its output.
            environment: Variables beside this process's own.
            module: Module for `python -m`.
            columns: Width of its terminal; None writes to the file.
        """
        self.output = output
        self._terminal = None if columns is None else Terminal(output, columns)
        self._mark = f"TINY_RUN_MARK={uuid.uuid4().hex}"
        name, _, value = self._mark.partition("=")
        with self._terminal.opened() if self._terminal is not None else output.open("wb") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *words],
                stdout=stream,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **ENVIRONMENT, **environment, name: value},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id, and the id of its process group and session."""
        return self._process.pid

    @property
    def text(self) -> str:
        """Its output so far."""
        return self.output.read_text(errors="replace")

    def close_terminal(self) -> None:
        """Close its terminal, as users close a window."""
        assert self._terminal is not None
        self._terminal.close()

    def resize_terminal(self, columns: int) -> None:
        """Change the width of its terminal."""
        assert self._terminal is not None
        self._terminal.resize(columns)

    @property
    def status(self) -> int | None:
        """Exit status; None while it runs."""
        return self._process.poll()

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """Wait for its exit status, negative after a signal."""
        try:
            return self._process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self._abort()
            raise AssertionError(f"still running after {deadline_s:g} s; it said:\n{self.text}") from None

    def wait_until(self, condition: Callable[[], Any], what: str) -> None:
        """Return once the condition holds; fail if the process ends first, or at the deadline."""
        end = monotonic() + DEADLINE_S
        while not condition():
            try:
                status = self._process.wait(TICK_S)
            except subprocess.TimeoutExpired:
                if monotonic() > end:
                    self._abort()
                    raise AssertionError(f"no {what} within {DEADLINE_S:g} s; it said:\n{self.text}") from None
            else:
                raise AssertionError(f"it ended with {status} before {what}; it said:\n{self.text}")

    def signal(self, number: int) -> None:
        """Send a signal to the process only."""
        self._process.send_signal(number)

    def signal_group(self, number: int) -> None:
        """Send a signal to it and its children, as a terminal does for Ctrl-C."""
        os.killpg(self.pid, number)

    def children(self) -> list[int]:
        """Return its running child processes."""
        return [pid for pid in marked_processes(self._mark) if pid != self.pid]

    def _abort(self) -> None:
        """End it in any state, after it has printed the stacks of its threads."""
        self._process.send_signal(signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10.0)

    def kill_all(self) -> None:
        """Kill it and all its child processes at once; return once they hold no files."""
        killed: set[int] = set()
        while (left := marked_processes(self._mark)) or any(map(holds_files, killed)):
            killed.update(left)
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            signal.sigtimedwait([], TICK_S)
        self._process.wait()

    def leftovers(self) -> list[str]:
        """Wait for its processes to end; return those left at the deadline, with their commands."""
        end = monotonic() + DEADLINE_S  # Ray's agents poll for their raylet; roles may take 10 s to end
        while (left := marked_processes(self._mark)) and monotonic() < end:
            signal.sigtimedwait([], TICK_S)
        return [f"{pid} {command_of(pid)}" for pid in left]

    def end(self) -> None:
        """Kill its remaining processes."""
        self.kill_all()


def holds_files(pid: int) -> bool:
    """Return True until a killed process has closed its files, which it does after it has lost its environment."""
    try:
        return is_running(pid) or len(list(Path(f"/proc/{pid}/task").iterdir())) > 1
    except (FileNotFoundError, ProcessLookupError):
        return False


class Terminal:
    """A terminal that writes to a file."""

    def __init__(self, output: Path, columns: int) -> None:
        """Open it with a width."""
        self._ours, self._theirs = pty.openpty()
        self._is_closed = threading.Event()
        self.resize(columns)
        output.touch()
        self._thread = threading.Thread(target=self._copy, args=[output], daemon=True)
        self._thread.start()

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Return the child's end."""
        try:
            yield self._theirs
        finally:
            os.close(self._theirs)

    def resize(self, columns: int) -> None:
        """Change its width."""
        termios.tcsetwinsize(self._ours, (24, columns))

    def close(self) -> None:
        """Close it; later writes to it fail."""
        self._is_closed.set()
        self._thread.join(DEADLINE_S)

    def _copy(self, output: Path) -> None:
        with output.open("ab", buffering=0) as file, contextlib.suppress(OSError):  # the other end is closed
            while not self._is_closed.is_set():
                if select.select([self._ours], [], [], TICK_S)[0]:
                    file.write(os.read(self._ours, 1 << 16))
        os.close(self._ours)


def command_of(pid: int) -> str:
    """Return a process's command; empty once it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:300]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def marked_processes(mark: str) -> list[int]:
    """Return running processes with this text in their environment, in any session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if mark.encode() in environment and state != "Z":
                found.append(int(entry.name))
    return found


@contextmanager
def training(
    run: TinyRun, *words: str, hold_after: int | None = None, columns: int | None = None, **settings: Any
) -> Iterator[TrainProcess]:
    """A training process; killed at the end if it still runs.

    Args:
        run: Its inputs.
        words: Further arguments, such as "--resume".
        hold_after: Number of reward calls after which every further one waits for `released`.
        columns: Width of its terminal; None writes to a file.
        settings: Settings such as trainer__steps=3.
    """
    (run.folder / "held").unlink(missing_ok=True)
    (run.folder / "released").unlink(missing_ok=True)
    environment = {} if hold_after is None else {"TINY_RUN_HOLD_AFTER": str(hold_after)}
    number = len(list(run.folder.glob("output-*.txt")))
    output = run.folder / f"output-{number}.txt"
    process = TrainProcess(run.train_words(*words, **settings), output=output, environment=environment, columns=columns)
    try:
        yield process
    finally:
        process.end()


def wait_until_held(process: TrainProcess, run: TinyRun) -> None:
    """Return once a reward call waits, so rollouts are in progress."""
    process.wait_until((run.folder / "held").exists, "a held reward call")


def drive(cases: Mapping[str, Mapping[str, Any]], folder: Path) -> dict[str, dict[str, Any]]:
    """Run commands one after the other in one fresh interpreter.

    Args:
        cases: The `words` of a command and its `environment`, by name.
        folder: Working directory.

    Returns:
        Result of `command_driver.run_case` by name.
    """
    (folder / "cases.json").write_text(json.dumps(cases))
    files = [str(folder / "cases.json"), str(folder / "results.json")]
    done = subprocess.run(
        [sys.executable, str(DRIVER), *files],
        env={**os.environ, **ENVIRONMENT},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results: dict[str, dict[str, Any]] = json.loads((folder / "results.json").read_text())
    return results
