import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import structlog

pytest.importorskip("mcp")

import mcp_calculator
from chat_model import Speaker, chat_prompt, in_turn, make_tokenizer, run_loop

from rl_core.errors import SettingsError, ToolError
from rl_rollout.loops import resolve_loop
from rl_rollout.tools import CallOptions, TextAndImages, ToolBox, ToolCall, ToolRunner
from rl_rollout.tools.mcp import McpServer
from rl_rollout.tools.mcp_options import McpServerOptions

SCRIPT = str(Path(mcp_calculator.__file__))
COMMAND = (sys.executable, SCRIPT)
END = "<|im_end|>"


def children():
    """Return the command lines of this process's calculator children, by process id."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            lines = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
            if int(lines["PPid"]) == os.getpid() and not lines["State"].startswith("Z"):
                command = (status.parent / "cmdline").read_bytes().decode()
                if SCRIPT in command:
                    found[int(status.parent.name)] = command
        except (OSError, KeyError):
            continue
    return found


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = set(children())
    yield
    assert set(children()) == before


def is_running(pid):
    status = Path(f"/proc/{pid}/status")
    try:
        return "State:\tZ" not in status.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids):
    deadline = time.monotonic() + 60
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, f"{[pid for pid in pids if is_running(pid)]} of {pids} are still running"


def using(options, ask, **call_options):
    """Start a server, call `ask` with a runner of its tools, and close the server twice."""
    server = McpServer("calculator", options)

    async def everything():
        tools = await server.start()
        return await ask(ToolRunner(ToolBox(tools), CallOptions(**call_options)))

    try:
        return asyncio.run(everything())
    finally:
        server.close()
        server.close()


def call(name, /, **arguments):
    return ToolCall(name=name, arguments=arguments)


def test_tools_are_listed_called_and_given_the_environment():
    async def ask(runner):
        assert len(children()) == 1
        return await runner.run(
            [
                call("add", a=20, b=22), call("environment", name="SHOP"), call("environment", name="RL_TEST_SECRET"),
                call("fail"), call("add", a="x", b=1),
            ]
        )  # fmt: skip

    os.environ["RL_TEST_SECRET"] = "kept here"
    try:
        results = using(McpServerOptions(command=COMMAND, env={"SHOP": "open"}), ask)
    finally:
        del os.environ["RL_TEST_SECRET"]
    assert [result.text for result in results[:3]] == ["42", "open", "none"]
    assert results[3].text == "Error: Error executing tool fail"  # the library hides the exception
    assert [result.outcome for result in results] == ["ok", "ok", "ok", "raised", "raised"]


def test_the_images_of_a_result_are_given():
    async def ask(runner):
        return await runner._toolbox.get("draw").call({}), *await runner.run([call("draw")])

    whole, shown = using(McpServerOptions(command=COMMAND, tools=("draw",)), ask)
    assert whole == TextAndImages("a drawing", (b"PNG",))
    assert (shown.text, shown.outcome) == ("a drawing\n[images are left out, because this run shows none: 1]", "ok")


def test_the_schema_is_the_servers_and_tools_can_be_chosen():
    server = McpServer("calculator", McpServerOptions(command=COMMAND, tools=("add",)))
    try:
        (add,) = asyncio.run(server.start())
        assert (add.name, add.description) == ("add", "Add two whole numbers.")
        assert add.parameters["properties"]["a"]["type"] == "integer"
        assert asyncio.run(add.call({"a": 1, "b": 2})) == "3"  # on another event loop
    finally:
        server.close()
    with pytest.raises(ToolError, match="the server 'calculator' of this tool is closed"):
        asyncio.run(add.call({"a": 1, "b": 2}))
    with pytest.raises(SettingsError, match=r"MCP server 'c': unknown tool 'ad'. Did you mean 'add'\?"):
        asyncio.run(connect_and_close("c", McpServerOptions(command=COMMAND, tools=("ad",))))


async def connect_and_close(name, options):
    server = McpServer(name, options)
    try:
        return await server.start()
    finally:
        server.close()


def test_a_server_that_dies_is_started_again():
    async def ask(runner):
        (pid,) = children()
        died, told = await runner.run([call("die"), call("add", a=1, b=1)])
        assert died.text == "Error: the server of die died; the next call starts it again."
        assert told.outcome in ("ok", "raised")
        (after,) = await runner.run([call("add", a=1, b=1)])
        assert after.text == "2"
        (again,) = children()
        assert again != pid
        os.kill(again, signal.SIGKILL)
        outcomes = [(await runner.run([call("add", a=2, b=2)]))[0].text for _ in range(2)]
        assert outcomes == ["Error: the server of add died; the next call starts it again.", "4"]

    using(McpServerOptions(command=COMMAND), ask)


def test_a_server_that_dies_again_and_again_is_left_alone_for_a_while():
    async def ask(runner):
        texts = [(await runner.run([call("die")]))[0].text for _ in range(3)]
        assert texts[:2] == ["Error: the server of die died; the next call starts it again."] * 2
        assert "is down (died during a call of die" in texts[2]
        assert "I die." in texts[2]
        assert "it can be restarted in" in texts[2]

    using(McpServerOptions(command=COMMAND), ask)


def test_a_slow_tool_times_out_while_its_server_stays():
    async def ask(runner):
        (pid,) = children()
        slow, quick = await runner.run([call("dawdle"), call("add", a=1, b=2)])
        assert (slow.outcome, quick.text) == ("timed_out", "3")
        assert (await runner.run([call("add", a=2, b=2)]))[0].text == "4"
        assert list(children()) == [pid]

    using(McpServerOptions(command=COMMAND), ask, timeout_s=0.5)


def test_a_server_that_freezes_is_replaced():
    async def ask(runner):
        (pid,) = children()
        (frozen,) = await runner.run([call("freeze")])
        assert frozen.outcome == "timed_out"
        deadline = time.monotonic() + 60
        while (await runner.run([call("add", a=2, b=2)]))[0].text != "4":
            assert time.monotonic() < deadline
        while pid in children():  # it has 2 s to exit, and 2 s more after SIGTERM
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)

    using(McpServerOptions(command=COMMAND, probe_timeout_s=0.2), ask, timeout_s=2)


def test_ten_megabytes_from_a_server_are_cut():
    async def ask(runner):
        (result,) = await runner.run([call("flood", size=10_000_000)])
        assert (result.outcome, len(result.text) < 200) == ("truncated", True)

    using(McpServerOptions(command=COMMAND), ask, max_result_chars=100)


def test_a_result_without_a_text_is_its_json():
    async def ask(runner):
        (result,) = await runner.run([call("measure")])
        assert (result.outcome, json.loads(result.text)) == ("ok", {"width": 3, "unit": "µm"})

    using(McpServerOptions(command=COMMAND), ask)


def test_lines_that_are_no_messages_give_one_short_warning(caplog):
    async def ask(runner):
        for _ in range(2):
            (said,) = await runner.run([call("babble", lines=20)])
            assert said.text == "said"

    with structlog.testing.capture_logs() as logs:
        using(McpServerOptions(command=COMMAND), ask)
    assert logs == [
        {"event": "mcp_server_wrote_no_message", "server": "calculator", "line": "'line 0'", "log_level": "warning"}
    ]
    assert [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []


def test_arguments_that_are_no_utf8_do_not_end_the_server():
    async def ask(runner):
        (pid,) = children()
        odd, fine = await runner.run([call("environment", name="\ud800"), call("add", a=1, b=1)])
        assert (odd.text, fine.text) == ("none", "2")
        assert list(children()) == [pid]

    using(McpServerOptions(command=COMMAND), ask)


MANNERS = ("child", "own session", "orphan", "no environment")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what a server started")
@pytest.mark.parametrize("how", ["close", "kill"])
def test_nothing_that_a_server_started_outlives_it(how):
    async def ask(runner):
        pids = [result.text for result in await runner.run([call("spawn", manner=manner) for manner in MANNERS])]
        assert pids
        assert all(map(is_running, pids))
        if how == "kill":
            (pid,) = children()
            os.kill(pid, signal.SIGKILL)
            wait_until_gone(pids)  # without another call
        return pids

    pids = using(McpServerOptions(command=COMMAND), ask)
    assert not any(map(is_running, pids[:3]))  # closing ends these at once
    wait_until_gone(pids)


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def serve(port):
    process = subprocess.Popen([*COMMAND, str(port)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return process
        assert process.poll() is None
    raise AssertionError("the server did not come up")


def test_a_server_over_http_that_goes_away_and_comes_back():
    port = free_port()
    process = serve(port)

    async def ask(runner):
        nonlocal process
        (result,) = await runner.run([call("add", a=40, b=2)])
        assert result.text == "42"
        process.kill()
        process.wait()
        gone = [(await runner.run([call("add", a=1, b=1)]))[0].text for _ in range(2)]
        assert gone[0] == "Error: the server of add died; the next call starts it again."
        assert "did not start" in gone[1]
        process = serve(port)
        deadline = time.monotonic() + 60
        while (await runner.run([call("add", a=1, b=1)]))[0].text != "2":
            assert time.monotonic() < deadline

    try:
        options = McpServerOptions(url=f"http://127.0.0.1:{port}/mcp", headers={"X-Key": "1"}, max_pause_s=0.1)
        using(options, ask, timeout_s=20)
    finally:
        process.kill()
        process.wait()


def test_the_loop_starts_the_servers_of_its_settings_and_ends_them():
    tokenizer = make_tokenizer()
    asked = json.dumps({"name": "add", "arguments": {"a": 20, "b": 22}})
    speaker = Speaker(tokenizer, in_turn(f"<tool_call>{asked}</tool_call>{END}", f"42{END}"))
    options = {"mcp_servers": {"calculator": {"command": ["python", SCRIPT], "tools": ["add"]}}}
    (group,) = run_loop(resolve_loop("tools", options), speaker, [chat_prompt(tokenizer, "20+22?")], num_sessions=2)
    assert group.failures == ()
    assert [t.extras["tool_calls"] for t in group.trajectories] == [{"ok": 1}] * 2
    (text,) = tokenizer.decode([group.trajectories[0].input_ids])
    assert "add: Add two whole numbers." in text
    assert "tool\n42" in text


FORGETFUL = f"""
import asyncio, os, pathlib, sys
from rl_rollout.tools.mcp import McpServer
from rl_rollout.tools.mcp_options import McpServerOptions

server = McpServer("c", McpServerOptions(command={COMMAND!r}))

async def start():
    tools = {{tool.name: tool for tool in await server.start()}}
    pids = [await tools["spawn"].call({{"manner": manner}}) for manner in {MANNERS!r}]
    if sys.argv[1] == "kill":  # a frozen server does not see that its input was closed
        await asyncio.wait([asyncio.create_task(tools["freeze"].call({{}}))], timeout=0.5)
    return pids

pids = asyncio.run(start())
kids = [
    path.parent.name for path in pathlib.Path("/proc").glob("[0-9]*/status")
    if f"PPid:\\t{{os.getpid()}}\\n" in path.read_text()
]
print(*kids, *pids, flush=True)
if sys.argv[1] == "kill":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(("how", "code"), [("exit", 0), ("kill", -9)])
def test_a_process_that_forgets_to_close_leaves_nothing_behind(how, code):
    path = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-c", FORGETFUL, how],
        capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    pids = done.stdout.split()
    assert len(pids) == 1 + len(MANNERS)
    wait_until_gone(pids)


def test_a_check_names_the_tools_of_each_server_and_leaves_nothing_running():
    servers = {"all": {"command": COMMAND, "tools": ["add", "fail"]}, "one": {"command": COMMAND, "tools": ["die"]}}
    loop = resolve_loop("tools", {"mcp_servers": servers})
    assert asyncio.run(loop.check(make_tokenizer())) == ["MCP server all: add, fail", "MCP server one: die"]
    assert children() == {}
