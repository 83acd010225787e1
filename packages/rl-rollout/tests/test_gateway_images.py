"""Images that agents send with the SDKs: their tokens, branches, files, and what is refused."""

import base64
import io
import json
import zlib
from dataclasses import replace

import anthropic
import numpy as np
import openai
import pytest
from gateway_site import run
from PIL import Image

from rl_rollout import PromptOptions, PromptTokenizer, RewardScorer, Rollout, SamplingParams, load_prompts
from rl_rollout.audit import audit_images
from rl_rollout.engines.images import EngineImages
from rl_rollout.engines.protocol import EngineTraits
from rl_rollout.engines.scripted import ScriptedEngine
from rl_rollout.gateway.exports import export_sessions
from rl_rollout.gateway.server import Gateway, GatewayOptions
from rl_rollout.loops.agent import AgentsLoop
from rl_rollout.loops.agent_options import AgentOptions

END, PAD = 2, 5
CALL = '<tool_call>{"name": "zoom", "arguments": {}}</tool_call>'
CHAT_TOOL = {"type": "function", "function": {"name": "zoom", "description": "Zooms.", "parameters": {}}}


def picture(seed, *, width=84, height=56, form="PNG"):
    encoded = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(encoded, form)
    return base64.b64encode(encoded.getvalue()).decode()


def url(data):
    return f"data:image/png;base64,{data}"


def chat_image(data):
    return {"type": "image_url", "image_url": {"url": url(data), "detail": "low"}}


def block(data):
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


class SeeingEngine(ScriptedEngine):
    """Says its turns one after the other, and reports the pixel values of each request's images."""

    def __init__(self, tokenizer, *turns, max_images=4):
        said = [[*ids, END] for ids in tokenizer.encode(turns, add_special_tokens=False)]
        super().__init__(
            lambda _request, _index: said[min(len(self.requests), len(said)) - 1],
            end_token_ids=[END],
            traits=EngineTraits(name="seeing", max_model_len=4096, vocab_size=300, max_images=max_images),
        )
        self.images = EngineImages(tokenizer.images.processor, tokenizer.images.store)

    async def generate(self, request):
        _, digest = self.images.placed(request.input_ids, request.images)
        return [replace(one, pixel_digest=digest) for one in await super().generate(request)]


class Site:
    """A gateway with a policy that sees images, and both SDKs."""

    def __init__(self, folder, tmp_path, *turns, **options):
        self.tokenizer = PromptTokenizer.load(folder, image_folder=tmp_path / "images")
        self.engine = SeeingEngine(self.tokenizer, *turns, **options)
        self.sessions = tmp_path / "sessions"

    async def __aenter__(self):
        await self.engine.start()
        self.gateway = Gateway(
            self.engine,
            self.tokenizer,
            GatewayOptions(sessions=self.sessions),
            sampling=SamplingParams(max_tokens=500),
        )
        await self.gateway.start()
        return self

    async def __aexit__(self, *_):
        await self.gateway.close()

    def openai(self, session):
        return openai.AsyncOpenAI(base_url=f"{self.gateway.url}/v1", api_key=session.key, max_retries=0)

    def anthropic(self, session):
        return anthropic.AsyncAnthropic(base_url=self.gateway.url, api_key=session.key, max_retries=0)

    async def trained(self, session):
        """Finish and audit the session, also its images; return its trajectories."""
        session.set_reward(1.0)
        result = await self.gateway.finish(session)
        assert result.failure is None
        for row in result.trajectories:
            audit_images(row, session.tree.spans(), self.engine.images)
        return result.trajectories


def places(row):
    """Each image of a trajectory: its digest and its tokens, which are all of the trajectory's placeholders."""
    is_seen = np.zeros(len(row.input_ids), dtype=bool)
    for one in row.images:
        is_seen[one.start : one.start + one.length] = True
    np.testing.assert_array_equal(is_seen, row.input_ids == PAD)
    return [(one.digest, one.length) for one in row.images]


@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
def test_images_of_users_and_tools_stay_through_all_turns(vision_folder, tmp_path, api):
    first, second, third = picture(1), picture(2), picture(3, height=112, form="JPEG")

    async def chat(client):
        messages = [{"role": "user", "content": [chat_image(first), {"type": "text", "text": "<|image_pad|>Or?"}]}]
        for index in range(3):
            answer = await client.chat.completions.create(model="any", messages=messages, tools=[CHAT_TOOL])
            messages.append(answer.choices[0].message.model_dump(exclude_none=True))
            for call in answer.choices[0].message.tool_calls or ():
                content = [{"type": "text", "text": "Closer:"}, chat_image((second, third)[index])]
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})

    async def claude(client):
        tool = {"name": "zoom", "description": "Zooms.", "input_schema": {}}
        messages = [{"role": "user", "content": [block(first), {"type": "text", "text": "<|image_pad|>Or?"}]}]
        for index in range(3):
            fields = {"model": "any", "messages": messages, "tools": [tool]}
            answer = await client.messages.create(max_tokens=500, **fields)
            counted = await client.messages.count_tokens(**fields)
            assert counted.input_tokens > 30
            messages.append({"role": "assistant", "content": answer.content})
            calls = [one for one in answer.content if one.type == "tool_use"]
            for call in calls:
                content = [{"type": "text", "text": "Closer:"}, block((second, third)[index])]
                given = {"type": "tool_result", "tool_use_id": call.id, "content": content, "is_error": index == 1}
                messages.append({"role": "user", "content": [given]})

    async def responses(client):
        tool = {"type": "function", "name": "zoom", "description": "Zooms.", "parameters": {}}
        image = {"type": "input_image", "image_url": url(first), "detail": "auto"}
        items = [{"role": "user", "content": [image, {"type": "input_text", "text": "<|image_pad|>Or?"}]}]
        for index in range(3):
            answer = await client.responses.create(model="any", input=items, tools=[tool])
            items += [one.model_dump(exclude_none=True) for one in answer.output]
            for call in (one for one in answer.output if one.type == "function_call"):
                image = {"type": "input_image", "image_url": url((second, third)[index])}
                output = [{"type": "input_text", "text": "Closer:"}, image]
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})

    async def talk():
        async with Site(vision_folder, tmp_path, f"Look. {CALL}", f"Again. {CALL}", "It is 1.") as site:
            session = site.gateway.open("p")
            client = site.anthropic(session) if api == "messages" else site.openai(session)
            async with client:
                await {"chat": chat, "messages": claude, "responses": responses}[api](client)
            (row,) = await site.trained(session)
            digests = [site.tokenizer.images.store.put(base64.b64decode(one)) for one in (first, second, third)]
            assert places(row) == list(zip(digests, (6, 6, 12), strict=True))
            assert [len(request.images) for request in site.engine.requests] == [1, 2, 3]
            (text,) = site.tokenizer.decode([row.input_ids], skip_special_tokens=False)
            assert "<|vision_end|>< |image_pad|>Or?" in text
            assert text.count("Closer:<|vision_start|>") == 2
            assert text.count("Error: Closer:") == (api == "messages")

    run(talk)


def test_branches_keep_their_images_in_the_journal_and_in_exports(vision_folder, tmp_path):
    shared, one, other = picture(1), picture(2), picture(3)

    async def talk():
        async with Site(vision_folder, tmp_path, "A.", "B.", "C.") as site:
            session = site.gateway.open("p")
            opening = [{"role": "user", "content": [chat_image(shared)]}, {"role": "assistant", "content": "A."}]
            async with site.openai(session) as client:
                for messages in (
                    opening[:1],
                    *([*opening, {"role": "user", "content": [chat_image(x)]}] for x in (one, other)),
                ):
                    await client.chat.completions.create(model="any", messages=messages)
            key, session_id = session.key, session.session_id
        async with Site(vision_folder, tmp_path, "D.") as site:
            session = site.gateway.sessions.by_key(key)
            async with site.openai(replace(session, key=key)) as client:
                asked = [*opening, {"role": "user", "content": [chat_image(other)]}]
                asked += [{"role": "assistant", "content": "C."}, {"role": "user", "content": "And?"}]
                await client.chat.completions.create(model="any", messages=asked)
            assert (session.counts["forks"], session.counts["roots_first"]) == (1, 1)
            rows = await site.trained(session)
            digests = [site.tokenizer.images.store.put(base64.b64decode(each)) for each in (shared, one, other)]
            assert [[digest for digest, _ in places(row)] for row in rows] == [digests[:2], digests[::2]]
        assert export_sessions(site.sessions, tmp_path / "rows.jsonl")[0] == {"sessions": 1, "trajectories": 2}
        export_sessions(site.sessions, tmp_path / "rows.parquet")
        written = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
        spans = [[[one.digest, one.start, one.length] for one in row.images] for row in rows]
        assert [row["images"] for row in written] == spans
        assert [row["session"] for row in written] == [session_id] * 2

    run(talk)


def test_an_agent_gets_the_images_of_its_prompt_and_sends_them(vision_folder, tmp_path):
    (tmp_path / "agent.py").write_text(
        "import openai\n"
        "async def agent(task):\n"
        "    async with openai.AsyncOpenAI(base_url=f'{task.base_url}/v1', api_key=task.api_key) as client:\n"
        "        await client.chat.completions.create(model='any', messages=task.prompt.messages)\n"
        "        assert task.text == 'Look: this?' and 'image/jpeg' in str(task.shown(()))\n"
    )
    images = [base64.b64decode(picture(seed, form="JPEG")) for seed in range(2)]
    content = [
        {"type": "text", "text": "Look: "},
        {"type": "image"},
        {"type": "image"},
        {"type": "text", "text": "this?"},
    ]
    row = {"prompt": [{"role": "user", "content": content}], "answer": "1"}
    row["images"] = [url(base64.b64encode(one).decode()) for one in images]
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    tokenizer = PromptTokenizer.load(vision_folder, image_folder=tmp_path / "images")
    prompts = load_prompts([tmp_path / "rows.jsonl"], tokenizer, PromptOptions(max_tokens=200))
    prompts.keep_images(tokenizer.images.store)

    async def talk():
        engine = SeeingEngine(tokenizer, "It is 1.")
        await engine.start()
        loop = AgentsLoop(AgentOptions(function=f"{tmp_path / 'agent.py'}:agent"))
        scorer = RewardScorer(lambda given: 1.0)
        rollout = Rollout(engine, loop, scorer=scorer, decode=tokenizer.decode, tokenizer=tokenizer)
        try:
            (group,) = await rollout.run([prompts[0]], num_sessions=2, sampling=SamplingParams(max_tokens=50))
        finally:
            rollout.close()
        assert (group.failures, group.num_audited) == ((), 2)
        for row in group.trajectories:
            assert row.images == prompts[0].images
            assert row.input_ids[: row.num_prompt_tokens].tolist() == prompts[0].input_ids.tolist()

    run(talk)


def bomb():
    """A small PNG of 9,000 x 9,000 pixels."""
    image = io.BytesIO()
    Image.new("1", (8, 8)).save(image, "PNG")
    head = bytearray(image.getvalue())
    head[16:24] = (9_000).to_bytes(4, "big") * 2
    head[29:33] = zlib.crc32(head[12:29]).to_bytes(4, "big")
    return base64.b64encode(head).decode()


TORN = base64.b64encode(base64.b64decode(picture(1, width=300, height=300))[:-20_000]).decode()
WEB = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
HOSTILE = [
    (WEB, ".image_url.url", "nothing is fetched"),
    ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, ".image_url.url", "nothing is fetched"),
    ({"type": "image_url", "image_url": {"url": 7}}, ".image_url.url", "nothing is fetched"),
    ({"type": "image_url"}, ".image_url", "nothing is fetched"),
    ({"type": "image", "digest": "0" * 64}, ".source", 'of type "base64"'),
    ({"type": "image", "source": {"type": "url", "url": "http://localhost/a"}}, ".source", "nothing is fetched"),
    (chat_image("%%%"), ".image_url.url", "must be base64"),
    (chat_image("é"), ".image_url.url", "must be base64"),
    (chat_image(""), ".image_url.url", "cannot be decoded"),
    (chat_image(bomb()), ".image_url.url", "67108864 pixels; it has 9000 x 9000"),
    (chat_image(picture(1, width=1, height=400)), ".image_url.url", "refuses an image of 1 x 400 pixels"),
    (chat_image(TORN), ".image_url.url", "cannot be decoded"),
    (chat_image(base64.b64encode(b"%PDF-1.7 a document").decode()), ".image_url.url", "expected one of PNG"),
    (block(base64.b64encode(b"<svg/>").decode()), ".source.data", "expected one of PNG"),
]


def test_hostile_images_are_refused_by_field_and_other_sessions_continue(vision_folder, tmp_path):
    async def talk():
        async with Site(vision_folder, tmp_path, "A.", "B.") as site:
            session, other = site.gateway.open("p"), site.gateway.open("q")
            text = {"type": "text", "text": "Look:"}
            async with site.openai(session) as client, site.openai(other) as beside:
                for part, field, reason in HOSTILE:
                    messages = [{"role": "user", "content": [text, part]}]
                    with pytest.raises(openai.BadRequestError, match=reason) as refused:
                        await client.chat.completions.create(model="any", messages=messages)
                    assert refused.value.param == f"messages[0].content[1]{field}"
                many = [{"role": "user", "content": [chat_image(picture(1))] * 5}]
                with pytest.raises(openai.BadRequestError, match="5 images; this server accepts at most 4") as refused:
                    await client.chat.completions.create(model="any", messages=many)
                assert refused.value.param == "messages[0].content[4]"
                for role in ("system", "assistant"):
                    messages = [
                        {"role": role, "content": [chat_image(picture(1))]},
                        *many[:0],
                        {"role": "user", "content": "?"},
                    ]
                    with pytest.raises(openai.BadRequestError, match="only messages of users and tools"):
                        await client.chat.completions.create(model="any", messages=messages)
                huge = [{"role": "user", "content": [chat_image("A" * (17 << 20))]}]
                with pytest.raises((openai.APIStatusError, openai.APIConnectionError), match=r"413|large|[Cc]onn"):
                    await client.chat.completions.create(model="any", messages=huge)
                seen = [{"role": "user", "content": [chat_image(picture(2))]}]
                await beside.chat.completions.create(model="any", messages=seen)
                await client.chat.completions.create(model="any", messages=seen)
            for each in (session, other):
                (row,) = await site.trained(each)
                assert len(places(row)) == 1
        assert len([file for file in (tmp_path / "images").rglob("*") if file.is_file()]) == 2

    run(talk)


def test_a_session_that_floods_the_store_is_refused(vision_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("rl_rollout.gateway.images.MAX_SESSION_BYTES", 20_000)

    async def talk():
        async with Site(vision_folder, tmp_path, "A.") as site:
            session = site.gateway.open("p")
            async with site.openai(session) as client:
                for seed in (1, 1, 2):  # each of 14 kB, and the second time it is known
                    messages = [{"role": "user", "content": [chat_image(picture(seed))]}]
                    ask = client.chat.completions.create(model="any", messages=messages)
                    if seed == 1:
                        await ask
                    else:
                        with pytest.raises(openai.BadRequestError, match="more than 20000"):
                            await ask

    run(talk)


@pytest.mark.parametrize("max_images", [0, 4])
def test_a_gateway_without_images_refuses_them(vision_folder, tmp_path, max_images):
    async def talk():
        site = Site(vision_folder, tmp_path, "A.", max_images=max_images)
        if max_images:
            site.tokenizer = PromptTokenizer.load(vision_folder)
        async with site:
            async with site.openai(site.gateway.open("p")) as client:
                messages = [{"role": "user", "content": [chat_image(picture(1))]}]
                with pytest.raises(openai.BadRequestError, match="this policy supports only text"):
                    await client.chat.completions.create(model="any", messages=messages)
            async with site.anthropic(site.gateway.open("p")) as client:
                messages = [{"role": "user", "content": [block(picture(1))]}]
                with pytest.raises(anthropic.BadRequestError, match="text, thinking, tool_use or tool_result"):
                    await client.messages.create(model="any", max_tokens=9, messages=messages)

    run(talk)
