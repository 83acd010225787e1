"""vLLM's parsers: turns as the tools loop and a client of the gateway see them, and refusals."""

import asyncio
import json
import time

import httpx
import pytest
from chat_model import SPECIAL, TOOLS, Speaker, chat_prompt, encode, in_turn, make_tokenizer, run_loop
from gateway_site import gateway_site, run
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.errors import SettingsError
from rl_rollout.gateway.replies import ReplyReader
from rl_rollout.gateway.service import ServiceOptions
from rl_rollout.loops.tools import ToolsLoop, ToolsOptions
from rl_rollout.tools import ToolBox
from rl_rollout.tools.parsers import parser_for

vllm_parsers = pytest.importorskip("rl_rollout.tools.parsers.vllm_parsers", exc_type=ImportError)

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
SCHEMAS = {"add": {"type": "object", "properties": {"a": {"type": "integer"}}}}


def parser(*, calls=None, reasoning=None):
    return vllm_parsers.VLLMParser(make_tokenizer(), calls=calls, reasoning=reasoning, ends=("<|im_end|>",))


def test_calls_and_reasoning_are_read_as_vllm_reads_them():
    turn = parser(calls="hermes", reasoning="qwen3").parse(f"<think>hm</think>So {CALL}<|im_end|>", parameters=SCHEMAS)
    assert [(call.name, dict(call.arguments)) for call in turn.calls] == [("add", {"a": 1})]
    assert (turn.answer.strip(), turn.reasoning) == ("So", "hm")


def test_formats_that_we_have_no_parser_of():
    turn = parser(calls="pythonic").parse("[add(a=1)]<|im_end|>", parameters=SCHEMAS)
    assert [(call.name, dict(call.arguments)) for call in turn.calls] == [("add", {"a": 1})]


@pytest.mark.parametrize("text", ["", "<tool_call>", "<tool_call>{", f"{CALL[:-1]}", "</think>", "\ud800"])
def test_a_text_that_is_none_of_it_stays_as_it_is(text):
    turn = parser(calls="hermes", reasoning="qwen3").parse(text, parameters=SCHEMAS)
    assert turn.calls == ()


def test_what_vllm_lacks_or_the_tokenizer_does_not_fit_is_refused():
    with pytest.raises(SettingsError, match="Did you mean 'hermes'"):
        parser(calls="hermess")
    with pytest.raises(SettingsError, match="'mistral' refuses this tokenizer"):
        parser(calls="mistral")
    with pytest.raises(SettingsError, match="reasoning_parser must be"):
        ServiceOptions(reasoning_parser="vllm:qwen3")


def test_the_next_turn_matches_what_a_client_got():
    async def talk():
        options = ServiceOptions(tool_parser="vllm:hermes", reasoning_parser="vllm:qwen3")
        async with gateway_site(lambda _: f"<think>hm</think>So {CALL}", service=options) as gateway:
            session = gateway.open("p")
            headers = {"x-api-key": session.key}
            messages = [{"role": "user", "content": "?"}]
            async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=50) as client:
                for _ in range(2):
                    body = {"messages": messages, "tools": TOOLS}
                    answer = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
                    assert (answer["content"], answer["reasoning_content"]) == ("So", "hm")
                    call_id = answer["tool_calls"][0]["id"]
                    messages += [answer, {"role": "tool", "tool_call_id": call_id, "content": "3"}]
            result = await asyncio.wait_for(gateway.finish(session), 50)
            assert len(result.trajectories) == 1
            assert result.failure is None

    run(talk)


CODER = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=note>\n12\nlines\n</parameter>\n"
    "</function>\n</tool_call>"
)
ADD = ("add", {"a": 1, "note": "12\nlines"})
CODER_SCHEMAS = {
    "add": {"properties": {"a": {"type": "integer"}, "note": {"type": "string"}}},
    "find": {"properties": {"where": {"type": "object"}, "deep": {"anyOf": [{"type": "boolean"}, {"type": "null"}]}}},
}


def coder(text, schemas=CODER_SCHEMAS):
    turn = parser_for("qwen3_coder", make_tokenizer()).parse(text, parameters=schemas)
    return turn, [(call.name, dict(call.arguments)) if call.fault is None else call.fault for call in turn.calls]


@pytest.mark.parametrize(
    ("text", "calls", "answer"),
    [
        ("None needed.", [], "None needed."),
        (f"I add.\n{CODER}{CODER}<|im_end|>", [ADD, ADD], "I add."),
        (f"<think>{CODER}</think>3", [], "3"),
        (f"<think>{CODER}", [], ""),
        (f"I could {CODER}.</think>It is 3.", [], f"I could {CODER}.</think>It is 3."),
        (f"hm</think>{CODER}", [ADD], "hm</think>"),
        (f"with <tool_call> then.</think>{CODER}", [ADD], "with <tool_call> then.</think>"),
        ("<tool_call><function=add></function></tool_call>", [("add", {})], ""),
        ("<function=add>\n<parameter=a>1</parameter></function>", [("add", {"a": 1})], ""),
        (f"<function=add></function>{CODER}", [("add", {}), ADD], ""),
        ("<tool_call><function=add><parameter=a>x</parameter></function></tool_call>", [("add", {"a": "x"})], ""),
        (
            '<tool_call><function=find><parameter=where>{"a": [1]}</parameter><parameter=deep>True</parameter>'
            "</function></tool_call>",
            [("find", {"where": {"a": [1]}, "deep": True})],
            "",
        ),
        *(
            (f"<tool_call><function=add><parameter=note>{value}</parameter></function></tool_call>",
             [("add", {"note": value})], "")
            for value in ("</tool_call>", "a</tool_call>b<tool_call>c", "<think>x", "a </think> b", "<function=x> y")
        ),
    ],
)  # fmt: skip
def test_qwen3_coder_is_vllms_parser(text, calls, answer):
    turn, found = coder(text)
    assert found == calls
    assert turn.answer.strip() == answer


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("I would use <function=add> here.", [("add", {})]),
        ("<tool_call><function=add><parameter=a>1", [("add", {})]),
        ("<tool_call><function=add><parameter=note>a </parameter> b</parameter></function>", [("add", {"note": "a "})]),
        ("<tool_call><function=add><parameter=note>x</function> y</parameter></function>", [("add", {})]),
    ],
)
def test_what_vllm_reads_as_a_call_of_qwen3_coder_although_it_is_none_or_another(text, calls):
    assert coder(text)[1] == calls


COLOR = {
    "$defs": {
        "Color": {"enum": ["1", "red"]},
        "Size": {"type": "integer"},
        "Place": {"type": "object", "properties": {"x": {"$ref": "#/$defs/Size"}}},
        "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}]},
    }
}
STRING, INTEGER, NULL = {"type": "string"}, {"type": "integer"}, {"type": "null"}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"anyOf": [STRING, NULL]}, "12345", "12345"),
        ({"anyOf": [STRING, NULL]}, "null", None),
        ({"type": ["string", "null"]}, "12345", "12345"),
        ({"anyOf": [INTEGER, NULL]}, "5", 5),
        ({"type": ["integer"]}, "5", 5),
        (STRING, "null", "null"),
        ({"enum": ["1", "red"]}, "1", "1"),
        ({"enum": [1, 2, "auto"]}, "1", 1),
        ({"enum": [1, 2, "auto"]}, "auto", "auto"),
        ({"const": "7"}, "7", "7"),
        ({"$ref": "#/$defs/Color"}, "1", "1"),
        ({"$ref": "#/$defs/Size"}, "1", 1),
        ({"$ref": "#/$defs/Place"}, '{"x": 3}', {"x": 3}),
        ({"anyOf": [{"$ref": "#/$defs/Place"}, NULL]}, '{"x": 3}', {"x": 3}),
        ({"anyOf": [{"$ref": "#/$defs/Place"}, NULL]}, "null", None),
        ({"allOf": [{"$ref": "#/$defs/Size"}], "default": 1}, "1", 1),
        ({"$ref": "#/$defs/Loop"}, "1", "1"),
        ({"$ref": "#/$defs/None"}, "1", "1"),
        ({"type": "number"}, "2.5", 2.5),
        ({"type": "boolean"}, "False", False),
        ({"type": {}, "enum": 3, "anyOf": {}, "allOf": None, "$ref": []}, "1", "1"),
    ],
)
def test_values_have_the_types_of_the_schema(schema, text, value):
    given = {"f": {"properties": {"x": schema}} | COLOR}
    _, [(_, arguments)] = coder(f"<function=f><parameter=x>{text}</parameter></function>", given)
    assert arguments == {"x": value}
    assert type(arguments["x"]) is type(value)


MANY = {str(index): {"anyOf": [{"$ref": f"#/$defs/{other}"} for other in range(30)]} for index in range(30)}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"x": MANY["0"]}, "$defs": MANY},
        {"properties": 3, "$defs": 3},
        {"properties": {"x": {"$ref": 3}}, "$defs": {"3": 3}},
        {"properties": {"x": {"anyOf": [3, None]}}, "$defs": {"x": {}}},
    ],
)
def test_no_schema_costs_the_turn(schema):
    turn, _ = coder("<function=f><parameter=x>1</parameter></function>", {"f": schema})
    assert turn.calls or turn.answer


PIECES = ["<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>", ">", "\n", "x",
          "<think>", "</think>", "add", "{", '"', "\ud800"]  # fmt: skip


@settings(deadline=None)
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=3)))
def test_no_text_raises(pieces):
    for call in coder("".join(pieces))[0].calls:
        json.dumps(dict(call.arguments))


@pytest.mark.parametrize(
    "piece", ["<parameter=", "<parameter=x>", "<function=a>", "</function>", "<tool_call>", "<think>"]
)
def test_long_texts_are_read_in_no_time(piece):
    started_at = time.process_time()
    coder("<tool_call><function=add>" + piece * (20_000 // len(piece)))
    assert time.process_time() - started_at < 15  # cubic time would take over 60 s


def test_vllms_parser_of_gpt_oss_reads_no_text():
    stub = vllm_parsers.ToolParserManager.get_tool_parser("openai")(make_tokenizer().wrapped)
    with pytest.raises(NotImplementedError):
        stub.extract_tool_calls("", None)
    with pytest.raises(SettingsError, match='Use "gpt_oss"'):
        parser_for("vllm:openai", make_tokenizer())


@pytest.mark.parametrize(("begun", "thinking"), [("", "<think>hm"), ("<think>\n", "hm")])
def test_the_gateway_separates_reasoning_that_the_turn_or_its_prompt_begins(begun, thinking):
    tokenizer = make_tokenizer()
    reader = ReplyReader.of(tokenizer, parser_for("qwen3_coder", tokenizer), ())
    after = encode(tokenizer, f"<|im_start|>assistant\n{begun}")
    message = reader.read(encode(tokenizer, f"{thinking}</think>So {CODER}<|im_end|>"), after=after, tools=TOOLS)
    assert (message.reasoning, message.content, [call.name for call in message.calls]) == ("hm", "So", ["add"])


def test_a_stream_gives_the_reasoning_the_text_and_the_call_of_a_turn_at_its_end():
    async def talk():
        options = ServiceOptions(tool_parser="qwen3_coder")
        async with gateway_site(lambda _: f"<think>hm</think>So {CODER}", service=options) as gateway:
            session = gateway.open("p")
            body = {"messages": [{"role": "user", "content": "?"}], "tools": TOOLS, "stream": True}
            async with httpx.AsyncClient(
                base_url=gateway.url, headers={"x-api-key": session.key}, timeout=50
            ) as client:
                answer = await client.post("/v1/chat/completions", json=body)
            events = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if "{" in line]
            deltas = [choice["delta"] for event in events for choice in event["choices"]]
            said = {key: "".join(delta.get(key) or "" for delta in deltas) for key in ("reasoning_content", "content")}
            calls = [call["function"]["name"] for delta in deltas for call in delta.get("tool_calls") or ()]
            assert (said, calls) == ({"reasoning_content": "hm", "content": "So"}, ["add"])
            assert (await asyncio.wait_for(gateway.finish(session), 50)).failure is None

    run(talk)


class Note:
    """A tool that returns its arguments."""

    name, description = "note", "Notes."

    def __init__(self):
        properties = {"text": {"type": "string"}, "number": {"type": "integer"}}
        self.parameters = {"type": "object", "properties": properties}

    async def call(self, arguments):
        return json.dumps(arguments, sort_keys=True)

    def close(self):
        pass


MARKS = (
    *SPECIAL,
    "<|python_tag|>",
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
)
ARGUMENTS = {"text": "a, b", "number": 7}
TURNS = {
    "vllm:llama3_json": json.dumps({"name": "note", "parameters": ARGUMENTS}),
    "vllm:glm45": "<tool_call>note\n<arg_key>text</arg_key>\n<arg_value>a, b</arg_value>\n"
    "<arg_key>number</arg_key>\n<arg_value>7</arg_value>\n</tool_call>",
    "qwen3_coder": "<tool_call>\n<function=note>\n<parameter=text>\na, b\n</parameter>\n"
    "<parameter=number>\n7\n</parameter>\n</function>\n</tool_call>",
}


@pytest.mark.parametrize("before", ["", "<think>Call it.</think>\n"])
@pytest.mark.parametrize("name", TURNS)
def test_the_tools_loop_reads_formats_of_vllm_by_name(name, before):
    tokenizer = make_tokenizer(special=MARKS)
    speaker = Speaker(tokenizer, in_turn(f"{before}{TURNS[name]}<|im_end|>", "Done.<|im_end|>"))
    loop = ToolsLoop(ToolsOptions(parser=name), toolbox=ToolBox([Note()]))
    ((session,),) = (group.sessions for group in run_loop(loop, speaker, [chat_prompt(tokenizer, "?")]))
    assert session.failure is None
    (row,) = session.trajectories
    assert row.extras["tool_calls"] == {"ok": 1}
    assert json.dumps(ARGUMENTS, sort_keys=True) in speaker.heard[-1]


def test_a_name_that_vllm_lacks_is_refused_when_the_tools_loop_starts():
    loop = ToolsLoop(ToolsOptions(parser="vllm:llama33"), toolbox=ToolBox([Note()]))
    with pytest.raises(SettingsError, match="unknown vLLM parser 'llama33'"):
        asyncio.run(loop.check(make_tokenizer()))
