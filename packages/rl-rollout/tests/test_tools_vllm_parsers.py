"""vLLM's parsers: turns as the tools loop and a client of the gateway see them, and refusals."""

import asyncio
import json

import httpx
import pytest
from chat_model import SPECIAL, TOOLS, Speaker, chat_prompt, in_turn, make_tokenizer, run_loop
from gateway_site import gateway_site, run

from rl_core.errors import SettingsError
from rl_rollout.gateway.service import ServiceOptions
from rl_rollout.loops.tools import ToolsLoop, ToolsOptions
from rl_rollout.tools import ToolBox

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
    "vllm:qwen3_coder": "<tool_call>\n<function=note>\n<parameter=text>\na, b\n</parameter>\n"
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
