from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from rl_core.errors import SettingsError
from rl_rollout.loops import SingleTurnLoop, resolve_loop
from rl_rollout.loops.options import LOOPS, read_options
from rl_rollout.loops.tools import ToolsLoop


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    name: str
    share: float = 0.5
    is_on: bool = False
    kind: Literal["a", "b"] = "a"
    limit: int | None = None
    words: tuple[str, ...] = ()
    inner: Inner = field(default_factory=Inner)
    table: Mapping[str, Inner] = field(default_factory=dict)
    either: int | str = 0
    path: Path | None = None
    anything: Any = None


def read(**table):
    return read_options(Options, table, where="loop 'x'")


def test_tables_become_dataclasses():
    options = read(
        name="n", share=1, is_on=True, kind="b", limit=3, words=["a", "b"], inner={"size": 2},
        table={"one": {"size": 4}}, either="text", path="a/b", anything=[1],
    )  # fmt: skip
    assert options == Options(
        name="n", share=1.0, is_on=True, kind="b", limit=3, words=("a", "b"), inner=Inner(size=2),
        table={"one": Inner(size=4)}, either="text", path=Path("a/b"), anything=[1],
    )  # fmt: skip
    assert isinstance(options.share, float)
    assert read(name="n", limit=None) == Options(name="n")
    assert read(name="n", inner=Inner(size=2)) == Options(name="n", inner=Inner(size=2))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "loop 'x' needs the option 'name'"),
        ({"nam": "n"}, r"unknown option of loop 'x' 'nam'. Did you mean 'name'\? Known: anything, either, inner"),
        ({"name": 3}, r"name of loop 'x' must be a string; found 3 \(int\)"),
        ({"name": "n", "share": "1"}, "share of loop 'x' must be a number; found '1'"),
        ({"name": "n", "limit": True}, "limit of loop 'x' must be a whole number or None; found True"),
        ({"name": "n", "limit": 1.5}, "limit of loop 'x' must be a whole number or None; found 1.5"),
        ({"name": "n", "is_on": 1}, "is_on of loop 'x' must be True or False; found 1"),
        ({"name": "n", "kind": "c"}, "kind of loop 'x' must be one of 'a', 'b'; found 'c'"),
        ({"name": "n", "words": "abc"}, "words of loop 'x' must be a tuple, each a string; found 'abc'"),
        ({"name": "n", "words": [1]}, r"words of loop 'x' must be a tuple, each a string; found .*, with int at 0"),
        ({"name": "n", "inner": 3}, "loop 'x': inner must be a table; found int"),
        ({"name": "n", "inner": {"sise": 3}}, r"unknown option of loop 'x': inner 'sise'. Did you mean 'size'\?"),
        (
            {"name": "n", "table": {"one": {"size": "1"}}},
            r"loop 'x': table.one must be a whole number; found '1'",
        ),
        ({"name": "n", "either": []}, r"either of loop 'x' must be a whole number or a string; found \[\]"),
    ],
)
def test_wrong_tables_are_refused_by_name(table, message):
    with pytest.raises(SettingsError, match=message):
        read(**table)


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Several:
    one: Named | Inner | None = None
    list: tuple[Inner, ...] | None = None
    table: Mapping[str, Inner] | None = None
    mixed: Inner | tuple[Inner, ...] | str | None = None


@pytest.mark.parametrize(
    ("table", "options"),
    [
        ({"one": {"size": 2}}, Several(one=Inner(size=2))),
        ({"one": {"name": "a"}}, Several(one=Named(name="a"))),
        ({"list": [{"size": 2}, {}]}, Several(list=(Inner(size=2), Inner()))),
        ({"list": ({"size": 2},)}, Several(list=(Inner(size=2),))),
        ({"table": {"a": {"size": 2}}}, Several(table={"a": Inner(size=2)})),
        ({"mixed": [{"size": 2}]}, Several(mixed=(Inner(size=2),))),
        ({"mixed": {"size": 2}}, Several(mixed=Inner(size=2))),
        ({"mixed": "text", "one": None}, Several(mixed="text")),
        ({"mixed": Inner(size=2), "list": (Inner(),)}, Several(mixed=Inner(size=2), list=(Inner(),))),
    ],
)
def test_dataclasses_in_options_with_several_forms_are_built(table, options):
    assert read_options(Several, table, where="loop 'x'") == options


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"list": {"size": 2}}, r"list of loop 'x' must be .*; found \{'size': 2\} \(dict\)"),
        ({"table": {"a": {"sise": 2}}}, r"unknown option of loop 'x': table.a 'sise'. Did you mean 'size'\?"),
        ({"mixed": [3]}, r"loop 'x': mixed\[0\] must be a table"),
        ({"one": {"other": 2}}, r"unknown option of loop 'x': one 'other'"),
    ],
)
def test_a_wrong_value_among_several_forms_is_refused_by_name(table, message):
    with pytest.raises(SettingsError, match=message):
        read_options(Several, table, where="loop 'x'")


def test_loops_by_name_take_their_options():
    assert {"environment", "single_turn", "tools"} <= set(LOOPS.names())
    assert isinstance(resolve_loop("single_turn"), SingleTurnLoop)
    assert isinstance(resolve_loop("single_turn", {}), SingleTurnLoop)
    assert isinstance(resolve_loop("tools", {"parser": "qwen3_coder", "limits": {"max_turns": 3}}), ToolsLoop)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("single_turn", {"max_turns": 1}, "agent loop 'single_turn' has no options; found max_turns"),
        ("tool", {}, r"unknown agent loop 'tool'. Did you mean 'tools'\?"),
        ("tools", {"parsers": "x"}, r"unknown option of agent loop 'tools' 'parsers'. Did you mean 'parser'\?"),
        ("tools", {"parser": "hermess"}, "unknown tool parser 'hermess'"),
        ("tools", {"tools": ["nope"]}, "unknown tool 'nope'"),
        (
            "tools",
            {"limits": {"max_turns": 0}},
            "max_turns of agent loop 'tools': limits must be a whole number of at least 1; found 0",
        ),
        (
            "tools",
            {"limits": {"on_context_full": "cry"}},
            "on_context_full of .* must be one of 'stop'",
        ),
        (
            "tools",
            {"mcp_servers": {"a": {"command": ["x"], "env": {"A": 1}}}},
            r"env of .*mcp_servers\.a must be a mapping.*; found {'A': '\(redacted\)'} \(dict\), with int at 'A'",
        ),
        ("tools", {"mcp_servers": {"a": {}}}, r"needs either command or url; found command = \[\] and url = None"),
        (
            "tools",
            {"mcp_servers": {"a": {"url": "x", "start_timeout_s": 0}}},
            "start_timeout_s of .*mcp_servers.a must be a number above 0; found 0",
        ),
        ("environment", {}, "agent loop 'environment' needs the option 'environment'"),
        ("environment", {"environment": "chess"}, "unknown environment 'chess'"),
        (
            "environment",
            {"environment": "e.py:E", "timeout_s": 0},
            "timeout_s of .* must be a number above 0; found 0",
        ),
        (
            "environment",
            {"environment": "e.py:E", "max_observation_chars": 0},
            "max_observation_chars of .* at least 1; found 0",
        ),
    ],
)
def test_unknown_loops_and_impossible_options_are_refused(name, options, message):
    with pytest.raises(SettingsError, match=message):
        resolve_loop(name, options)
