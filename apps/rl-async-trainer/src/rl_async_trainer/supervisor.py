"""A small process that starts the run, and restarts it from the last checkpoint if it is killed.

The run's process is the controller; its roles end with it. It has its own session, so Ctrl-C reaches only the
supervisor, which forwards it once. If the supervisor dies, the run writes a checkpoint and stops.
"""

import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from types import FrameType

from rl_async_trainer.liveness.control_socket import SUPERVISOR_LOCK
from rl_async_trainer.settings import AsyncSettings
from rl_core.files import open_lock_file
from rl_core.terminal_text import counted
from rl_metrics.run_files import EventLog
from rl_trainer_parts.reporting.trackers import make_console

PIPE_VARIABLE = "RL_ASYNC_TRAINER_PIPE"
"""File descriptor of a pipe that stays open while the supervisor is alive."""

LOOK_EVERY_S = 1.0
"""Maximum delay of a signal that arrives just before the supervisor waits."""


def end_with_supervisor() -> bool:
    """Stop this run, as SIGTERM does, when its supervisor dies; False if no supervisor started this process."""
    descriptor = os.environ.pop(PIPE_VARIABLE, None)  # children of this process must not inherit it
    if descriptor is None:
        return False
    pipe = int(descriptor)
    os.set_inheritable(pipe, False)

    def watch() -> None:
        with suppress(OSError):
            while os.read(pipe, 1):
                pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="supervisor-watch", daemon=True).start()
    return True


class Supervisor:
    """Runs `train` in a separate process, and restarts it whenever it is killed."""

    def __init__(self, words: Sequence[str], settings: AsyncSettings, *, module: str = "rl_async_trainer.main") -> None:
        """Set the command; `run` starts it.

        Args:
            words: Arguments after `train`.
            settings: The settings they stand for.
            module: Module that Python runs.
        """
        self._module = module
        self._say = partial(make_console(settings).say, style="bold yellow")
        self._words = list(words)
        self._settings_file = settings.run_folder / "settings.toml"
        self._before = self._written()
        self._restarts = self._left = settings.roles.controller_restarts
        self._child: subprocess.Popen[bytes] | None = None
        self._asked: int | None = None
        self._lock: int | None = None

    def run(self) -> int:
        """Run the process until it ends without being killed, and return its exit status."""
        before = {number: signal.signal(number, self._pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            while True:
                status = self._run_once()
                if status >= 0:
                    return status
                name = signal.Signals(-status).name
                if "--resume" not in self._words and self._written() not in (None, self._before):
                    self._words.append("--resume")
                if self._asked is not None or self._left < 1:
                    said = f"signal {-status} ({name}) ended the run's process."
                    self._say(f"error: {said}")
                    if self._asked is None and "--resume" in self._words:
                        self._note_failure(said)
                    return 128 - status
                self._left -= 1
                self._note_restart()
                self._say(f"{name} ended the run's process; restarting it ({counted(self._left, 'restart')} left)")
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if self._lock is not None:
                os.close(self._lock)

    def _note_restart(self) -> None:
        """Lock a file of the run's folder until this process ends, so that `status` knows that the run restarts."""
        if self._lock is None and "--resume" in self._words:
            with suppress(OSError):
                self._lock = open_lock_file(self._settings_file.with_name(SUPERVISOR_LOCK))
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _note_failure(self, said: str) -> None:
        """Log why the run ended, which a killed process cannot do itself."""
        events = EventLog(self._settings_file.with_name("events.jsonl"))
        restarts = f"It was restarted {counted(self._restarts, 'time')}, the maximum (roles.controller_restarts)."
        events.write("run_failed", error=f"RoleDiedError: {said} {restarts}", role="controller")
        events.close()

    def _written(self) -> tuple[int, int] | None:
        """Identify the folder's settings file: before the run writes it, it is missing or an earlier run's."""
        try:
            found = self._settings_file.stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns

    def _run_once(self) -> int:
        """Start the process and wait for it; return its exit status, negative after a signal."""
        theirs, ours = os.pipe()
        command = [sys.executable, "-m", self._module, "train", *self._words]
        environment = {**os.environ, PIPE_VARIABLE: str(theirs)}
        try:
            self._child = subprocess.Popen(  # noqa: S603 - this interpreter, with the arguments that the user gave it
                command, env=environment, pass_fds=[theirs], start_new_session=True
            )
        finally:
            os.close(theirs)
        try:
            if self._asked is not None:
                self._child.send_signal(self._asked)
            while True:
                with suppress(subprocess.TimeoutExpired):
                    return self._child.wait(LOOK_EVERY_S)
        finally:
            os.close(ours)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._asked = number
        if self._child is not None:
            with suppress(ProcessLookupError):
                self._child.send_signal(number)
