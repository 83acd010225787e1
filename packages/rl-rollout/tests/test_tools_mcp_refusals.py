"""Errors of MCP servers that cannot serve; they contain no secrets."""

import asyncio
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("mcp")

import mcp_calculator
from chat_model import make_tokenizer

from rl_core.errors import SettingsError
from rl_rollout.loops import resolve_loop
from rl_rollout.tools.mcp import McpServer
from rl_rollout.tools.mcp_options import McpServerOptions

COMMAND = (sys.executable, str(Path(mcp_calculator.__file__)))


async def connect_and_close(name, options):
    server = McpServer(name, options)
    try:
        return await server.start()
    finally:
        server.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"command": (sys.executable, "-c", "import sys; sys.exit('I cannot')")}, "did not start: .*I cannot"),
        (
            {"command": ("no-such-program",)},
            "did not start: .*no-such-program: No such file or directory. Install it, or give .* Try its command",
        ),
        (
            {"command": (sys.executable, "-c", "import time; time.sleep(600)"), "start_timeout_s": 0.3},
            r"did not start: TimeoutError: no answer within 0\.3 s",
        ),
        ({"url": "http://127.0.0.1:9/mcp"}, "did not start: ConnectError.* Check that it is running"),
        ({"command": COMMAND, "cwd": "/no-such-folder"}, ": cwd must be a folder; found '/no-such-folder'"),
    ],
)
def test_a_server_that_does_not_start_is_refused_with_its_reason(options, message):
    with pytest.raises(SettingsError, match=f"(?s)MCP server 'bad' ?{message}"):
        asyncio.run(connect_and_close("bad", McpServerOptions(**options)))


def test_a_check_names_every_server_that_cannot_serve():
    bad = {"gone": {"command": ["no-such-program"]}, "lacks": {"command": COMMAND, "tools": ["ad"]}}
    with pytest.raises(SettingsError) as caught:
        asyncio.run(resolve_loop("tools", {"mcp_servers": bad}).check(make_tokenizer()))
    first, second = str(caught.value).splitlines()
    assert "'gone' did not start" in first
    assert "'lacks': unknown tool 'ad'. Did you mean 'add'?" in second


def test_what_a_server_was_given_is_not_in_what_is_said_of_it(monkeypatch, capsys):
    monkeypatch.setenv("SHOP_KEY", "sk-12345678")
    code = "import os, sys; sys.exit(f'bad key {os.environ[\"KEY\"]}')"
    server = {"command": [sys.executable, "-c", code], "env": {"KEY": "$SHOP_KEY"}}
    loop = resolve_loop("tools", {"mcp_servers": {"shop": server}})
    assert "sk-1" not in repr(loop._options)
    with pytest.raises(SettingsError, match=r"bad key \(redacted\)"):
        asyncio.run(loop.start(make_tokenizer()))
    assert "sk-1" not in "".join(capsys.readouterr())


def test_a_header_of_a_server_is_refused_without_its_value():
    with pytest.raises(SettingsError, match=r"value of the header 'Authorization' .* must be a string") as caught:
        McpServerOptions(url="http://127.0.0.1:1/mcp", headers={"Authorization": "Bearer sk-12345678\n"})
    assert "sk-1" not in str(caught.value)


def test_a_variable_that_is_no_text_is_refused_without_its_value():
    with pytest.raises(
        SettingsError, match=r"env of McpServerOptions must be a mapping, .* with int at 'A'\."
    ) as caught:
        McpServerOptions(command=COMMAND, env={"A": 12345678})
    assert "1234" not in str(caught.value)


def test_arguments_may_stand_apart_as_in_the_settings_of_other_clients():
    assert McpServerOptions(command=["python"], args=["calc.py"]).command == ("python", "calc.py")


def test_a_server_that_misses_a_variable_names_its_own_line(tmp_path):
    script = tmp_path / "calc.py"
    script.write_text("import os\nprint(os.environ['OFFSET'])\n")
    with pytest.raises(SettingsError, match=r"KeyError: 'OFFSET' \(File \"\S+calc\.py\", line 2"):
        asyncio.run(connect_and_close("bad", McpServerOptions(command=(sys.executable, str(script)))))


def test_a_server_without_tools_is_refused():
    empty = "from mcp.server.mcpserver import MCPServer; MCPServer('empty').run('stdio')"
    with pytest.raises(SettingsError, match="MCP server 'bad' has no tools"):
        asyncio.run(connect_and_close("bad", McpServerOptions(command=(sys.executable, "-c", empty))))


class Refusing(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_error(self.server.status)

    def log_message(self, *_):
        pass


@pytest.mark.parametrize(("status", "reason"), [(401, "Unauthorized"), (500, "Internal Server Error")])
def test_the_status_of_a_server_that_refuses_is_told(status, reason):
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as http:
        http.status = status
        threading.Thread(target=http.serve_forever, daemon=True).start()
        try:
            options = McpServerOptions(url=f"http://127.0.0.1:{http.server_port}/mcp")
            with pytest.raises(SettingsError, match=f"did not start: .*It answered HTTP {status} {reason}"):
                asyncio.run(connect_and_close("bad", options))
        finally:
            http.shutdown()


def test_nothing_but_the_error_is_said_of_servers_that_do_not_start():
    code = """
import asyncio, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from rl_core.errors import SettingsError
from rl_rollout.tools.mcp import McpServer, McpServerOptions

class Garbled(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(b"{oops")

    def log_message(self, *_):
        pass

http = ThreadingHTTPServer(("127.0.0.1", 0), Garbled)
threading.Thread(target=http.serve_forever, daemon=True).start()
for options in (
    {"url": f"http://127.0.0.1:{http.server_port}/mcp"},
    {"command": (sys.executable, "-c", "import no_such_module")},
):
    server = McpServer("bad", McpServerOptions(**options))
    try:
        asyncio.run(server.start())
    except SettingsError as error:
        print(error)
    server.close()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout.count("MCP server 'bad' did not start: ") == 2
    assert "No module named 'no_such_module' (File " in ended.stdout
    assert "Traceback" not in ended.stdout + ended.stderr
    assert ended.stderr == ""
