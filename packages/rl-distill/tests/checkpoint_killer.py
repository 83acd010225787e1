"""Save checkpoints in processes killed before their Nth file operation, for every N; print a JSON line each."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from rl_distill.checkpoints.store import CheckpointStore, read_state

ON_FILES = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.scandir", "os.listdir", "shutil.rmtree"}


class Half:
    """A save that writes its second half in the background."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "state").mkdir()
        (folder / "state" / "part").write_bytes(b"first half, ")

    def wait(self) -> None:
        """Write the second half."""
        with (self._folder / "state" / "part").open("ab") as file:
            file.write(b"second half")
        (self._folder / "learner.json").write_text("{}")


def begin_and_wait(store: CheckpointStore, step: int, attempt: str = "first") -> None:
    store.begin(step, {"attempt": attempt}, Half)
    store.wait()


def kill_before(number: int, directory: Path) -> None:
    """Kill this process before the given file operation in the directory."""
    seen = 0

    def watch(event: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in ON_FILES and str(args[0]).startswith(str(directory)):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def one_round(directory: Path, step: int, number: int) -> bool:
    """Save steps 1 and 2, then kill the next save; return True if it was killed before it completed."""
    store = CheckpointStore(directory, keep=2)
    for earlier in (1, 2):
        begin_and_wait(store, earlier)
    child = os.fork()
    if child == 0:
        kill_before(number, directory)
        begin_and_wait(store, step, "second")
        os._exit(0)
    _, status = os.waitpid(child, 0)
    is_killed = os.WIFSIGNALED(status)
    if not is_killed and os.WEXITSTATUS(status):
        raise RuntimeError(f"the child failed with status {status}")
    store = CheckpointStore(directory, keep=2)
    newest = store.newest(complain)
    if newest is None or (newest / "state" / "part").read_bytes() != b"first half, second half":
        raise RuntimeError(f"round {number}: {newest} is not whole")
    row = {"killed": is_killed, "newest": int(newest.name.removeprefix("step_")), **read_state(newest)}
    begin_and_wait(store, 4)
    if (names := sorted(path.name for path in directory.iterdir())) != [f"step_{kept}" for kept in store.steps()]:
        raise RuntimeError(f"round {number}: leftovers in {names}")
    sys.stdout.write(json.dumps({**row, "kept": store.steps()}) + "\n")
    return is_killed


def complain(error: Exception) -> None:
    """Raise the error: no broken checkpoint may be found."""
    raise error


def main(directory: Path, step: int) -> None:
    number = 1
    while one_round(directory / f"round_{number}", step, number):
        number += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
