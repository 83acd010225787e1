"""Invalid results and errors of an environment, and limits on the length of its texts."""

import asyncio
import re
import time

import numpy as np
import pytest
from chat_model import Speaker, chat_prompt, make_tokenizer, run_loop

from rl_rollout import RewardScorer, Rollout, SamplingParams, quick, resolve_loop
from rl_rollout.user_code import describe_raised, load_attribute

END = "<|im_end|>"
TOKENIZER = make_tokenizer()
FILE = '''
import asyncio
import sys
import threading

import numpy as np

closed, waiting, released = [], [], []
gate = threading.Event()


class Broken:
    def __init__(self, how):
        self.how = how
        if how == "init":
            raise ValueError("no board")

    def reset(self, prompt):
        if self.how == "reset":
            raise ValueError("no dice")
        return 3 if self.how == "number" else None

    def step(self, text):
        if self.how == "wait":
            raise asyncio.CancelledError
        if self.how == "exit":
            sys.exit(3)
        if self.how == "late":
            raise TimeoutError("no answer")
        return {
            "pair": ("a", 1.0), "nan": ("a", float("nan"), False), "text": ("a", "b", True), "none": None,
            "unread": (None, 1.0, True), "done": ("a", None, "false"), "much": ("a", 3e38, False),
            "part": ("a", {"reward": 1, "a": float("inf")}, False),
        }.get(self.how) or self._wait()

    def _wait(self):
        gate.wait(60)


class Scores:
    """Gives components with its rewards, not the same in all steps."""

    def reset(self, prompt):
        self.steps = iter([
            {"reward": 1, "form": 0.5, "speed": 2.0},
            0.25,
            {"reward": -0.5, "form": 0.25, "luck": True},
        ])

    def step(self, text):
        reward = next(self.steps)
        return "More.", reward, np.bool_(isinstance(reward, dict) and "luck" in reward)


class Raises:
    """Raises what no `except Exception` catches, where it is told to."""

    def __init__(self, error, where):
        self.error, self.where = error, where

    async def reset(self, prompt):
        self.uid = prompt.uid
        await self._maybe("reset")

    async def step(self, text):
        await self._maybe("step")
        return "", 1.0, True

    async def close(self):
        await self._maybe("close")

    async def _maybe(self, where):
        await asyncio.sleep(0)
        if where == self.where and self.uid == "a":
            raise {"cancel": asyncio.CancelledError, "exit": SystemExit, "generator": GeneratorExit}[self.error](3)


class Talks:
    """Says much, or what no tokenizer takes."""

    def __init__(self, texts):
        self.texts = [text * 10_000_000 if text == "x" else text for text in texts]

    def reset(self, prompt):
        return self.texts[0]

    def step(self, text):
        del self.texts[0]
        return (self.texts[0], None, False) if self.texts else ("", 1.0, True)


class Waits:
    """Never gives anything."""

    def reset(self, prompt):
        return None

    async def step(self, text):
        waiting.append(text)
        await asyncio.Event().wait()

    def close(self):
        closed.append("waits")


class WaitsToClose(Waits):
    async def close(self):
        super().close()
        await asyncio.Event().wait()


class Stubborn:
    """Goes on when it is cancelled."""

    def reset(self, prompt):
        return None

    async def step(self, text):
        while not released:
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                pass
        return "", 1.0, True
'''


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "games.py"
    path.write_text(FILE)
    return path


def play(reference, *, uids=("p",), **options):
    loop = resolve_loop("environment", {"environment": reference, **options})
    prompts = [chat_prompt(TOKENIZER, "Play.", uid=uid) for uid in uids]
    return run_loop(loop, Speaker(TOKENIZER, lambda _: f"y{END}"), prompts)


def text(ids):
    return TOKENIZER.decode([np.asarray(ids)], skip_special_tokens=False)[0]


def rollout_of(loop, speaker):
    scorer = RewardScorer(quick(lambda _: 1.0))
    return Rollout(speaker.engine, loop, scorer=scorer, decode=TOKENIZER.decode, tokenizer=TOKENIZER)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("init", r"the environment's __init__ raised ValueError: no board \(games.py, line \d+, in __init__\)"),
        ("reset", r"the environment's reset raised ValueError: no dice \(games.py, line \d+, in reset\)"),
        ("number", r"the environment's reset returned 3 \(int\); expected a string or None"),
        (
            "pair",
            r"the environment's step returned \('a', 1.0\) \(tuple\); expected \(observation, reward or None",
        ),
        ("nan", r"the environment's step returned reward = nan \(float\); expected a finite number"),
        ("text", r"the environment's step returned reward = 'b' \(str\); expected a finite number"),
        ("unread", r"the environment's step returned observation = None \(NoneType\); expected a string"),
        ("done", r"the environment's step returned is_done = 'false' \(str\); expected True or False"),
        ("much", r"the rewards of the environment's steps add up to reward = 6e\+38 \(float\); expected a finite"),
        ("part", r"the environment's step returned a = inf \(float\); expected a finite number"),
        ("late", r"the environment's step raised TimeoutError: no answer \(games.py, line \d+, in step\)"),
        ("wait", "the environment's step raised .*CancelledError"),
        ("exit", r"the environment's step raised .*exit.*3"),
        ("hang", "the environment's step took longer than 0.05 s"),
    ],
)
def test_a_broken_environment_fails_its_session_with_the_reason(file, how, message):
    (group,) = play(f"{file}:Broken", arguments={"how": how}, timeout_s=0.05 if how == "hang" else 30)
    (failure,) = group.failures
    assert re.match(message, failure), failure
    assert group.sessions[0].trajectories
    assert all(trajectory.reward is None for trajectory in group.sessions[0].trajectories)
    load_attribute(f"{file}:gate", kind="event").set()


@pytest.mark.parametrize("error", ["cancel", "exit", "generator"])
@pytest.mark.parametrize("where", ["reset", "step"])
def test_what_async_code_raises_ends_its_session_alone(file, error, where):
    broken, good = play(f"{file}:Raises", uids=["a", "b"], arguments={"error": error, "where": where})
    kinds = {"cancel": "CancelledError", "exit": "SystemExit", "generator": "GeneratorExit"}
    assert broken.failures[0].startswith(f"the environment's {where} raised {kinds[error]}: 3 (games.py, line ")
    assert [trajectory.reward for trajectory in good.trajectories] == [1.0]


@pytest.mark.parametrize("error", ["cancel", "exit"])
def test_an_environment_that_cannot_be_closed_changes_nothing_of_its_session(file, error):
    (group,) = play(f"{file}:Raises", uids=["a"], arguments={"error": error, "where": "close"})
    assert [trajectory.reward for trajectory in group.trajectories] == [1.0]


def test_a_step_that_refuses_cancellation_is_left_behind(file):
    loop = resolve_loop("environment", {"environment": f"{file}:Stubborn", "timeout_s": 0.05})
    speaker = Speaker(TOKENIZER, lambda _: f"y{END}")
    released = load_attribute(f"{file}:released", kind="list")

    async def play_on():
        await speaker.engine.start()
        rollout = rollout_of(loop, speaker)
        sampling = SamplingParams(max_tokens=20)
        groups = await rollout.run([chat_prompt(TOKENIZER, "Play.")], num_sessions=1, sampling=sampling)
        released.append(True)
        rollout.close()
        return groups

    (group,) = asyncio.run(play_on())
    assert group.failures == ("the environment's step took longer than 0.05 s",)


def test_what_was_raised_is_told_of_groups_and_in_words_that_can_be_written():
    group = ExceptionGroup("unhandled errors in a TaskGroup", [ValueError("in the group"), ValueError("another")])
    assert describe_raised("the loop", group) == "the loop raised ValueError: in the group"
    assert describe_raised("the loop", ValueError("\ud800")) == r"the loop raised ValueError: \ud800"


@pytest.mark.parametrize("name", ["Waits", "WaitsToClose"])
def test_a_cancelled_run_ends_at_once_and_closes_its_environments(file, name):
    loop = resolve_loop("environment", {"environment": f"{file}:{name}"})
    speaker = Speaker(TOKENIZER, lambda _: f"y{END}")
    waiting, closed = (load_attribute(f"{file}:{name}", kind="list") for name in ("waiting", "closed"))

    async def cancelled():
        await speaker.engine.start()
        rollout = rollout_of(loop, speaker)
        sampling = SamplingParams(max_tokens=20)
        run = asyncio.create_task(rollout.run([chat_prompt(TOKENIZER, "Play.")], num_sessions=2, sampling=sampling))
        async with asyncio.timeout(30):
            while len(waiting) < 2:
                await asyncio.sleep(0)
        run.cancel()
        await asyncio.wait({run}, timeout=30)
        rollout.close()
        return run.cancelled()

    assert asyncio.run(cancelled())
    assert closed == ["waits", "waits"]


def test_components_of_rewards_add_up_by_name(file):
    (group,) = play(f"{file}:Scores")
    (trajectory,) = group.trajectories
    assert trajectory.reward == 0.75
    assert trajectory.reward_components == {"form": 0.75, "speed": 2.0, "luck": 1.0}


def test_an_observation_is_cut_before_it_is_rendered(file, monkeypatch):
    rendered = []
    encode = type(TOKENIZER).encode

    def watched(self, texts, **options):
        rendered.extend(map(len, texts))
        return encode(self, texts, **options)

    monkeypatch.setattr(type(TOKENIZER), "encode", watched)
    texts = ["x", "12345", "123456", "x"]
    (group,) = play(f"{file}:Talks", arguments={"texts": texts}, max_observation_chars=5)
    (trajectory,) = group.trajectories
    assert trajectory.extras["num_turns"] == 4
    cut = "xxxxx\n[cut: the first 5 of 10000000 characters]"
    said = text(trajectory.input_ids)
    assert re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", said, flags=re.DOTALL)[1:] == [
        cut,
        "12345",
        "12345\n[cut: the first 5 of 6 characters]",
        cut,
    ]
    assert max(rendered) < 500


def test_an_observation_of_10_mb_stalls_no_other_session(file):
    loop = resolve_loop("environment", {"environment": f"{file}:Talks", "arguments": {"texts": ["a", "x"]}})
    speaker = Speaker(TOKENIZER, lambda _: f"y{END}")

    async def longest_stall():
        stalls = []

        async def watch():
            while True:
                before = time.process_time()
                await asyncio.sleep(0)
                stalls.append(time.process_time() - before)

        watching = asyncio.create_task(watch())
        await speaker.engine.start()
        rollout = rollout_of(loop, speaker)
        (group,) = await rollout.run(
            [chat_prompt(TOKENIZER, "Play.")], num_sessions=1, sampling=SamplingParams(max_tokens=300)
        )
        watching.cancel()
        rollout.close()
        return max(stalls), group

    stall_s, group = asyncio.run(longest_stall())
    assert group.trajectories[0].extras["ended_by"] == "context"  # 8192 characters are more than 300 tokens
    assert stall_s < 10  # rendering the whole text takes minutes


def test_what_no_tokenizer_takes_is_replaced(file):
    (group,) = play(f"{file}:Talks", arguments={"texts": ["a\ud800b", "c\udfffd"]})
    said = text(group.trajectories[0].input_ids)
    assert r"a\ud800b" in said
    assert r"c\udfffd" in said
