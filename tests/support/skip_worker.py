"""Writers and readers of skip caches in processes that can be killed; see `skip_processes`.

It imports once, then forks a process for each line of standard input, a JSON object with a `role`.
"""

import json
import os
import signal
import sys
import tempfile
import traceback
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from skip_groups import assert_same_groups, make_groups

from rl_rollout.skip import EntryKey, EntryStore

KEY = EntryKey(step=1)
Say = Callable[[str], None]


def groups_of(number: int) -> list[Any]:
    """Return the groups that writers store for a number, large enough for several chunks."""
    return make_groups(4, 4, seed=number, max_tokens=200)


def write(store: EntryStore, key: EntryKey, number: int, *, replace: bool) -> bool:
    """Store the groups of a number, which the fingerprint identifies."""
    fingerprint = {"number": number}
    return store.write(key, groups_of(number), fingerprint=fingerprint, generate_s=1.0, replace=replace) is not None


def read(store: EntryStore, key: EntryKey) -> int | None:
    """Return the number of a stored entry, after comparing all its bytes with the expected ones."""
    entry = store.read(key)
    if entry is None:
        return None
    number = int(entry.manifest.fingerprint["number"])
    assert_same_groups(entry.groups, groups_of(number))
    return number


def replace_for_ever(store: EntryStore, say: Say, **_: Any) -> None:
    """Store 1, 2, 3 and so on, each replacing the one before."""
    for number in range(1, 1 << 20):
        say(f"start {number}")
        write(store, KEY, number, replace=True)


def add_for_ever(store: EntryStore, say: Say, **_: Any) -> None:
    """Store 1, 2, 3 and so on, each as the entry of its step."""
    for number in range(1, 1 << 20):
        say(f"start {number}")
        write(store, EntryKey(step=number), number, replace=False)


def race(store: EntryStore, say: Say, *, number: int, rival: int, replace: bool, rounds: int, meet: str) -> None:
    """Store one entry per round, at the same moment as the rival."""
    for step in range(1, rounds + 1):
        Path(meet, f"{step}-{number}").touch()
        while not Path(meet, f"{step}-{rival}").exists():
            pass
        say(f"{step} {'won' if write(store, EntryKey(step=step), number, replace=replace) else 'lost'}")


def read_until(store: EntryStore, say: Say, *, stop: str, step: int | None = None, **_: Any) -> None:
    """Read every entry, or one step's, repeatedly until a file exists."""
    found: dict[str, int] = {}
    while not Path(stop).exists():
        for key in store.entries() if step is None else [EntryKey(step=step)]:
            number = read(store, key)
            found[str(number)] = found.get(str(number), 0) + 1
    say(f"found {json.dumps(found)}")


def keep_pruning(store: EntryStore, say: Say, *, stop: str, max_bytes: int, first: int) -> None:
    """Store step after step, and prune after each, until a file exists."""
    step = first
    while not Path(stop).exists():
        write(store, EntryKey(step=step), step, replace=True)
        store.prune(max_bytes)
        step += 2
    say(f"stored up to {step}")


def killed_before(store: EntryStore, say: Say, *, operation: int, replace: bool) -> None:
    """Store 2, but be killed before an operation on files: open, write, flush, link, rename or remove."""
    seen = 0

    def count(*_: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == operation:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event in ON_FILES and ".zarr.zip" in str(args[0]):
            count()

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (count(), function(*args, **kwargs))[1]

    for owner, name in ((zipfile.ZipFile, "writestr"), (os, "fsync")):
        setattr(owner, name, counted(getattr(owner, name)))
    sys.addaudithook(watch)
    write(store, KEY, 2, replace=replace)


ON_FILES = {"open", "os.link", "os.rename", "os.remove"}
ROLES = {
    each.__name__: each for each in (replace_for_ever, add_for_ever, race, read_until, keep_pruning, killed_before)
}


def run(asked: dict[str, Any]) -> None:
    """In a child: run the request, and write the results to a file line by line."""
    said = os.open(asked.pop("said"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def say(line: str) -> None:
        os.write(said, f"{line}\n".encode())

    try:
        store = EntryStore(asked.pop("root"), compress=asked.pop("compress"))
        say("ready")
        ROLES[asked.pop("role")](store, say, **asked)
        say("done")
    except BaseException:
        say("error " + traceback.format_exc().replace("\n", " | "))


def answer(number: int) -> None:
    os.write(1, f"{number}\n".encode())


def main() -> None:
    """Fork for each line; `wait PID` waits for a child and prints its status."""
    with tempfile.TemporaryDirectory() as folder:  # starts zarr's threads before the first fork
        store = EntryStore(folder)
        write(store, KEY, 1, replace=False)
        read(store, KEY)
    for line in sys.stdin:
        if line.startswith("wait "):
            _, status = os.waitpid(int(line.split()[1]), 0)
            answer(os.waitstatus_to_exitcode(status))
            continue
        child = os.fork()
        if child == 0:
            run(json.loads(line))
            os._exit(0)
        answer(child)


if __name__ == "__main__":
    main()
