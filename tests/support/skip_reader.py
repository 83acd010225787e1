"""Read entries one after the other, each in a separate process, and print the effects; see `skip_forgery`."""

import json
import os
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path

from skip_forgery import KEY, forge, make_entry, put_records

from rl_core.errors import BrokenEntryError
from rl_rollout.skip import EntryStore

MAX_S = 60
EXPECTED = {
    "open",
    "os.listdir",
    "os.scandir",
    "_thread.start_joinable_thread",  # from Python 3.13 on
    "_thread.start_new_thread",
    "object.__getattr__",
    "object.__setattr__",
    "object.__delattr__",
    "builtins.id",
    "sys._getframe",
    "socket.__new__",  # the self-pipe of zarr's event loop; it connects to nothing
    "sys.set_asyncgen_hook_finalizer",
    "sys.set_asyncgen_hook_firstiter",
    *(("sys.settrace",) if "coverage" in sys.modules else ()),  # coverage starts in each thread
}


def warm() -> None:
    """Read a good entry and a broken one, so that everything lazy is imported and compiled."""
    for compress in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            entry = make_entry(root, compress=compress)
            store = EntryStore(folder)
            assert store.read(KEY) is not None
            forge(entry, lambda forgery: put_records(forgery, b"["))
            for _ in range(2):
                try:
                    store.read(KEY)
                except BrokenEntryError as error:
                    str(error)


def address_space_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def read(name: str, root: str, limit_mib: int) -> None:
    """In a child: read an entry, and print the effects."""
    limit = address_space_bytes() + (limit_mib << 20) + (256 << 20)  # the stacks of the threads
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.alarm(MAX_S)
    events: set[str] = set()
    is_watching = True
    sys.addaudithook(
        lambda event, told: events.add(f"{event} {str(told)[:80]}") if is_watching and event not in EXPECTED else None
    )
    before, started, error, message = peak_mib(), time.process_time(), None, ""
    try:
        EntryStore(root).read(KEY)
    except BaseException as raised:
        error, message = type(raised).__name__, str(raised)
    is_watching = False
    found = {
        "name": name,
        "error": error,
        "message": message[:2000],
        "events": sorted(events),
        "growth_mib": round(peak_mib() - before, 1),
        "processor_s": round(time.process_time() - started, 3),
    }
    os.write(1, (json.dumps(found) + "\n").encode())


def main() -> None:
    """Read all entries named on standard input."""
    asked = json.load(sys.stdin)
    warm()
    for name, root in asked.items():
        child = os.fork()
        if child == 0:
            try:
                read(name, root, int(sys.argv[1]))
            finally:
                os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
