"""A program forked from the warm-start server sees the same as one started from scratch."""

import fcntl
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import warm_start
from train_process import TICK_S, marked_processes
from warm_start import WarmPopen

MARK = "0123456789abcdef" * 2
NAME = "warm_probe"
SUPPORT = Path(warm_start.__file__).parent
PROGRAMS = {"module": ["-m", NAME], "script": [str(SUPPORT / f"{NAME}.py")]}
ENVIRONMENT = {**os.environ, "TINY_RUN_MARK": MARK, "PYTHONPATH": os.pathsep.join(sys.path), "WARM_PROBE": ""}


@pytest.fixture(autouse=True)
def probe(monkeypatch: pytest.MonkeyPatch) -> None:
    if subprocess.Popen is not WarmPopen:
        pytest.skip("this machine starts everything cold")
    monkeypatch.setattr(warm_start, "MODULES", {*warm_start.MODULES, NAME})
    monkeypatch.setattr(warm_start, "SCRIPTS", (SUPPORT,))


def say(folder: Path, kind: type[subprocess.Popen], program: str, least_number: int) -> dict[str, object]:
    """Return a process's view of itself and its results; it inherits a descriptor of at least this number."""
    ours, theirs = os.pipe()
    number = fcntl.fcntl(theirs, fcntl.F_DUPFD, least_number)
    os.close(theirs)
    process = kind(
        [sys.executable, *PROGRAMS[program], str(number), "a word", "ü"],
        pass_fds=[number],
        cwd=folder,
        env={**ENVIRONMENT, "WARM_PROBE": kind.__name__},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    os.close(number)
    output, errors = process.communicate(b"to stdin", timeout=60)
    with os.fdopen(ours) as pipe:
        passed = pipe.read()
    found = json.loads(output) | {"status": process.returncode, "errors": errors.decode(), "passed": passed}
    assert found.pop("environment") == kind.__name__
    return found


@pytest.mark.parametrize(("program", "least_number"), [("module", 3), ("module", 600), ("script", 3)])
def test_a_forked_process_is_what_a_started_one_is(tmp_path: Path, program: str, least_number: int) -> None:
    cold_kind = WarmPopen.__mro__[1]
    warm, cold = (say(tmp_path, kind, program, least_number) for kind in (WarmPopen, cold_kind))
    assert warm == cold
    assert warm["parent"] == os.getpid()
    assert warm["marks"] == [f"TINY_RUN_MARK={MARK}"]
    assert (warm["status"], warm["leads"], warm["passed"]) == (3, True, "passed")


def test_a_forked_process_is_found_by_its_mark_and_can_be_killed() -> None:
    ours, theirs = os.pipe()
    process = WarmPopen(
        [sys.executable, "-m", NAME, str(theirs)],
        pass_fds=[theirs],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        assert pipe.read() == "passed", "it waits for its input now"
    assert process.pid in marked_processes(f"TINY_RUN_MARK={MARK}")
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
    signal.sigtimedwait([], TICK_S)
    assert marked_processes(f"TINY_RUN_MARK={MARK}") == []
    process.communicate()


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["-c", "pass"], {}),
        (["-m", "json.tool", "--help"], {"stdout": subprocess.DEVNULL}),
        (["-m", NAME], {"env": os.environ | {"OMP_NUM_THREADS": "2"}}),
        (["-m", NAME], {"close_fds": False}),
    ],
)
def test_other_programs_and_other_threads_start_cold(
    words: list[str], options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_start, "_servers", [])
    monkeypatch.setattr(warm_start, "_start", pytest.fail)
    process = WarmPopen([sys.executable, *words], stderr=subprocess.DEVNULL, **options)
    process.wait(60)


def test_every_module_that_is_named_exists() -> None:
    """A missing module would be skipped silently, and each process would start slowly."""
    ours = (*warm_start.PRELOADED, *(name for name in warm_start.MODULES if "." in name))
    assert [name for name in ours if importlib.util.find_spec(name) is None] == []


@pytest.mark.parametrize("sent", [b"", (100).to_bytes(8, "big"), (100).to_bytes(8, "big") + b"{"])
def test_the_server_ends_with_a_caller_that_is_killed_in_the_middle_of_a_request(sent: bytes) -> None:
    server = warm_start._start()
    process = warm_start._processes.pop()
    server._connection.sendall(sent)
    server._connection.shutdown(socket.SHUT_RDWR)
    assert process.wait(60) == 0
