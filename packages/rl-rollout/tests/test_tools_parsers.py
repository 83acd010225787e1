import json
import sys
import time

import pytest
from chat_model import make_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from rl_core.errors import MissingExtraError, SettingsError
from rl_rollout.tools.parsers import TOOL_PARSERS, parser_for, resolve_parser

PARAMETERS = {"add": {"properties": {"a": {"type": "integer"}, "b": {"type": "number"}}}}


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
        ('<tool_call>{"name": "add", "parameters": {"a": 1}}</tool_call>', [("add", {"a": 1})]),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}, "parameters": {}}</tool_call>', [("add", {"a": 1})]),
        ('<tool_call>{"name": "add", "id": "1"}</tool_call>', [("add", {})]),
        ('<tool_call>{"name": "add", "a": 1}</tool_call>', ["the call of add has no arguments"]),
        ('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', [("\ud800", {})]),
        (f"<think>I could {HERMES} or not", []),
        (f"<think>hm</think>{HERMES}<think>and {HERMES}", [("add", {"a": 1, "b": 2})]),
        (f"{HERMES}<think>{HERMES}</think>", [("add", {"a": 1, "b": 2})]),
        (f"I could {HERMES}</think>{HERMES}", [("add", {"a": 1, "b": 2})]),
        (f"</think>{HERMES}</think>", [("add", {"a": 1, "b": 2})]),
        (f"with <tool_call> then.</think>{HERMES}", [("add", {"a": 1, "b": 2})]),
        ("with <tool_call> then.</think>It is 3.", []),
        ("<think>x</think><tool_call>{</think>", ["a tool call has no </tool_call>"]),
        ('{"name": "add", "arguments": {}}</tool_call>', ["a tool call has no <tool_call>"]),
        (f"{HERMES}</tool_call>", [("add", {"a": 1, "b": 2})]),
        (f"<tool_call>add</tool_call>{HERMES}", ["a tool call is not JSON", ("add", {"a": 1, "b": 2})]),
        (f"<tool_call>oops</tool_call>{HERMES}", [("add", {"a": 1, "b": 2})]),
        ("I would use the <tool_call> mark for it.<|im_end|>", []),
        ("Calls go between <tool_call> and </tool_call>, as in `<tool_call>` ... `</tool_call>`.", []),
        ("<tool_call> is the mark with which I call a tool.", []),
        ("A call ends with </tool_call>.", []),
        (f"First <tool_call>, then JSON: {HERMES}", [("add", {"a": 1, "b": 2})]),
        ("I add: <tool_call>add(1)</tool_call>", ["a tool call is not JSON"]),
        ("I add: <tool_call>add 1", ["a tool call has no </tool_call>"]),
        ("I add: <tool_call>", []),
        ("Answer: 5 <tool_call>", []),
        ("Answer: 5 <tool_call>\n</tool_call>", []),
        ("<tool_call>\nnot needed\n</tool_call>", []),
        ("Write:\n```xml\n# so:\n<tool_call>{...}</tool_call>\n```", []),
        ('As `x <tool_call>{"name": ...}</tool_call>`.', []),
        ('```\nx\n```\n<tool_call>{"name": ...}</tool_call>', ["a tool call is not JSON"]),
        (f"```\n{HERMES}\n```", [("add", {"a": 1, "b": 2})]),
    ],
)
def test_hermes_calls_are_parsed(text, calls):
    found = read("hermes", text)
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
        ("just text", [], None),
        ("It goes to=you<|return|>", [], None),
        ("<|message|>Three<|return|>", [], "Three"),
        ("<|channel|>commentary to=<|message|>{}<|call|>", ["a call has no recipient"], ""),
        ("<|channel|>commentary to=<|message|>{}<|end|>", ["a call has no recipient"], ""),
        ("<|channel|>commentary to=functions.<|message|>{}<|call|>", ["a call has no recipient"], ""),
        ("<|channel|>commentary<|message|>{}<|call|>", ["a call has no recipient"], ""),
        ("<|channel|>commentary<|message|>I look it up.<|end|>" + COMMENT, [("add", {"a": 1, "b": 2})], ""),
    ],
)
def test_gpt_oss_calls_are_parsed(text, calls, answer):
    turn = parse("gpt_oss", text)
    assert turn.answer == answer
    found = read("gpt_oss", text)
    assert len(found) == len(calls)
    for one, expected in zip(found, calls, strict=True):
        assert one.startswith(expected) if isinstance(expected, str) else one == expected


WRITE = '{"name": "write", "arguments": {"text": "use </think>, <think>, </tool_call> and <tool_call>"}}'


@pytest.mark.parametrize("before", ["", "Now.", "<think>hm</think>", "hm</think>"])
def test_marks_in_the_arguments_are_arguments(before):
    expected = [("write", {"text": "use </think>, <think>, </tool_call> and <tool_call>"}), ("add", {"a": 1, "b": 2})]
    assert read("hermes", f"{before}<tool_call>{WRITE}</tool_call>{HERMES}") == expected


PIECES = [
    "<tool_call>", "</tool_call>", ">", "\n", "x", '"', "{",
    "}", '"name"', ":", "<|channel|>", "<|message|>", "<|call|>", "<|start|>", "to=functions.", "</think>", " ",
    "<think>", "<|channel|>commentary", "<|channel|>final", "to=", "<|end|>", '{"name": "a"', "\\",
    "\ud800",
]  # fmt: skip


@given(st.sampled_from(["hermes", "gpt_oss"]), st.lists(st.sampled_from(PIECES) | st.text(max_size=3)))
def test_no_text_raises(name, pieces):
    for call in parse(name, "".join(pieces)).calls:
        assert call.fault is None or len(call.fault) < 1000
        assert call.fault is not None or call.name
        json.dumps(dict(call.arguments))


@given(
    st.dictionaries(st.text(max_size=5), st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists))
)
def test_hermes_arguments_come_back_as_they_were_written(arguments):
    body = json.dumps({"name": "add", "arguments": arguments})
    assert read("hermes", f"<tool_call>{body}</tool_call>") == [("add", arguments)]


@pytest.mark.parametrize("name", ["hermes", "gpt_oss"])
@pytest.mark.parametrize(
    "piece",
    [
        " ",
        "<",
        "<tool_call>",
        '<tool_call>{"a',
        "<think>",
        "</think>",
        "</tool_call>",
        "<|message|>",
        "x",
        "to=",
        "\n\t ",
    ],
)
def test_long_texts_are_read_in_no_time(name, piece):
    started_at = time.process_time()
    parse(name, "<tool_call>" + piece * (1_000_000 // len(piece)))
    assert time.process_time() - started_at < 15  # quadratic time would take over 30 s


@pytest.mark.parametrize(
    "value", ['"</tool_call>\\u00e9\\n"', "-Infinity", "-12.5e+10", "false", "[null, {}]", '"\\ud83d\\ude00"']
)
@pytest.mark.parametrize("window", [1024, 4096])
def test_a_long_call_ends_where_its_json_does_wherever_a_window_cuts_it(value, window):
    for more in range(-60, 5):
        length = window + more
        body = '{"name": "add", "arguments": {"text": "' + "x" * length + f'", "value": {value}}}}}'
        [call] = parse("hermes", f"<tool_call>{body}</tool_call> and more </tool_call>").calls
        assert call.fault is None
        assert call.arguments == json.loads(body)["arguments"]


def test_qwen3_coder_is_refused_without_vllm(monkeypatch):
    monkeypatch.delitem(sys.modules, "rl_rollout.tools.parsers.vllm_parsers", raising=False)
    monkeypatch.setitem(sys.modules, "vllm.entrypoints.openai.chat_completion.protocol", None)
    with pytest.raises(MissingExtraError, match=r"Install rl-rollout\[vllm\]"):
        parser_for("qwen3_coder", make_tokenizer())


def test_parsers_are_found_by_name_and_in_a_file(tmp_path):
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
