"""The adapter with a small stand-in for verifiers 0.4's public interface; see docs/guides/agent-loops.md."""

import asyncio
import contextlib
import itertools
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("starlette")

import httpx
from chat_model import Speaker, encode, make_tokenizer, run_loop
from gateway_site import gateway_site

from rl_core.data.records import Prompt
from rl_core.errors import EngineError, MissingExtraError, SettingsError
from rl_rollout import SamplingParams, resolve_loop
from rl_rollout.audit import SampledSpan
from rl_rollout.loops.verifiers import columns_of

END = "<|im_end|>"
TOKENIZER = make_tokenizer()


class StandIn:
    """Plays the scenario that its task names, with the engine's tokens, like an environment of verifiers."""

    def __init__(self, config):
        self.num_serving = 0
        self.taskset = SimpleNamespace(take=lambda count: config.tasks[:count])

    @contextlib.asynccontextmanager
    async def serving(self):
        self.num_serving += 1
        try:
            yield
        finally:
            self.num_serving -= 1

    async def run_episode(self, task, model):
        try:
            branches = await self.play(task, model)
        except (ValueError, KeyError) as error:
            wrong = SimpleNamespace(type=type(error).__name__, message=str(error))
            return SimpleNamespace(ok=False, errors=[wrong], traces=[])
        trace = SimpleNamespace(
            agent=SimpleNamespace(trainable=True),
            branches=branches,
            rewards={"right": SimpleNamespace(value=0.5), "unscored": None},
            metrics={"turns": 2.0, "none": None},
            reward=0.75,
            is_truncated=False,
            stop_condition="agent_completed",
            num_turns=2,
            timing=SimpleNamespace(scoring=SimpleNamespace(duration=0.001)),
        )
        return SimpleNamespace(ok=True, errors=[], traces=[trace])

    async def play(self, task, model):
        ids = encode(TOKENIZER, f"<|im_start|>user\n{task}{END}<|im_start|>assistant\n").tolist()
        mask = [False] * len(ids)
        async with httpx.AsyncClient(timeout=50, verify=False) as http:  # skips loading certificates
            for turn in range(2):
                said = await self.generate(http, model, ids)
                ids, mask = [*ids, *said], [*mask, *[True] * len(said)]
                if turn == 0:
                    reply = encode(TOKENIZER, "<|im_start|>user\nMore.<|im_start|>assistant\n").tolist()
                    ids, mask = [*ids, *reply], [*mask, *[False] * len(reply)]
                    first = len(ids)
            if task == "branches":
                other = [*ids[:first], *(said := await self.generate(http, model, ids[:first]))]
                return [branch(ids, mask), branch(other, [*mask[:first], *[True] * len(said)])]
        if task == "drift":
            ids[-2] += 1
        if task == "hang":
            await asyncio.Event().wait()
        return [branch(ids, mask), branch(ids, mask, trainable=False)]

    async def generate(self, http, model, ids):
        root = model.client.base_url.removesuffix("/v1")
        (card,) = (await http.get(f"{root}/v1/models")).json()["data"]
        assert card["id"] == model.model
        body = {
            "model": model.model,
            "token_ids": ids,
            "sampling_params": {"max_tokens": 40, "stop_token_ids": [3], "logprobs": 1},
        }
        answer = await http.post(f"{root}/inference/v1/generate", json=body)
        if answer.status_code != 200:
            raise ValueError("the provider answered an error")
        (choice,) = answer.json()["choices"]
        assert [entry["token"] for entry in choice["logprobs"]["content"]] == [
            f"token_id:{token}" for token in choice["token_ids"]
        ]
        return choice["token_ids"]


def test_a_session_is_served_only_to_who_has_its_url():
    async def statuses():
        async with (
            gateway_site(lambda _: "3") as gateway,
            httpx.AsyncClient(base_url=gateway.url) as http,
        ):
            session, other = gateway.open("p"), gateway.open("p", 1)
            asked = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 9, "skip_special_tokens": False}}
            for key in (session.session_id, session.key[:-1], "\u00e9", gateway.owner_key):
                for given in (
                    await http.get(f"/{key}/v1/models"),
                    await http.post(f"/{key}/inference/v1/generate", json=asked),
                ):
                    assert given.status_code == 401
            given = await http.post(f"/{session.key}/inference/v1/generate", json=asked)
            assert (given.status_code, len(given.json()["choices"][0]["token_ids"])) == (200, 2)
            for wrong in (
                {"token_ids": "5"},
                {**asked, "stream": True},
                {**asked, "sampling_params": {"stop_token_ids": 5}},
            ):
                given = await http.post(f"/{session.key}/inference/v1/generate", json=wrong)
                assert given.status_code == 400
            assert not other.tree.samples
            await gateway.finish(session)
            assert (await http.get(f"/{session.key}/v1/models")).status_code == 401

    asyncio.run(statuses())


def branch(ids, mask, *, trainable=True):
    return SimpleNamespace(token_ids=ids, sampled_mask=mask, trainable=trainable)


class RefusedError(ValueError):
    """Mimics pydantic's error for a tag without a renderer."""

    def errors(self):
        context = {"discriminator": "'name'", "tag": "qwen", "expected_tags": "'default', 'qwen3'"}
        return [{"type": "union_tag_invalid", "loc": ("renderer",), "msg": "long", "ctx": context}]


def configure(table):
    runtime = SimpleNamespace(**table.get("agent", {"type": "subprocess"}))
    tasks = table.get("tasks", ["good", "drift", "branches", "fail", "hang"])
    return SimpleNamespace(tasks=tasks, agent=SimpleNamespace(runtime=runtime))


def configure_client(**options):
    if options["renderer"] == {"name": "qwen"}:
        raise RefusedError
    return SimpleNamespace(**options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("policy")
    TOKENIZER._tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def stand_in(monkeypatch, folder):
    made = []
    monkeypatch.chdir(folder.parent)

    def load(config):
        made.append(StandIn(config))
        return made[-1]

    modules = {
        "verifiers": {},
        "verifiers.v1": {
            "resolve_env_config": configure,
            "load_environment": load,
            "TrainClientConfig": configure_client,
            "ModelContext": SimpleNamespace,
            "SamplingConfig": SimpleNamespace,
        },
        "verifiers.v1.runtimes": {"runtime_is_local": lambda runtime: runtime.type == "subprocess"},
        "verifiers.v1.utils": {},
        "verifiers.v1.utils.prime": {"ensure_prime_auth": lambda: sys.exit("not authenticated")},
        "renderers": {"create_renderer": lambda tokenizer, config: (tokenizer, config)},
        "renderers.base": {"load_tokenizer": str},
    }
    for name, content in modules.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return made


def play(*tasks, say=lambda heard: f"I say {heard.count('assistant')}{END}", **options):
    loop = resolve_loop("verifiers", {"tokenizer": next(Path.cwd().glob("policy*")).name, **options})
    prompts = [
        Prompt(uid=f"p{index}", input_ids=np.ones(1, np.int32), columns={"task": task})
        for index, task in enumerate(tasks)
    ]
    speaker = Speaker(TOKENIZER, say)
    return run_loop(loop, speaker, prompts, num_sessions=2, sampling=SamplingParams(max_tokens=100)), speaker


def text(ids):
    return TOKENIZER.decode([ids], skip_special_tokens=False)[0]


def test_an_episode_becomes_a_session_with_the_engines_tokens_and_its_own_reward(stand_in):
    (group,), speaker = play(0)
    assert (group.failures, group.num_audited, group.num_audit_failures) == ((), 2, 0)
    for trajectory in group.trajectories:
        assert text(trajectory.input_ids[trajectory.loss_mask]) == f"I say 1{END}I say 2{END}"
        assert trajectory.reward == 0.75
        assert trajectory.reward_components == {"right": 0.5, "turns": 2.0}
        assert trajectory.extras == {"ended_by": "agent_completed", "num_turns": 2}
        assert trajectory.timings.reward_s == 0.001
        assert trajectory.timings.generate_s > 0
        assert trajectory.timings.tools_s > 0
        assert (trajectory.rollout_logprobs[trajectory.loss_mask] == -1).all()
    assert [request.sampling.max_tokens for request in speaker.engine.requests] == [40] * 4
    assert len({request.sampling.seed for request in speaker.engine.requests}) == 4
    assert speaker.engine.requests[0].sampling.stop_token_ids == (3,)


def test_each_branch_is_a_trajectory_and_a_shared_turn_trains_once(stand_in):
    counter = itertools.count()
    (group,), _ = play(2, say=lambda _: f"Say {next(counter)}{END}")
    for session in group.sessions:
        first, second = session.trajectories
        assert (first.output_index, second.output_index) == (0, 1)
        assert first.loss_mask.sum() == 2 * len("Say 0.")
        assert second.loss_mask.sum() == len("Say 0.")
        assert (
            first.input_ids[: first.num_prompt_tokens + 6].tolist()
            == second.input_ids[: first.num_prompt_tokens + 6].tolist()
        )
    trained = [text(t.input_ids[t.loss_mask]) for t in group.trajectories]
    assert sorted("".join(trained).replace(END, "").split("Say ")) == ["", "0", "1", "2", "3", "4", "5"]


def test_tokens_that_the_engine_did_not_sample_fail_the_audit(stand_in):
    groups, _ = play(1, 0)
    assert groups[0].num_audit_failures == 2
    assert "is trained, but" in groups[0].failures[0]
    assert groups[1].failures == ()


def test_what_fails_in_an_episode_fails_its_session_alone(stand_in):
    def say(heard):
        if "fail" in heard:
            raise EngineError("no memory")
        return f"Yes{END}"

    groups, _ = play(3, 4, 0, 9, True, say=say, timeout_s=4.0)
    assert groups[0].failures == ("no memory",) * 2
    assert groups[1].failures == ("the episode took longer than 4 s",) * 2
    assert groups[2].failures == ()
    assert "must be the index of a task, 0 to 4; found 9" in groups[3].failures[0]
    assert "found True" in groups[4].failures[0]


def test_the_environment_is_served_while_the_loop_runs(stand_in):
    play(0)
    assert [environment.num_serving for environment in stand_in] == [0]


def test_a_check_loads_the_environment_and_serves_nothing(stand_in, folder):
    loop = resolve_loop("verifiers", {"tokenizer": str(folder)})
    assert asyncio.run(loop.check(None)) == ["taskset with 5 tasks"]
    assert (loop._serving, [environment.num_serving for environment in stand_in]) == (None, [0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": "nope"}, "agent loop 'verifiers': tokenizer: nope is not a folder.* nothing is downloaded"),
        ({"renderer": {"name": "qwen"}}, "the renderer: renderer: unknown name 'qwen'. Did you mean 'qwen3'.* default"),
        ({"environment": {"agent": {"type": "prime"}}}, "agent.runtime is 'prime', .*not authenticated. Set environ"),
    ],
)
def test_what_would_fail_every_session_is_refused(stand_in, options, message):
    with pytest.raises(SettingsError, match=message):
        play(0, **options)


def test_a_library_that_exits_is_refused(stand_in, monkeypatch):
    library = sys.modules["verifiers.v1"]
    monkeypatch.setattr(library, "load_environment", lambda _config: sys.exit("log in first"))
    with pytest.raises(SettingsError, match="verifiers rejected the environment: SystemExit: log in first"):
        play(0)


def test_what_cannot_start_is_refused(stand_in, monkeypatch):
    with pytest.raises(SettingsError, match="the taskset of the verifiers environment has no tasks"):
        play(0, environment={"tasks": []})
    monkeypatch.setattr(sys.modules["verifiers.v1"], "load_environment", lambda _config: {}["x"])
    with pytest.raises(SettingsError, match="verifiers rejected the environment: KeyError: 'x'"):
        play(0)


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", None)
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(MissingExtraError, match=r"Install rl-rollout\[verifiers\]"):
        asyncio.run(resolve_loop("verifiers", {"tokenizer": "t"}).check(None))
    with pytest.raises(SettingsError, match="agent loop 'verifiers' needs the option 'tokenizer'"):
        resolve_loop("verifiers", {})


def test_columns_come_from_the_spans():
    ids = np.array([8, 5, 6, 2, 7], np.int32)
    sampled = np.array([0, 1, 1, 0, 1], np.bool_)
    spans = [
        SampledSpan(
            input_ids=ids[:start],
            token_ids=np.array(tokens, np.int32),
            logprobs=np.array(logprobs, np.float32),
            policy_versions=np.full(len(tokens), version, np.int32),
            nucleus_ids=np.array([[token, 1] for token in tokens], np.int32),
        )
        for start, tokens, logprobs, version in [(1, [5, 6], [-0.1, -0.2], 3), (4, [7], [-0.3], 4), (4, [9], [-9], 4)]
    ]
    trained: set[int] = set()
    mask, logprobs, versions, nucleus_ids = columns_of(ids, sampled, spans, trained=trained)
    assert mask.tolist() == sampled.tolist()
    assert logprobs.tolist() == np.array([0, -0.1, -0.2, 0, -0.3], np.float32).tolist()
    assert versions.tolist() == [-1, 3, 3, -1, 4]
    assert nucleus_ids is not None
    assert nucleus_ids.tolist() == [[-1, -1], [5, 1], [6, 1], [-1, -1], [7, 1]]
    assert trained == {0, 1}
    mask, logprobs, *_ = columns_of(ids, sampled, spans, trained=trained)
    assert not mask.any()
    assert not logprobs.any()
