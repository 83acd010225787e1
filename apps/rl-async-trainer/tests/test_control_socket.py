"""The control socket of a run: closed to other users, and removed even after a kill."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rl_async_trainer.liveness.control_socket import FILE, ask_run, control_socket
from rl_core.errors import NotReadyError

NOBODY = 65534
KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from rl_async_trainer.liveness.control_socket import control_socket

async def main():
    async with control_socket(Path(sys.argv[1]), None):
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


async def echo(request):
    return dict(request)


def socket_of(folder: Path) -> Path:
    return Path(json.loads((folder / FILE).read_text())["socket"])


@pytest.fixture
def short_temporary(tmp_path_factory, monkeypatch):
    """A separate temporary folder with a short path, since a socket's path is limited."""
    folder = Path("/tmp") / f"ctl-{os.getpid()}"
    folder.mkdir(mode=0o755)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    yield folder
    subprocess.run(["/bin/rm", "-rf", str(folder)], check=True)


def test_what_a_killed_controller_left_goes_when_the_next_one_starts(tmp_path: Path, short_temporary: Path):
    path = os.pathsep.join(p for p in sys.path if p)
    environment = {**os.environ, "PYTHONPATH": path}
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False, env=environment)
    assert killed.returncode == -signal.SIGKILL
    left = socket_of(tmp_path).parent
    assert left.is_dir()

    async def look():
        async with control_socket(tmp_path, echo):
            assert not left.exists()
            here = socket_of(tmp_path).parent
            assert (here.stat().st_mode & 0o777, len(list(short_temporary.iterdir()))) == (0o700, 1)
            answer = await asyncio.to_thread(ask_run, tmp_path, {"do": "x"}, deadline_s=60.0)
            assert answer == {"do": "x"}

    asyncio.run(look())
    assert list(short_temporary.iterdir()) == []


def ask_as_nobody(path: Path) -> bytes:
    """Return the answer to another user's process, which can reach the socket here."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(60.0)
                connection.connect(str(path))
                os.write(writing, b"connected ")
                connection.sendall(b'{"do": "status"}\n')
                os.write(writing, connection.recv(1000))
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as pipe:
        return pipe.read()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_gets_no_answer_even_where_the_modes_let_it_in(tmp_path: Path, short_temporary: Path):
    async def look():
        async with control_socket(tmp_path, echo):
            place = socket_of(tmp_path)
            assert await asyncio.to_thread(ask_as_nobody, place) == b""
            place.parent.chmod(0o755)
            place.chmod(0o666)
            assert await asyncio.to_thread(ask_as_nobody, place) == b"connected "

    asyncio.run(look())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_socket_of_another_user_is_not_asked(tmp_path: Path, short_temporary: Path):
    ready, listening = os.pipe()
    child = os.fork()
    if child == 0:  # occupies the path in a killed controller's control.json
        try:
            short_temporary.chmod(0o777)
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(short_temporary / "socket"))
                listener.listen()
                os.write(listening, b"x")
                listener.settimeout(60.0)
                connection, _ = listener.accept()
                connection.sendall(b'{"answer": "forged"}\n')
        finally:
            os._exit(0)
    os.read(ready, 1)
    (tmp_path / FILE).write_text(json.dumps({"socket": str(short_temporary / "socket")}))
    with pytest.raises(NotReadyError, match=f"belongs to user {NOBODY}"):
        ask_run(tmp_path, {"do": "status"}, deadline_s=60.0)
    os.waitpid(child, 0)
