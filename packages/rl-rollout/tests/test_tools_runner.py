import asyncio
import sys
import threading
import time

import pytest
from chat_model import make_tokenizer

from rl_core.errors import DataError, MissingExtraError, SettingsError, ToolError
from rl_rollout.tools import CallOptions, ToolBox, ToolCall, ToolRunner


class AsyncTool:
    """A hand-written tool, without pydantic."""

    description = "Does what it is told."

    def __init__(self, name, function):
        self.name = name
        self.parameters = {"type": "object", "properties": {}}
        self._function = function

    async def call(self, arguments):
        return await self._function(**arguments)


async def say(text="hello"):
    return text


async def fail(kind="value"):
    raise {
        "value": ValueError("no such thing"),
        "data": DataError("x must be positive"),
        "tool": ToolError("the shop is closed"),
        "timeout": TimeoutError("its own"),
        "cancelled": asyncio.CancelledError(),
        "long": RuntimeError("x" * 10_000_000),
        "exit": SystemExit(3),
        "closed": GeneratorExit(),
        "interrupt": KeyboardInterrupt(),
        "mute": Mute(),
        "mute tool": MuteToolError(),
        "surrogate": ToolError("\ud800!"),
    }[kind]


class Mute(Exception):
    def __str__(self):
        raise ValueError("no str")


class MuteToolError(Mute, ToolError):
    pass


async def hang():
    await asyncio.Event().wait()


async def stubborn(release):
    while not release.is_set():
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            continue
    return "late"


async def give(value=None):
    return value


def nothing():
    yield


class Blunt:
    """A tool whose `call` is not async."""

    name, description, parameters = "blunt", "", {}

    def call(self, arguments):
        return "text"


FUNCTIONS = {"say": say, "fail": fail, "hang": hang, "stubborn": stubborn, "give": give}
TOOLBOX = ToolBox([AsyncTool(name, function) for name, function in FUNCTIONS.items()] + [Blunt()])


def run(*calls, **options):
    async def everything():
        return await ToolRunner(TOOLBOX, CallOptions(**options)).run(calls)

    return asyncio.run(everything())


def call(name, **arguments):
    return ToolCall(name=name, arguments=arguments)


@pytest.mark.parametrize(
    ("asked", "outcome", "text"),
    [
        (call("say"), "ok", "hello"),
        (
            call("sey"),
            "unknown_tool",
            "Error: unknown tool 'sey'. Did you mean 'say'? Known: blunt, fail, give, hang, ",
        ),
        (ToolCall(name="", fault="a tool call is not JSON."), "malformed_call", "Error: a tool call is not JSON."),
        (call("fail"), "raised", "Error: fail raised ValueError: no such thing"),
        (call("fail", kind="data"), "bad_arguments", "Error: wrong arguments for fail: x must be positive"),
        (call("fail", kind="tool"), "raised", "Error: the shop is closed"),
        (call("fail", kind="timeout"), "raised", "Error: fail raised TimeoutError: its own"),
        (call("fail", kind="cancelled"), "raised", "Error: fail was cancelled."),
        (call("fail", kind="exit"), "raised", "Error: fail called sys.exit(3)."),
        (call("fail", kind="closed"), "raised", "Error: fail raised GeneratorExit"),
        (call("fail", kind="interrupt"), "raised", "Error: fail raised KeyboardInterrupt"),
        (call("fail", kind="mute"), "raised", "Error: fail raised Mute: (its text cannot be shown)"),
        (call("fail", kind="mute tool"), "raised", "Error: (its text cannot be shown)"),
        (call("fail", kind="surrogate"), "raised", r"Error: \ud800!"),
        (call("\ud800"), "unknown_tool", "Error: unknown tool '"),
        (call("blunt"), "raised", "Error: blunt raised TypeError: object str can't be used in 'await' expression"),
        (call("give", value=nothing()), "raised", "Error: the tool returned a generator: it uses `yield`."),
        (call("say", txt="?"), "raised", "Error: say raised TypeError"),
        (call("give", value=3), "raised", "Error: give did not return text (int)."),
        (call("give", value="\ud800"), "ok", r"\ud800"),
    ],
)
def test_whatever_happens_is_text_and_an_outcome(asked, outcome, text):
    result, other = run(asked, call("say"))
    assert (result.outcome, result.is_error) == (outcome, outcome != "ok")
    assert result.text.startswith(text)
    result.text.encode()
    assert (other.outcome, other.text) == ("ok", "hello")  # whatever the first call does


def test_a_tool_that_hangs_is_left_behind_and_the_others_give_their_results():
    started_at = time.perf_counter()
    results = run(call("say"), call("hang"), call("say", text="you"), call("hang"), timeout_s=0.05)
    assert [result.text for result in results] == [
        "hello", "Error: hang did not return within 0.05 s.", "you", "Error: hang did not return within 0.05 s.",
    ]  # fmt: skip
    assert time.perf_counter() - started_at < 60


def test_a_tool_that_will_not_be_cancelled_is_left_behind_too():
    release = threading.Event()

    async def everything():
        runner = ToolRunner(TOOLBOX, CallOptions(timeout_s=0.02))
        (result,) = await runner.run([call("stubborn", release=release)])
        release.set()
        return result

    assert asyncio.run(everything()).outcome == "timed_out"


def test_ten_megabytes_are_cut_or_refused():
    big = "x" * 10_000_000
    (cut,) = run(call("give", value=big), max_result_chars=100)
    assert cut.outcome == "truncated"
    assert not cut.is_error
    assert cut.text == "x" * 100 + "\n[cut: the first 100 of 10000000 characters]"
    (refused,) = run(call("give", value=big), max_result_chars=100, on_large_result="error")
    assert (refused.outcome, refused.text) == (
        "too_large",
        "Error: the result of give has 10000000 characters, more than 100. Ask for less.",
    )
    (error,) = run(call("fail", kind="long"))
    assert len(error.text) < 600
    (fits,) = run(call("give", value="x" * 100), max_result_chars=100)
    assert (fits.outcome, len(fits.text)) == ("ok", 100)


def test_calls_run_at_once_up_to_the_limit():
    running = most = 0

    async def count():
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(5):
            await asyncio.sleep(0)
        running -= 1
        return "ok"

    async def everything(limit):
        runner = ToolRunner(ToolBox([AsyncTool("count", count)]), CallOptions(max_concurrency=limit))
        await runner.run([call("count")] * 8)

    asyncio.run(everything(8))
    assert most == 8
    most = 0
    asyncio.run(everything(3))
    assert most == 3


def test_cancelling_the_run_cancels_the_tools():
    async def everything():
        cancelled = asyncio.Event()

        async def watch():
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise

        task = asyncio.create_task(ToolRunner(ToolBox([AsyncTool("watch", watch)])).run([call("watch")]))
        for _ in range(5):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(10):
            await cancelled.wait()

    asyncio.run(everything())


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (SystemExit(3), "it called sys.exit(3)"),
        (KeyboardInterrupt(), "it raised KeyboardInterrupt: "),
        (GeneratorExit(), "it raised GeneratorExit: "),
        (asyncio.CancelledError(), "it raised CancelledError: "),
    ],
)
def test_a_function_that_raises_what_ends_threads_is_an_error_of_the_tool(error, text):
    pytest.importorskip("pydantic")
    from rl_rollout.tools import tool

    @tool
    def leave() -> str:
        raise error

    async def everything():
        return await ToolRunner(ToolBox([leave])).run([call("leave")])

    (result,) = asyncio.run(everything())
    assert (result.outcome, result.text) == ("raised", f"Error: leave raised RuntimeError: {text}")


@pytest.mark.parametrize(
    "options", [{"timeout_s": 0}, {"max_result_chars": 0}, {"max_concurrency": 0}, {"timeout_s": float("nan")}]
)
def test_impossible_options_are_refused(options):
    with pytest.raises(SettingsError, match=f"{next(iter(options))} of CallOptions.* must be a .*number"):
        CallOptions(**options)
    with pytest.raises(SettingsError, match="on_large_result of CallOptions must be"):
        CallOptions(on_large_result="drop")


def test_without_the_libraries_the_extras_are_named(monkeypatch):
    from rl_rollout.loops.tools import ToolsLoop, ToolsOptions
    from rl_rollout.tools import tool
    from rl_rollout.tools.mcp_options import McpServerOptions

    monkeypatch.setitem(sys.modules, "pydantic", None)
    with pytest.raises(MissingExtraError, match=r"Install rl-rollout\[tools\]"):
        tool(lambda: "x")
    monkeypatch.setitem(sys.modules, "mcp", None)
    monkeypatch.delitem(sys.modules, "rl_rollout.tools.mcp", raising=False)
    loop = ToolsLoop(ToolsOptions(mcp_servers={"x": McpServerOptions(command=("python",))}))
    with pytest.raises(MissingExtraError, match=r"Install rl-rollout\[mcp\]"):
        asyncio.run(loop.start(make_tokenizer()))
