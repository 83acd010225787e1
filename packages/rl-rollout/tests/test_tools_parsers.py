import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.errors import SettingsError
from rl_rollout.tools.parsers import TOOL_PARSERS, resolve_parser

PARAMETERS = {
    "add": {"properties": {"a": {"type": "integer"}, "b": {"type": "number"}, "note": {"type": "string"}}},
    "find": {"properties": {"where": {"type": "object"}, "deep": {"anyOf": [{"type": "boolean"}, {"type": "null"}]}}},
}


def parse(name, text):
    return resolve_parser(name).parse(text, parameters=PARAMETERS)


def read(name, text):
    return [(call.name, dict(call.arguments)) if call.fault is None else call.fault for call in parse(name, text).calls]


HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("The answer is 3.<|im_end|>", []),
        (f"Let me see.{HERMES}\n{HERMES}<|im_end|>", [("add", {"a": 1, "b": 2})] * 2),
        (f"<think>{HERMES}</think>3", []),
        (f"<think>hm</think>{HERMES}", [("add", {"a": 1, "b": 2})]),
        ('<tool_call>{"name": "add"}</tool_call>', [("add", {})]),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', [("add", {"a": 1})]),
        ('<tool_call>{"name": "add", "arguments": {}', ["a tool call has no </tool_call>"]),
        ("<tool_call>add(1)</tool_call>", ["a tool call is not JSON"]),
        ('<tool_call>{"arguments": {}}</tool_call>', ["a tool call has no name"]),
        ('<tool_call>["add"]</tool_call>', ["a tool call has no name"]),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', ["the arguments of add must be a JSON object"]),
        ('<tool_call>{"name": "add", "arguments": "a"}</tool_call>', ["the arguments of add are not JSON"]),
        (f"<tool_call>{'[' * 100_000}</tool_call>", ["a tool call is not JSON"]),
        (f"<tool_call>oops</tool_call>{HERMES}", ["a tool call is not JSON", ("add", {"a": 1, "b": 2})]),
    ],
)
def test_hermes(text, calls):
    found = read("hermes", text)
    assert len(found) == len(calls)
    for one, expected in zip(found, calls, strict=True):
        assert one.startswith(expected) if isinstance(expected, str) else one == expected


CODER = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=note>\n12\nlines\n</parameter>\n"
    "</function>\n</tool_call>"
)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("None needed.", []),
        (f"I add.\n{CODER}{CODER}<|im_end|>", [("add", {"a": 1, "note": "12\nlines"})] * 2),
        (f"<think>{CODER}</think>", []),
        ("<tool_call><function=add></function></tool_call>", [("add", {})]),
        ("<tool_call><function=new><parameter=x>[1, 2]</parameter></function></tool_call>", [("new", {"x": [1, 2]})]),
        ("<tool_call><function=new><parameter=x>word</parameter></function></tool_call>", [("new", {"x": "word"})]),
        ("<tool_call><function=add><parameter=note>7</parameter></function></tool_call>", [("add", {"note": "7"})]),
        ("<tool_call><function=add><parameter=a>x</parameter></function></tool_call>", [("add", {"a": "x"})]),
        (
            '<tool_call><function=find><parameter=where>{"a": [1]}</parameter><parameter=deep>True</parameter>'
            "</function></tool_call>",
            [("find", {"where": {"a": [1]}, "deep": True})],
        ),
        ("<tool_call><function=add>", ["a tool call has no </tool_call>"]),
        ("<tool_call>add</tool_call>", ["a tool call has no <function=NAME>"]),
        ("<tool_call><function=add><parameter=a>1</function></tool_call>", ["the parameters of add cannot be read"]),
        ("<tool_call><function=add>a = 1</function></tool_call>", ["the parameters of add cannot be read"]),
    ],
)
def test_qwen3_coder(text, calls):
    found = read("qwen3_coder", text)
    assert len(found) == len(calls)
    for one, expected in zip(found, calls, strict=True):
        assert one.startswith(expected) if isinstance(expected, str) else one == expected


THOUGHT = "<|channel|>analysis<|message|>I should add to=functions.add<|end|>"
COMMENT = (
    "<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
    '{"a": 1, "b": 2}<|call|>'
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "calls", "answer"),
    [
        (THOUGHT + COMMENT, [("add", {"a": 1, "b": 2})], ""),
        (THOUGHT + COMMENT + COMMENT, [("add", {"a": 1, "b": 2})] * 2, ""),
        (f"{THOUGHT}<|start|>assistant<|channel|>final<|message|>It is 3.<|return|>", [], "It is 3."),
        ("<|channel|>final<|message|>Three", [], "Three"),
        (" to=functions.add<|channel|>commentary json<|message|>{}<|call|>", [("add", {})], ""),
        (" to=browser.open<|channel|>commentary<|message|>{}<|call|>", [("browser.open", {})], ""),
        (" to=functions.add<|channel|>commentary<|message|>{oops<|call|>", ["the arguments of add are not JSON"], ""),
        (" to=functions.add<|channel|>commentary<|message|>{}", ["the call of add does not end with <|call|>"], ""),
        (" to=functions.add<|channel|>commentary<|call|>", ["the call of add has no <|message|>"], ""),
        ("just text", [], ""),
    ],
)
def test_gpt_oss(text, calls, answer):
    turn = parse("gpt_oss", text)
    assert turn.answer == answer
    found = read("gpt_oss", text)
    assert len(found) == len(calls)
    for one, expected in zip(found, calls, strict=True):
        assert one.startswith(expected) if isinstance(expected, str) else one == expected


PIECES = [
    "<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>", ">", "\n", "x", '"', "{",
    "}", '"name"', ":", "<|channel|>", "<|message|>", "<|call|>", "<|start|>", "to=functions.", "</think>", " ", "\\",
]  # fmt: skip


@given(st.sampled_from(["hermes", "qwen3_coder", "gpt_oss"]), st.lists(st.sampled_from(PIECES) | st.text(max_size=3)))
def test_no_text_raises(name, pieces):
    for call in parse(name, "".join(pieces)).calls:
        assert call.fault is None or len(call.fault) < 1000
        json.dumps(dict(call.arguments))


@given(
    st.dictionaries(st.text(max_size=5), st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists))
)
def test_hermes_arguments_come_back_as_they_were_written(arguments):
    body = json.dumps({"name": "add", "arguments": arguments})
    if "<tool_call>" not in body and "</t" not in body:
        assert read("hermes", f"<tool_call>{body}</tool_call>") == [("add", arguments)]


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "gpt_oss"])
@pytest.mark.parametrize("piece", [" ", "<", "<tool_call>", "<|message|>", "<parameter=", "x", "to=", "\n\t "])
def test_long_texts_are_read_in_no_time(name, piece):
    started_at = time.process_time()
    parse(name, "<tool_call><function=a>" + piece * (300_000 // len(piece)))
    assert time.process_time() - started_at < 2


def test_parsers_by_name_and_from_a_file(tmp_path):
    assert TOOL_PARSERS.names() == ["gpt_oss", "hermes", "qwen3_coder"]
    with pytest.raises(SettingsError, match=r"unknown tool parser 'hermess'. Did you mean 'hermes'\?"):
        resolve_parser("hermess")
    file = tmp_path / "mine.py"
    file.write_text(
        "class Mine:\n    stop_tokens = ()\n    def parse(self, text, *, parameters):\n        return text\n\n"
        "other = 3\n"
    )
    assert resolve_parser(f"{file}:Mine").parse("x", parameters={}) == "x"
    with pytest.raises(SettingsError, match="must be a class with `parse`; found 3"):
        resolve_parser(f"{file}:other")
