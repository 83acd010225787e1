import asyncio
import gc
import json
import re
import threading
from dataclasses import dataclass
from typing import Literal

import pytest

from rl_core.errors import DataError, SettingsError, ToolError
from rl_rollout.tools import tool, tool_schema

pytest.importorskip("pydantic")

from rl_rollout import user_code


@dataclass
class Place:
    city: str
    floor: int = 0


@tool
def weather(
    place: Place,
    days: int,
    unit: Literal["C", "F"] = "C",
    *,
    tags: list[str] | None = None,
    copy: dict[str, float] | None = None,
) -> str:
    """Tell the weather
    of a place.

    It is a forecast.

    Args:
        place: Where.
        days (int): How many days ahead,
            at most ten.
        unit: Of the temperature.

    Returns:
        A sentence.
    """
    return f"{place.city}/{place.floor} in {days} days, {unit}, {tags}, {copy}"


def call(function, arguments):
    return asyncio.run(function.call(arguments))


def test_the_schema_comes_from_signature_and_docstring():
    assert weather.name == "weather"
    assert weather.description == "Tell the weather of a place.\n\nIt is a forecast."
    schema = weather.parameters
    assert schema["type"] == "object"
    assert schema["required"] == ["place", "days"]
    assert schema["additionalProperties"] is False
    assert schema["properties"]["days"] == {"type": "integer", "description": "How many days ahead, at most ten."}
    assert schema["properties"]["unit"] == {
        "type": "string", "enum": ["C", "F"], "default": "C", "description": "Of the temperature.",
    }  # fmt: skip
    assert schema["properties"]["tags"]["anyOf"] == [{"items": {"type": "string"}, "type": "array"}, {"type": "null"}]
    assert schema["$defs"]["Place"]["required"] == ["city"]
    assert tool_schema(weather)["function"] == {
        "name": "weather", "description": weather.description, "parameters": schema,
    }  # fmt: skip
    json.dumps(schema)


def test_arguments_become_what_the_signature_says():
    assert call(weather, {"place": {"city": "Bern"}, "days": "3", "copy": {"a": 1}}) == (
        "Bern/0 in 3 days, C, None, {'a': 1.0}"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"days": 1}, "'place' is missing"),
        ({"place": {"city": "x"}, "days": "many"}, r"'days': Input should be a valid integer.*found 'many'"),
        ({"place": {"city": "x"}, "days": 1, "unit": "K"}, "'unit': Input should be 'C' or 'F'"),
        ({"place": {"city": "x", "street": 1}, "days": 1, "dayz": 2}, "'dayz' is not an argument of this tool"),
        ({"place": {"floor": 2}, "days": 1}, r"'place\.city' is missing"),
        ({str(i): 1 for i in range(10)}, "and 7 more"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(DataError, match=message):
        call(weather, arguments)


def test_results_that_are_no_text_become_json():
    @tool(name="look", description="Looks.")
    async def anything(kind: str):
        return {"text": "é", "place": [Place("Bern")], "none": None}[kind]

    assert (anything.name, anything.description) == ("look", "Looks.")
    assert call(anything, {"kind": "text"}) == "é"
    assert json.loads(call(anything, {"kind": "place"})) == [{"city": "Bern", "floor": 0}]
    assert call(anything, {"kind": "none"}) == "null"


def undecided(kind):
    async def later():
        return "late"

    async def stream():
        yield "late"

    def rows():
        yield "late"

    return {
        "coroutine": later,
        "async generator": stream,
        "generator": rows,
        "Future": asyncio.Future,
        "in a list": lambda: [later()],
    }[kind]()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("coroutine", "returned a coroutine that was never awaited. It must be an `async def` that awaits it."),
        ("in a list", "returned a coroutine that was never awaited"),
        ("Future", "returned a Future that was never awaited"),
        ("async generator", "returned an async generator: it uses `yield`. It must return its result."),
        ("generator", "returned a generator: it uses `yield`"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_a_result_that_nobody_awaited_is_an_error_and_warns_nobody(kind, message, is_async):
    if is_async:

        @tool
        async def ask(kind: str):
            return undecided(kind)

    else:

        @tool
        def ask(kind: str):
            if kind == "Future":
                return asyncio.Future(loop=loop)
            return undecided(kind)

    async def everything():
        nonlocal loop
        loop = asyncio.get_running_loop()
        with pytest.raises(ToolError, match=re.escape(f"the tool {message}")):
            await ask.call({"kind": kind})

    loop = None
    asyncio.run(everything())
    gc.collect()


def test_a_decorated_function_is_still_called_as_one():
    assert weather(Place("Bern"), 1).startswith("Bern/0")


def test_functions_that_a_model_cannot_call_are_refused():
    with pytest.raises(SettingsError, match=r"parameter 'x' has no type. Add one, such as `x: str`"):
        tool(lambda x: x)

    def many(*names: str) -> str:
        return str(names)

    with pytest.raises(SettingsError, match=r"parameter '\*names: str' cannot be passed by name"):
        tool(many)

    def threads(lock: threading.Event) -> str:
        return str(lock)

    with pytest.raises(SettingsError, match="its parameters cannot be represented as JSON"):
        tool(threads)

    def lost(x: "Nowhere") -> str:  # noqa: F821
        return str(x)

    with pytest.raises(SettingsError, match="a type in its signature cannot be resolved"):
        tool(lost)
    with pytest.raises(SettingsError, match="a tool must be a function; found int"):
        tool(3)


def test_a_blocking_function_does_not_hold_up_the_event_loop():
    gate = threading.Event()

    @tool
    def wait() -> str:
        assert gate.wait(30)
        return "done"

    async def both():
        waiting = asyncio.create_task(wait.call({}))
        await asyncio.sleep(0)
        gate.set()
        return await asyncio.wait_for(waiting, 30)

    assert asyncio.run(both()) == "done"
    wait.close()


def test_hanging_calls_run_out_of_threads_with_a_reason(monkeypatch):
    monkeypatch.setattr(user_code, "MAX_RUNNING", 3)
    gate = threading.Event()

    @tool
    def hang() -> str:
        gate.wait(30)
        return "late"

    async def calls():
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await hang.call({})
        with pytest.raises(ToolError, match="3 earlier calls are still running"):
            await hang.call({})
        gate.set()
        async with asyncio.timeout(30):
            while True:  # until the threads end and free their places
                try:
                    return await hang.call({})
                except ToolError:
                    await asyncio.sleep(0.001)

    assert asyncio.run(calls()) == "late"
