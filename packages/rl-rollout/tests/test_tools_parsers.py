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
        ("<function=add>\n<parameter=a>1</parameter></function>", [("add", {"a": 1})]),
        ("Now.<function=add></function>\n</tool_call><|im_end|>", [("add", {})]),
        ("<tool_call>\n<function=add></function><|im_end|>", [("add", {})]),
        (f"<function=add></function>{CODER}", [("add", {}), ("add", {"a": 1, "note": "12\nlines"})]),
        (
            f"<tool_call><function=add>{CODER}",
            ["a tool call has no </function>", ("add", {"a": 1, "note": "12\nlines"})],
        ),
        ("<think><function=add></function>", []),
        ("<function=add></function></think>3", []),
        (
            "<tool_call><function=add><parameter=note><think>\n</think></parameter></function></tool_call>",
            [("add", {"note": "<think>\n</think>"})],
        ),
        *(
            (f"{before}<function=add><parameter=note>{value}</parameter></function>{after}", [("add", {"note": value})])
            for before, after in (("<tool_call>", "</tool_call>"), ("", ""), ("<tool_call>\n", "\n</tool_call>x"))
            for value in (
                "</tool_call>",
                "a</tool_call>b<tool_call>c",
                "</function>",
                "<tool_call>{}</tool_call>",
                "<think>x",
                "a <function=x> b",
                "<function=x></function>",
                "a </parameter> b",
                "</parameter>\n\nx",
            )
        ),
        (
            f"<tool_call><function=add><parameter=note>a</tool_call>{CODER}",
            ["a tool call has no </function>", ("add", {"a": 1, "note": "12\nlines"})],
        ),
        ("<tool_call><function=add><parameter=a>1</parameter></tool_call>", ["a tool call has no <function=NAME>"]),
        ("I would use the <tool_call> mark, up to </tool_call>.", []),
        ("<tool_call><function=></function></tool_call>", ["a tool call has no <function=NAME>"]),
        ("<function=add", ["a tool call has no </function>"]),
        ("<parameter=a>1</parameter></tool_call>", ["a tool call has no <function="]),
        ("<tool_call><function=add>", ["a tool call has no </function>"]),
        ("<tool_call>", []),
        ("I would use <function=add> here.", []),
        ("A call is <function=NAME>...</function>.", []),
        ("As `<tool_call><function=add>1</function></tool_call>`.", []),
        (f"After <function=add>, its parameters: {CODER}", [("add", {"a": 1, "note": "12\nlines"})]),
        ("Use <tool_call>\nnot needed\n</tool_call>", []),
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
def test_gpt_oss(text, calls, answer):
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


COLOR = {"$defs": {"Color": {"enum": ["1", "red"]}, "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}]}}}
STRING, INTEGER, NULL = {"type": "string"}, {"type": "integer"}, {"type": "null"}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"anyOf": [STRING, NULL]}, "12345", "12345"),
        ({"anyOf": [STRING, NULL]}, "null", None),
        ({"anyOf": [STRING, NULL]}, "None", "None"),
        ({"type": ["string", "null"]}, "12345", "12345"),
        ({"type": ["string", "null"]}, "\nnull\n", None),
        ({"oneOf": [STRING, INTEGER]}, "5", "5"),
        ({"anyOf": [INTEGER, NULL]}, "5", 5),
        ({"anyOf": [INTEGER, NULL]}, "None", None),
        ({"type": ["integer"]}, "5", 5),
        (STRING, "null", "null"),
        ({"enum": ["1", "red"]}, "1", "1"),
        ({"enum": ["1", "red"]}, "2", "2"),
        ({"enum": [1, 2, "auto"]}, "1", 1),
        ({"enum": [1, 2, "auto"]}, "auto", "auto"),
        ({"const": "7"}, "7", "7"),
        ({"$ref": "#/$defs/Color"}, "1", "1"),
        ({"allOf": [{"$ref": "#/$defs/Color"}], "default": "red"}, "1", "1"),
        ({"anyOf": [{"$ref": "#/$defs/Color"}, NULL]}, "null", None),
        ({"$ref": "#/$defs/Loop"}, "1", 1),
        ({"$ref": "#/$defs/None"}, "1", 1),
        ({"$ref": "other.json"}, "1", 1),
        ({"allOf": [STRING, INTEGER]}, "1", 1),
        ({"anyOf": [{}, STRING]}, "1", 1),
        ({}, "NaN", "NaN"),
        (True, "[1]", [1]),
        (False, "True", "True"),
        (None, "word", "word"),
        (3, "3", 3),
        ({"type": "number"}, "2.5", 2.5),
        ({"type": "boolean"}, "False", False),
        ({"type": {}, "enum": 3, "anyOf": {}, "allOf": None, "$ref": []}, "1", 1),
    ],
)
def test_qwen3_coder_reads_values_as_the_schema_allows(schema, text, value):
    found = TOOL_PARSERS.get("qwen3_coder")().parse(
        f"<function=f><parameter=x>{text}</parameter></function>",
        parameters={"f": {"properties": {"x": schema}} | COLOR},
    )
    (call,) = found.calls
    assert call.fault is None
    assert call.arguments == {"x": value}
    assert type(call.arguments["x"]) is type(value)


ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["string", "null", "#/$defs/a", "#/$defs/b", "#"]),
    lambda odd: (
        st.lists(odd, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "a", "b", "properties", "x"]
            ),
            odd,
            max_size=4,
        )
    ),
)


@given(ODD, ODD, st.sampled_from(["1", "null", "text", "[" * 100_000]))
def test_no_schema_raises(schema, root, text):
    for parameters in ({"f": root}, {"f": {"properties": schema}}, {"f": {"properties": {"x": schema}, "$defs": root}}):
        found = resolve_parser("qwen3_coder").parse(
            f"<function=f><parameter=x>{text}</parameter></function>", parameters=parameters
        )
        assert found.calls[0].arguments["x"] in (1, "1", None, "null", "text", text)


def test_schemas_that_lead_to_one_another_are_read_in_no_time():
    names = [f"#/$defs/{index}" for index in range(30)]
    everyone = {"anyOf": [{"$ref": name} for name in names]}
    root = {"properties": {"x": everyone}, "$defs": {str(index): everyone for index in range(30)}}
    started_at = time.process_time()
    resolve_parser("qwen3_coder").parse("<function=f><parameter=x>1</parameter></function>", parameters={"f": root})
    assert time.process_time() - started_at < 15  # following every reference would never end


PIECES = [
    "<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>", ">", "\n", "x", '"', "{",
    "}", '"name"', ":", "<|channel|>", "<|message|>", "<|call|>", "<|start|>", "to=functions.", "</think>", " ",
    "<think>", "<|channel|>commentary", "<|channel|>final", "to=", "<|end|>", '{"name": "a"', "\\",
    "\ud800",
]  # fmt: skip


@given(st.sampled_from(["hermes", "qwen3_coder", "gpt_oss"]), st.lists(st.sampled_from(PIECES) | st.text(max_size=3)))
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


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "gpt_oss"])
@pytest.mark.parametrize(
    "piece",
    [
        " ",
        "<",
        "<tool_call>",
        '<tool_call>{"a',
        "<function=",
        "<think>",
        "</think>",
        "</tool_call>",
        "<|message|>",
        "<parameter=",
        "x",
        "to=",
        "\n\t ",
    ],
)
def test_long_texts_are_read_in_no_time(name, piece):
    started_at = time.process_time()
    parse(name, "<tool_call><function=a>" + piece * (1_000_000 // len(piece)))
    assert time.process_time() - started_at < 15  # quadratic time would take over 30 s


@pytest.mark.parametrize(
    "value", ['"</tool_call>\\u00e9\\n"', "-Infinity", "-12.5e+10", "false", "[null, {}]", '"\\ud83d\\ude00"']
)
@pytest.mark.parametrize("window", [1024, 4096])
def test_a_long_call_ends_where_its_json_does_wherever_a_window_cuts_it(value, window):
    for length in range(window - 60, window + 5):
        body = '{"name": "add", "arguments": {"text": "' + "x" * length + f'", "value": {value}}}}}'
        [call] = parse("hermes", f"<tool_call>{body}</tool_call> and more </tool_call>").calls
        assert call.fault is None
        assert call.arguments == json.loads(body)["arguments"]


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
