"""Requests that clients send rarely, and the words in which they are refused."""

import json
import time

import httpx
import numpy as np
import pytest
from chat_model import Speaker, encode, make_tokenizer
from gateway_site import gateway_site, run
from gateway_talk import plain_client, said

from rl_rollout import PromptTokenizer, SamplingParams
from rl_rollout.gateway import Gateway, journal
from rl_rollout.gateway.apis.chat_completions import read_chat_request
from rl_rollout.gateway.apis.responses import read_responses_request
from rl_rollout.gateway.refusals import RefusedError
from rl_rollout.gateway.replies import ReplyReader
from rl_rollout.gateway.sampling import decide
from rl_rollout.gateway.tree import Prefixes
from rl_rollout.loops.turns import ChatTurns

USER = {"role": "user", "content": "1+2?"}


def read(**fields):
    return read_chat_request({"messages": [USER], **fields})


def test_a_stop_string_at_the_start_of_a_reply_is_found_though_the_decoder_drops_its_space():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(["<unk>", "</s>", "\u2581x", "\u2581y", "\u2581A:"])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PromptTokenizer(PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token="<unk>"))
    reader = ReplyReader.of(tokenizer, None, ())
    for ids, content in (([2, 3], ""), ([3, 2], "y")):
        message = reader.read(np.array(ids, np.int32), after=np.array([4], np.int32), stop=" x")
        assert message.content == content


@pytest.mark.parametrize("form", ["chat", "text"])
@pytest.mark.parametrize(
    ("said", "stop", "content"),
    [
        ("1+2=3<|im_end|>", "3<|im_end|>", "1+2="),
        ("1+2=3<|im_end|>", "<|im_end|>", "1+2=3"),
        ("1+2=3<|im_end|>", "=4<|im_end|>", "1+2=3"),
        ("1+2<|im_end|>=3<|im_end|>", "4", "1+2<|im_end|>=3"),
        ("1<|im_start|>2<|im_end|>", "1<|im_start|>", ""),
    ],
)
@pytest.mark.parametrize("step", [1, 100])
def test_a_stop_string_with_a_templates_token_ends_streamed_and_whole_replies_alike(said, stop, content, form, step):
    tokenizer = make_tokenizer()
    reader, after = ReplyReader.of(tokenizer, None, ()), encode(tokenizer, "<|im_start|>assistant\n")
    ids = encode(tokenizer, said)
    (stream,) = reader.streams(1, after=after, tools=(), stop=[stop], form=form)
    pieces = [piece for start in range(0, len(ids), step) for piece in stream.feed(ids[start : start + step].tolist())]
    pieces += stream.feed([], has_ended=True)
    whole = reader.read(ids, after=after, stop=stop if stop in said else None, form=form)
    assert ("".join(text for _, text in pieces), whole.content) == (content, content)


@pytest.mark.parametrize("last", ["<|im_start|>", "<|im_end|>", "3"])
def test_after_a_turn_that_a_templates_token_stopped_the_template_ends_it(last):
    tokenizer = make_tokenizer()
    turns = ChatTurns(tokenizer, role="user")
    (last_token,) = encode(tokenizer, last).tolist()
    (text,) = tokenizer.decode(
        [turns.following_ids([USER], calls=[], last_token=last_token)], skip_special_tokens=False
    )
    end = "" if last == "<|im_end|>" else "<|im_end|>"
    assert text == f"{end}\n<|im_start|>user\n1+2?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("num_writes", [0, 1])
def test_a_session_that_a_full_disk_refused_leaves_no_file(num_writes, tmp_path, monkeypatch):
    left = [num_writes]
    write = journal._write

    def full(*args, **fields):
        if not left[0]:
            raise OSError(28, "No space left on device")
        left[0] -= 1
        return write(*args, **fields)

    async def talk():
        async with gateway_site(lambda _: "3", sessions=tmp_path) as gateway:
            monkeypatch.setattr(journal, "_write", full)
            with pytest.raises(RefusedError, match="No space left"):
                gateway.open("p")
            assert not [*tmp_path.glob("*.open")]

    run(talk)


def test_a_clock_that_jumps_while_no_gateway_runs_ends_no_session(tmp_path, monkeypatch):
    async def talk():
        async with gateway_site(lambda _: "3", sessions=tmp_path) as gateway:
            session = gateway.open("p")
            await said(gateway, session.key, [USER])
            session.opened_at -= 1000
            await said(gateway, session.key, [USER])
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 1e9)
        async with gateway_site(lambda _: "3", sessions=tmp_path) as gateway:
            await said(gateway, session.key, [USER])
            (again,) = gateway.sessions
            assert again.seconds_left == pytest.approx(again.limits.wall_s - 1000, abs=60)

    run(talk)


def test_a_prompt_is_read_once_however_many_samples_there_are():
    prefixes = Prefixes()
    for length in range(1, 500):
        prefixes.add(np.arange(length, dtype=np.int32), length)
    prefixes.add(np.full(600, 3, np.int32), 600)
    assert prefixes.longest(np.arange(600, dtype=np.int32)) == (499, 499)
    assert prefixes.longest(np.array([0, 1, 3], np.int64)) == (2, 2)
    assert prefixes.longest(np.array([3], np.int32)) == (None, 0)
    prefixes.add(np.arange(2, dtype=np.int32), 7)
    assert prefixes.longest(np.array([0, 1, 3], np.int32)) == (7, 2)


@pytest.mark.parametrize("seed", [2**60, -1, -(2**63), 7])
def test_any_seed_of_64_bits_is_taken(seed):
    requested = read(seed=seed).sampling
    sampling, overridden = decide(requested, SamplingParams(max_tokens=1), decided_by="client", room=9)
    assert sampling.seed == seed % 2**52
    assert not overridden


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": True}, "n"),
        ({"n": 0}, "n"),
        ({"seed": 2**64}, "seed"),
        ({"tools": {}}, "tools"),
        ({"functions": [{"name": "add"}]}, "functions"),
        ({"function_call": {"name": "add"}}, "function_call"),
        (
            {"messages": [{"role": "assistant", "function_call": {"name": "add", "arguments": "{}"}}, USER]},
            "messages[0].function_call",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": {}}, USER]}, "messages[0].tool_calls"),
    ],
)
def test_what_looks_like_nothing_but_is_something_is_refused_by_name(fields, param):
    with pytest.raises(RefusedError) as caught:
        read(**fields)
    assert caught.value.param == param


def test_old_fields_without_effect_are_accepted():
    assistant = {"role": "assistant", "content": "3", "function_call": None, "tool_calls": None}
    ask = read(functions=[], function_call="none", n=None, tools=None, messages=[assistant, USER])
    assert (ask.num_choices, ask.tools, ask.messages[0].calls) == (1, (), ())


def test_the_arguments_of_an_item_are_named_where_they_are():
    item = {"type": "function_call", "call_id": "c", "name": "add", "arguments": 3}
    with pytest.raises(RefusedError) as caught:
        read_responses_request({"input": [item]})
    assert caught.value.param == "input[0].arguments"


def test_refusals_name_the_fields_of_their_own_api():
    text = "x" * 400
    asked = {
        "/v1/chat/completions": ({"messages": [{**USER, "content": text}]}, "messages"),
        "/v1/completions": ({"prompt": text}, "prompt"),
        "/v1/responses": ({"input": text}, "input"),
        "/inference/v1/generate": ({"token_ids": [9] * 400}, "token_ids"),
    }

    async def talk():
        async with gateway_site(lambda _: "3", max_model_len=256) as gateway, httpx.AsyncClient() as client:
            headers = {"x-api-key": gateway.open("p").key}
            for stream in (False, True):
                for path, (fields, param) in asked.items():
                    body = {"model": "any", **fields, **({} if "inference" in path else {"stream": stream})}
                    given = await client.post(f"{gateway.url}{path}", json=body, headers=headers)
                    assert (given.status_code, given.json()["error"]["param"]) == (400, param)

    run(talk)


VERSION = {"anthropic-version": "2023-06-01"}


def test_an_unknown_path_is_refused_in_the_words_of_its_api_and_never_shows_a_key():
    async def talk():
        async with gateway_site(lambda _: "3") as gateway, httpx.AsyncClient() as client:
            key = gateway.open("p").key
            split = f"{key[:16]}/{key[16:]}"
            for path in (f"/{key}/v1/nothing", f"/v1/{key}", f"/v1/messages/{gateway.owner_key}", f"/v1/x/{split}"):
                given = await client.get(f"{gateway.url}{path}")
                assert given.status_code == 404
                assert not any(part in given.text for part in (key, key[:16], key[16:], gateway.owner_key))
                assert (given.json().get("type") == "error") == ("messages" in path)

    run(talk)


@pytest.mark.parametrize(
    ("method", "path", "status", "kind", "said"),
    [
        ("GET", "/v1/nothing", 404, "not_found_error", "unknown route"),
        ("GET", "/v1/models", 401, "authentication_error", "key"),
        ("GET", "/v1/messages", 405, "invalid_request_error", "must be POST; found GET"),
        ("POST", "/v1/models", 405, "invalid_request_error", "; found POST"),
    ],
)
def test_refusals_to_anthropics_clients_are_in_its_form(method, path, status, kind, said):
    async def talk():
        async with gateway_site(lambda _: "3") as gateway, httpx.AsyncClient() as client:
            given = await client.request(method, f"{gateway.url}{path}", headers=VERSION)
            assert (given.status_code, given.json()["type"], given.json()["error"]["type"]) == (status, "error", kind)
            assert said in given.json()["error"]["message"]

    run(talk)


ADD = {"type": "function", "name": "add"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *(({"tool_choice": {"type": kind}, "tools": [ADD]}, None) for kind in ("auto", "none", "required")),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}, "tools": [ADD]}, None),
        ({"tools": [{"type": "namespace", "name": "sums", "tools": [ADD]}]}, None),
        ({"tools": [{"type": "namespace", "name": "sums", "description": None, "tools": []}]}, None),
        ({"instructions": [{"type": "input_text", "text": "x"}]}, None),
        ({"instructions": 0}, "instructions"),
        ({"instructions": {}}, "instructions"),
        ({"tools": [{**ADD, "description": 5}]}, "tools[0].description"),
        ({"tools": [{**ADD, "parameters": "x"}]}, "tools[0].parameters"),
        ({"tools": [{**ADD, "strict": "maybe"}]}, "tools[0].strict"),
    ],
)
def test_what_a_response_repeats_of_its_request_is_refused_by_name_or_answered(fields, param):
    async def talk():
        async with gateway_site(lambda _: "3") as gateway, plain_client() as client:
            session = gateway.open("p")
            for stream in (False, True):
                body = {"input": "1+2?", "stream": stream, **fields}
                given = await client.post(f"{gateway.url}/v1/responses", json=body, headers={"x-api-key": session.key})
                if param is not None:
                    assert (given.status_code, given.json()["error"]["param"]) == (400, param)
                    continue
                assert given.status_code == 200, given.text
                last = json.loads(given.text.strip().rpartition("data: ")[2])["response"] if stream else given.json()
                assert {name: last[name] for name in fields} == fields
            assert session.counts["turns"] == (0 if param else 2)
            assert not session.faults

    run(talk)


CALLED = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "add", "input": 3}]}


@pytest.mark.parametrize(
    ("path", "param", "fields"),
    [
        *(("chat/completions", "stop", {"stop": value}) for value in ({}, 0, False)),
        *(("chat/completions", "stream", {"stream": value}) for value in ("false", [], 0.5)),
        *(("chat/completions", "tool_choice", {"tool_choice": value}) for value in (0, [], "", {})),
        ("chat/completions", "stop_token_ids", {"stop_token_ids": {}}),
        ("chat/completions", "logprobs", {"logprobs": "no"}),
        ("chat/completions", "stream_options", {"stream_options": []}),
        ("chat/completions", "response_format", {"response_format": 0}),
        *(("messages", "system", {"system": value}) for value in (0, {}, False)),
        *(("messages", "output_config", {"output_config": value}) for value in ([], "", 0)),
        ("messages", "messages[0].content[0].input", {"messages": [CALLED, USER]}),
        ("messages", "messages", {"messages": [{"role": "user", "content": []}]}),
        *(("chat/completions", "messages[0].role", {"messages": [{"role": value}]}) for value in ([], {}, 0)),
        *(("responses", "text", {"text": value}) for value in ([], "", 0)),
        ("responses", "tools", {"tools": {}}),
        ("completions", "best_of", {"best_of": True}),
        ("completions", "frequency_penalty", {"frequency_penalty": False}),
        ("completions", "echo", {"echo": 0}),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(path, param, fields):
    asked = {
        "chat/completions": {"messages": [USER]},
        "messages": {"messages": [USER], "max_tokens": 9},
        "responses": {"input": "1+2?"},
        "completions": {"prompt": "1+2="},
    }

    async def talk():
        async with gateway_site(lambda _: "3") as gateway, plain_client() as client:
            headers = {"x-api-key": gateway.open("p").key}
            given = await client.post(f"{gateway.url}/v1/{path}", json={**asked[path], **fields}, headers=headers)
            error = given.json()["error"]
            assert (given.status_code, error.get("param", param)) == (400, param)
            assert error["message"].startswith((f"{param} must be ", f"this server does not support {param} = "))

    run(talk)


def test_a_gateway_may_start_before_its_engine():
    tokenizer = make_tokenizer()
    engine = Speaker(tokenizer, lambda _: "3<|im_end|>").engine

    async def talk():
        gateway = Gateway(engine, tokenizer, sampling=SamplingParams(max_tokens=9))
        await gateway.start()
        await engine.start()
        async with plain_client() as client:
            headers = {"x-api-key": gateway.open("p").key}
            given = await client.post(f"{gateway.url}/v1/chat/completions", json={"messages": [USER]}, headers=headers)
            assert given.json()["choices"][0]["message"]["content"] == "3"
        await gateway.close()
        await engine.close()

    run(talk)


@pytest.mark.parametrize("kind", ["allowed_tools", "namespace"])
def test_a_tool_choice_of_an_unsupported_kind_is_refused_with_what_to_do(kind):
    with pytest.raises(RefusedError, match=rf"to restrict the calls, list only those tools in `tools`; found '{kind}'"):
        read(tool_choice={"mode": "auto", "tools": [], "type": kind}, tools=[])


def test_token_prompts_are_refused_under_their_own_name():
    async def talk():
        async with gateway_site(lambda _: "3") as gateway, plain_client() as client:
            for ids in ([], None, "text", 3):
                headers = {"x-api-key": gateway.open("p").key}
                url = f"{gateway.url}/inference/v1/generate"
                given = await client.post(url, json={"token_ids": ids, "sampling_params": {}}, headers=headers)
                assert (given.status_code, given.json()["error"]["param"]) == (400, "token_ids")

    run(talk)


def test_tools_are_shown_in_the_order_of_their_own_keys():
    tools = [
        {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": keys}}}
        for keys in ({"x": {}, "y": {}}, {"y": {}, "x": {}})
    ]
    template = (
        "{{ tools | tojson }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )

    async def talk():
        async with gateway_site(lambda _: "3", template=template) as gateway, plain_client() as client:
            heard = []
            for tool in tools:
                session = gateway.open("p")
                body = {"messages": [{"role": "user", "content": "1+2?"}], "tools": [tool]}
                url = f"{gateway.url}/v1/chat/completions"
                given = await client.post(url, json=body, headers={"x-api-key": session.key})
                assert given.status_code == 200, given.text
                heard.append(session.tree.samples[0].asked_digest)
            assert heard[0] != heard[1]

    run(talk)
