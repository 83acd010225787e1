import asyncio

import pytest

from rl_core.errors import SettingsError
from rl_rollout.tools import ToolBox, resolve_tool, resolve_tools

pytest.importorskip("pydantic")

FILE = '''
from rl_rollout.tools import tool

calls = []

@tool
def add(a: int, b: int) -> int:
    """Add."""
    calls.append((a, b))
    return a + b

def count() -> int:
    """How often it was added."""
    return len(calls)

class Counter:
    name, description, parameters = "counter", "", {"type": "object"}
    async def call(self, arguments):
        return "1"

number = 3
'''


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_tools.py"
    path.write_text(FILE)
    return path


def test_tools_from_a_file_share_the_file(file):
    add, count, counter = resolve_tools([f"{file}:add", f"{file}:count", f"{file}:Counter"])
    assert [tool.name for tool in (add, count, counter)] == ["add", "count", "counter"]
    assert asyncio.run(add.call({"a": 1, "b": 2})) == "3"
    assert asyncio.run(count.call({})) == "1"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("addd", r"has no 'addd'; it has Counter, add, count, tool. Did you mean 'add'\?"),
        ("number", "must be a function or a Tool; found int"),
    ],
)
def test_what_is_no_tool_is_refused(file, name, message):
    with pytest.raises(SettingsError, match=message):
        resolve_tool(f"{file}:{name}")


def test_unknown_tools_and_files_are_refused(tmp_path):
    with pytest.raises(SettingsError, match=r"unknown tool 'calculator'.*entry point group 'rl_rollout.tools'"):
        resolve_tool("calculator")
    with pytest.raises(SettingsError, match="does not exist"):
        resolve_tool("nowhere.py:add")
    with pytest.raises(SettingsError, match=r"must be given as path\.py:name"):
        resolve_tool("nowhere.py")
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0\n")
    with pytest.raises(SettingsError, match=r"(?s)importing .*broken.py raised:.*ZeroDivisionError"):
        resolve_tool(f"{broken}:add")


def test_a_name_belongs_to_one_tool(file):
    add = resolve_tool(f"{file}:add")
    toolbox = ToolBox([add])
    with pytest.raises(SettingsError, match="two tools have the name 'add'"):
        toolbox.add([add])
    assert toolbox.names() == ["add"]
    assert toolbox.schemas()[0]["function"]["name"] == "add"
    assert toolbox.get("nope") is None
    toolbox.close()
