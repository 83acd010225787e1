"""Agents that edit their history, over HTTP: trajectories are true forks, and trained tokens are the sampled ones.

The oracle is the engine, which records the input and output of each request independently of the gateway's tree.
"""

import asyncio
import json
import random

import httpx
import numpy as np
import pytest
from chat_model import CHATML, THINKING, TOOLS, encode, make_tokenizer
from gateway_site import gateway_site
from gateway_site import run as run_within

from rl_rollout.engines.protocol import EngineTraits
from rl_rollout.engines.scripted import ScriptedEngine
from rl_rollout.gateway.service import ServiceOptions

SYSTEM = {"role": "system", "content": "You are an agent."}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


def user(text):
    return {"role": "user", "content": text}


class Agent:
    """A client of one session, and an engine that returns the texts that the client chooses."""

    def __init__(self):
        self.tokenizer = make_tokenizer()
        self.calls = []
        self._texts = []
        traits = EngineTraits(name="recorder", max_model_len=1 << 16, vocab_size=1 << 20)
        self.engine = ScriptedEngine(self._say, end_token_ids=[self.tokenizer.eos_token_id], traits=traits)

    def _say(self, request, _index):
        ids = encode(self.tokenizer, f"{self._texts.pop(0)}<|im_end|>").tolist()
        self.calls.append((request.input_ids.tolist(), ids))
        return ids

    async def ask(self, messages, *texts, trains=True, stream=False):
        """Make the engine return texts, one per choice; return the messages that the client receives."""
        self._texts = list(texts)
        body = {"model": "any", "messages": messages, "tools": TOOLS, "n": len(texts), "stream": stream}
        headers = {"authorization": f"Bearer {self.session.key}", "x-rl-train": str(trains)}
        answer = await self.http.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        if not stream:
            return [choice["message"] for choice in answer.json()["choices"]]
        messages = [{"role": "assistant", "content": ""} for _ in texts]
        for line in answer.text.splitlines():
            for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else []:
                message, delta = messages[choice["index"]], choice["delta"]
                message["content"] += delta.get("content") or ""
                message.setdefault("tool_calls", []).extend(delta.get("tool_calls") or [])
        return messages

    def trained(self, rows):
        """Return each trajectory's trained texts; check that each was sampled once, in the same context."""
        texts, left = [], list(self.calls)
        for row in rows:
            edges = np.flatnonzero(np.diff(np.concatenate([[0], row.loss_mask.astype(int), [0]]))).reshape(-1, 2)
            ids, said = row.input_ids.tolist(), []
            for start, stop in edges.tolist():
                left.remove((ids[:start], ids[start:stop]))
                said.append(ids[start : stop - 1])
            texts.append(self.tokenizer.decode(said, skip_special_tokens=False))
        return texts


def play(scene, *, template=CHATML, reasoning="keep"):
    """Play a scene; return the trained texts, the trajectories and the session's counts."""

    async def talk():
        agent = Agent()
        service = ServiceOptions(reasoning=reasoning)
        async with (
            gateway_site(None, engine=agent.engine, template=template, service=service) as gateway,
            httpx.AsyncClient(base_url=gateway.url, timeout=50) as agent.http,
        ):
            agent.session = gateway.open("p")
            await scene(agent)
            agent.session.set_reward(1.0)
            result = await gateway.finish(agent.session)
            assert result.failure is None
            return agent.trained(result.trajectories), result.trajectories, agent.session.counts

    return asyncio.run(asyncio.wait_for(talk(), 120))


@pytest.mark.parametrize("template", [CHATML, THINKING])
def test_reasoning_that_template_and_client_drop_stays_in_one_trajectory(template):
    async def scene(agent):
        history = [user("1+2?")]
        for text, content, following in (
            ("<think>one, two</think>3", "3", "sure?"),
            ("<think>hm</think>yes", "yes", "really?"),
        ):
            await agent.ask(history, text)
            history += [{"role": "assistant", "content": content}, user(following)]
        await agent.ask(history, "really")

    trained, _, counts = play(scene, template=template)
    assert trained == [["<think>one, two</think>3", "<think>hm</think>yes", "really"]]
    assert (counts["roots_first"], counts["forks"]) == (1, 0)


def test_reasoning_that_is_not_kept_makes_a_trajectory_of_each_turn_that_thought():
    async def scene(agent):
        history = [user("1+2?")]
        (reply,) = await agent.ask(history, "<think>one, two</think>3")
        assert reply["reasoning_content"] == "one, two"
        await agent.ask([*history, reply, user("sure?")], "yes")

    trained, rows, counts = play(scene, template=THINKING, reasoning="drop")
    assert trained == [["<think>one, two</think>3"], ["yes"]]
    assert [row.parent for row in rows] == [None, 0]
    assert counts["forks"] == 0


def test_a_compaction_is_a_root_and_what_was_compacted_still_trains():
    async def scene(agent):
        history = [SYSTEM, user("a")]
        history += [*await agent.ask(history, "A"), user("b")]
        history += [*await agent.ask(history, "B"), user("summarize")]
        (summary,) = await agent.ask(history, "A, B")
        history = [SYSTEM, user(f"So far: {summary['content']}")]
        history += [*await agent.ask(history, "C"), user("d")]
        await agent.ask(history, "D")

    trained, rows, counts = play(scene)
    assert trained == [["A", "B", "A, B"], ["C", "D"]]
    assert [row.parent for row in rows] == [None, None]
    assert (counts["roots_first"], counts["roots_user"], counts["forks"]) == (1, 1, 0)


def test_a_subagent_is_a_trajectory_and_the_conversation_that_called_it_goes_on():
    async def scene(agent):
        history = [SYSTEM, user("a")]
        (reply,) = await agent.ask(history, CALL)
        subagent = [{"role": "system", "content": "You are a subagent."}, user("1+2?")]
        subagent += [*await agent.ask(subagent, "perhaps 3"), user("sure?")]
        (answer,) = await agent.ask(subagent, "3")
        result = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": answer["content"]}
        await agent.ask([*history, reply, result], "It is 3.", stream=True)

    trained, rows, counts = play(scene)
    assert trained == [["perhaps 3", "3"], [CALL, "It is 3."]]  # in order of their ends
    assert [row.parent for row in rows] == [None, None]
    assert (counts["roots_first"], counts["roots_system"], counts["forks"]) == (1, 1, 0)


def test_an_edited_message_forks_and_what_is_shared_trains_once():
    async def scene(agent):
        history = [user("a")]
        history += [*await agent.ask(history, "A"), user("b")]
        (reply,) = await agent.ask(history, "B")
        await agent.ask([*history, reply, user("c")], "C")
        await agent.ask([*history[:-1], user("b, edited")], "D")

    trained, rows, counts = play(scene)
    assert trained == [["A", "B", "C"], ["D"]]
    assert [row.parent for row in rows] == [None, 0]
    assert (counts["forks"], counts["roots_first"]) == (1, 1)


def test_a_request_that_comes_again_after_its_answer_trains_the_answer_that_was_used():
    async def scene(agent):
        history = [user("a")]
        (first,) = await agent.ask(history, "A")
        await agent.ask(history, "A again", stream=True)
        history += [first, user("b")]
        await agent.ask(history, "B")
        await agent.ask(history, "B again")

    trained, _, counts = play(scene)
    assert trained == [["A", "B again"]]
    assert (counts["repeated"], counts["forks"]) == (2, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_of_several_choices_the_one_trains_that_the_agent_went_on_from(stream):
    async def scene(agent):
        history = [user("a")]
        choices = await agent.ask(history, "A0", "A1", "A2", stream=stream)
        await agent.ask([*history, choices[1], user("b")], "B", stream=stream)

    trained, _, counts = play(scene)
    assert trained == [["A1", "B"]]
    assert counts["sampled_tokens"] == 11


class Steps:
    """A random agent, and the texts that its requests should train; all texts differ."""

    def __init__(self, random):
        self.random = random
        self.histories = [[SYSTEM, user("a")]]
        self.asked = []

    async def step(self, agent, number):
        """Continue, repeat, edit or compact a history, drop its reasoning, or call a subagent, with 1 or 2 choices."""
        history = list(self.random.choice(self.histories[-3:] + self.histories))
        change = self.random.choice(["none"] * 6 + ["again", "edit", "compact", "subagent", "forget"])
        if change == "again" and self.asked:
            history = self.random.choice(self.asked)[0]
        elif change == "edit":
            place = self.random.randrange(len(history))
            history[place] = {"role": history[place]["role"], "content": f"edited {number}"}
            if history[place]["role"] == "assistant":  # drops the results of its calls too
                history = [*history[: place + 1], user("and?")]
            elif history[place]["role"] == "tool":
                history[place] = {**history[place], "tool_call_id": "lost"}
        elif change == "compact":
            history = [SYSTEM, user(f"so far {number}")]
        elif change == "subagent":
            history = [{"role": "system", "content": f"subagent {number}"}, user("a")]
        elif change == "forget":
            history = [{key: one[key] for key in one if key != "reasoning_content"} for one in history]
        texts = [
            f"{self.random.choice(['', '<think>t</think>'])}{number}.{index}{self.random.choice(['', CALL])}"
            for index in range(self.random.choice([1, 1, 1, 2]))
        ]
        trains, stream = self.random.choice([True] * 7 + [False]), self.random.choice([True, False])
        replies = await agent.ask(history, *texts, trains=trains, stream=stream)
        self.asked.append((history, replies, texts, trains))
        for reply in replies:
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in reply.get("tool_calls") or []
            ]
            self.histories.append([*history, reply, *(results or [user(f"u{self.random.randrange(2)}")])])

    def ought_to_train(self):
        """Return the expected texts: each request's continued answers, or the first answer of its last attempt."""
        asked: dict[str, list[tuple[str, str]]] = {}
        for history, replies, texts, trains in self.asked:
            if trains:
                answers = [(_said([*history, reply]), text) for reply, text in zip(replies, texts, strict=True)]
                asked.setdefault(_said(history), []).append(answers)
        chosen = []
        for requests in asked.values():
            answers = [answer for request in requests for answer in request]
            used = [text for said, text in answers if any(_said(one[0]).startswith(said) for one in self.asked)]
            chosen += used or [requests[-1][0][1]]
        return sorted(chosen)


def _said(messages):
    """Return a text that is equal for equal conversations."""
    calls = [[call["function"] for call in one.get("tool_calls") or []] for one in messages]
    return "".join(
        json.dumps([one["role"], one.get("content") or "", its]) for one, its in zip(messages, calls, strict=True)
    )


def play_at_random(seed, *, most_steps):
    steps = Steps(random.Random(seed))

    async def scene(agent):
        for number in range(steps.random.randint(4, most_steps)):
            await steps.step(agent, number)
        last = [user("last")]
        steps.asked.append((last, await agent.ask(last, "last"), ["last"], True))

    trained, rows, _ = play(scene, reasoning=steps.random.choice(["keep", "drop"]))
    assert sorted(text for texts in trained for text in texts) == steps.ought_to_train()
    assert all(row.parent is None or row.parent < row.output_index for row in rows)


@pytest.mark.parametrize("number", range(12))
def test_whatever_a_client_does_what_it_used_trains_once_in_its_context(number, seed):
    play_at_random(f"{seed}/{number}", most_steps=10)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(200))
def test_whatever_a_client_does_for_long_what_it_used_trains_once_in_its_context(number, seed):
    play_at_random(f"{seed}/{number}", most_steps=40)


SHORT = (
    "{%% for m in messages %%}{{ m.content }}<|im_end|>{%% endfor %%}{%% if add_generation_prompt %%}%s{%% endif %%}"
)
STREAMED = ("reasoning_content", "content")
INST = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<|im_end|>"
    "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)
BY_QUESTION = "{% if 'thoughts' in messages[0].content %}<think>{% endif %}"


@pytest.mark.parametrize(
    ("asking", "question", "said", "read"),
    [
        ("<|im_start|>", "<think>", "3", ("", "3")),
        ("<|im_start|>", "</think><think>", "<think>hm</think>3", ("hm", "3")),
        ("<|im_start|><think>", "</think>", "hm</think>3", ("hm", "3")),
        ("<|im_start|><think></think>", "<think>", "3", ("", "3")),
        ("A:", "<think>", "3", ("", "3")),
        (f"<|im_start|>{BY_QUESTION}", "<think>", "3", ("", "3")),
        (f"<|im_start|>{BY_QUESTION}", "thoughts", "hm</think>3", ("hm", "3")),
        (None, "use <think>", "3", ("", "3")),
    ],
)
def test_only_the_templates_generation_prompt_opens_the_reasoning(asking, question, said, read):
    asked = [{"role": "system", "content": question}, user(question)]
    bodies = {
        "chat/completions": {"messages": asked},
        "messages": {"messages": asked[1:], "system": question, "max_tokens": 1500},
        "responses": {"input": asked},
    }

    async def talk():
        async with (
            gateway_site(lambda _: said, template=INST if asking is None else SHORT % asking) as gateway,
            httpx.AsyncClient(base_url=f"{gateway.url}/v1/") as client,
        ):
            for path, fields in bodies.items():
                for stream in (False, True):
                    session = gateway.open("p")
                    headers = {"x-api-key": session.key}
                    body = {"model": "any", **fields, "stream": stream}
                    given = await client.post(path, json=body, headers=headers)
                    assert given.status_code == 200, given.text
                    message = session.tree.samples[0].message
                    assert (message.reasoning, message.content) == read
                    if stream and path == "chat/completions":
                        lines = given.text.splitlines()
                        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
                        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
                        streamed = ["".join(one.get(name, "") for one in deltas) for name in STREAMED]
                        assert tuple(streamed) == read

    run_within(talk)
