import http.client
import json
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager

import pytest
import structlog
from invented_runs import InventedRun
from read_report import unpack

from rl_core.errors import DataError, SettingsError
from rl_core.testing import wait_until
from rl_metrics.cli import main
from rl_metrics.report import server as serving
from rl_metrics.report.server import ReportServer

DEADLINE_S = 60.0


@pytest.fixture
def folder(tmp_path):
    InventedRun(steps=3, trajectories=8, is_finished=False).write(tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def server(folder, monkeypatch):
    monkeypatch.setattr(serving, "LOOK_EVERY_S", 0.05)
    server = ReportServer([folder])
    yield server
    server.close()


def ask(server, path, *, host=None, method="GET"):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE_S)
    connection.request(method, path, headers={"Host": host or f"127.0.0.1:{server.port}"})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer, content


def base(server):
    return "/" + server.url.split("/", 3)[3]


def test_the_page_and_its_parts(server):
    answer, page = ask(server, base(server))
    assert (answer.status, answer.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert answer.headers["Cache-Control"] == "no-store"
    assert b"connect-src 'self'" in page
    _, manifest = ask(server, base(server) + "manifest")
    (name,) = json.loads(manifest)["runs"]
    answer, part = ask(server, f"{base(server)}blob/{name}")
    assert answer.status == 200
    assert unpack(part)[0]["step"] == 3


@pytest.mark.parametrize(
    "path",
    ["/", "/manifest", "/wrong/", "/wrong/manifest", "{}../metrics.jsonl", "{}blob/", "{}blob/../../etc/passwd",
     "{}blob/%2e%2e/x", "{}metrics.jsonl", "//etc/passwd", "{}blob//etc/passwd", "/%ff/"],
)  # fmt: skip
def test_nothing_else_is_there(server, path):
    answer, content = ask(server, path.format(base(server)))
    assert answer.status == 404
    assert b"step" not in content


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", "127.0.0.1.evil.example", "[::1]"])
def test_a_page_of_another_name_gets_nothing(server, host):
    answer, _ = ask(server, base(server), host=host)
    assert answer.status == 421


def test_localhost_is_this_machine(server):
    assert ask(server, base(server), host=f"localhost:{server.port}")[0].status == 200


def test_nothing_can_be_sent(server):
    assert ask(server, base(server), method="POST")[0].status == 501


def test_it_listens_on_loopback_alone(server):
    assert server._server.server_address[0] == "127.0.0.1"


def test_it_is_renewed_as_the_run_writes(server, folder):
    def step():
        _, manifest = ask(server, base(server) + "manifest")
        _, part = ask(server, f"{base(server)}blob/{json.loads(manifest)['runs'][0]}")
        return unpack(part)[0]["step"]

    assert step() == 3
    for number in range(4, 8):
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": number, "time": 1.0, "critic/score/mean": 0.5}) + "\n")
        wait_until(lambda wanted=number: step() == wanted, f"step {number}", deadline_s=DEADLINE_S)


def test_a_run_that_vanishes_leaves_the_last_report(server, folder):
    with structlog.testing.capture_logs() as logs:
        shutil.rmtree(folder)
        wait_until(
            lambda: any("no such folder" in entry["error"] for entry in logs), "a warning", deadline_s=DEADLINE_S
        )
    assert ask(server, base(server) + "manifest")[0].status == 200


def test_it_cannot_begin(folder, tmp_path, server):
    with pytest.raises(DataError, match="there is no such folder or file"):
        ReportServer([tmp_path / "nothing"])
    with pytest.raises(SettingsError, match="a report needs at least one run"):
        ReportServer([])
    with pytest.raises(OSError, match="in use"):
        ReportServer([folder], port=server.port)


def test_closing_twice_removes_the_parts_once(folder):
    server = ReportServer([folder])
    parts = server._folder
    assert list(parts.iterdir())
    server.close()
    server.close()
    assert not parts.exists()


@contextmanager
def command(*words):
    process = subprocess.Popen(
        [sys.executable, "-m", "rl_metrics", "serve", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (0, "", "")


def test_ctrl_c_ends_the_command(folder):
    with command(folder) as process:
        assert process.stdout.readline().startswith("http://127.0.0.1:")


def test_the_command_can_wait_for_a_run(tmp_path):
    with command(tmp_path / "run", "--wait") as process:
        assert process.stdout.readline() == f"waiting for {tmp_path / 'run'} to be written (Ctrl-C stops)\n"
        InventedRun(steps=1).write(tmp_path / "run")
        assert process.stdout.readline().startswith("http://127.0.0.1:")


def test_ctrl_c_ends_the_command_while_it_waits(tmp_path):
    with command(tmp_path / "run", "--wait") as process:
        assert process.stdout.readline().startswith("waiting for")


def test_a_port_in_use_names_the_option(folder, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(folder), "--port", str(port)]) == 2
    assert f"port {port} is in use. Choose another --port, or leave it out for a free one." in capsys.readouterr().err
