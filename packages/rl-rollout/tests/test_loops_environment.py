import asyncio
import re
import threading

import numpy as np
import pytest
from chat_model import Speaker, chat_prompt, in_turn, make_tokenizer, run_loop

from rl_core.data.records import Prompt
from rl_core.errors import SettingsError
from rl_rollout import SamplingParams, quick, resolve_loop
from rl_rollout.user_code import load_attribute

END = "<|im_end|>"
TOKENIZER = make_tokenizer()
FILE = '''
import asyncio
import re
import threading
import time

closed = []


class Guess:
    """Guess the ground truth; a closer guess gives more."""

    def __init__(self, most=3):
        self.left = most

    def reset(self, prompt):
        self.number = prompt.ground_truth
        return f"Guess a number, {self.left} times."

    def step(self, text):
        self.left -= 1
        if text == str(self.number):
            return "Right.", 1.0, True
        return ("Higher." if int(text) < self.number else "Lower."), -0.25, self.left == 0

    def close(self):
        closed.append(self.number)


class Slow(Guess):
    async def reset(self, prompt):
        await asyncio.sleep(0)
        return super().reset(prompt)

    async def step(self, text):
        await asyncio.sleep(0)
        return super().step(text)


class Quiet:
    def reset(self, prompt):
        return None

    def step(self, text):
        return "Go on.", None, text == "stop"


class NoStep:
    def reset(self, prompt):
        return None


number = 3
'''


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "games.py"
    path.write_text(FILE)
    return path


def problem(text="Play.", uid="p", ground_truth=7):
    prompt = chat_prompt(TOKENIZER, text, uid=uid)
    return Prompt(uid=uid, input_ids=prompt.input_ids, messages=prompt.messages, ground_truth=ground_truth)


def play(reference, say, *, num_sessions=1, prompts=None, sampling=None, **options):
    loop = resolve_loop("environment", {"environment": reference, **options})
    speaker = Speaker(TOKENIZER, say)
    given = {"sampling": sampling} if sampling else {}
    groups = run_loop(loop, speaker, prompts or [problem()], num_sessions=num_sessions, **given)
    assert sum(group.num_audit_failures for group in groups) == 0
    return groups


def text(ids):
    return TOKENIZER.decode([np.asarray(ids)], skip_special_tokens=False)[0]


@pytest.mark.parametrize("name", ["Guess", "Slow"])
def test_rewards_add_up_and_observations_are_masked(file, name):
    (group,) = play(f"{file}:{name}", in_turn(f"3{END}", f"9{END}", f"7{END}"))
    (trajectory,) = group.trajectories
    assert text(trajectory.input_ids) == (
        f"<|im_start|>user\nPlay.{END}\n<|im_start|>user\nGuess a number, 3 times.{END}\n<|im_start|>assistant\n"
        f"3{END}\n<|im_start|>user\nHigher.{END}\n<|im_start|>assistant\n"
        f"9{END}\n<|im_start|>user\nLower.{END}\n<|im_start|>assistant\n7{END}"
    )
    assert text(trajectory.input_ids[trajectory.loss_mask]) == f"3{END}9{END}7{END}"
    assert trajectory.reward == 0.5
    assert trajectory.extras == {"ended_by": "done", "num_turns": 3}
    assert trajectory.finish_reason == "stop"


def test_the_loop_scores_itself_and_says_how_long_that_took(file):
    (group,) = play(f"{file}:Guess", in_turn(f"7{END}"))
    timings = group.trajectories[0].timings
    assert timings.reward_s > 0  # time of the step that returned the reward
    assert timings.tools_s > 0  # time of the reset
    assert timings.generate_s > 0


def test_without_a_reward_of_its_own_the_scorer_judges_the_last_turn(file):
    (group,) = play(f"{file}:Quiet", in_turn(f"one{END}", f"stop{END}"))
    assert group.trajectories[0].reward == len("stop")
    assert group.trajectories[0].extras["num_turns"] == 2
    assert text(group.prompt.input_ids) == text(group.trajectories[0].input_ids[: len(group.prompt.input_ids)])


def test_each_session_has_an_environment_of_its_own_which_is_closed(file):
    groups = play(
        f"{file}:Guess",
        lambda heard: f"{1 + heard.count('assistant')}{END}",
        num_sessions=3,
        prompts=[problem(uid="a", ground_truth=2), problem(uid="b", ground_truth=40)],
        arguments={"most": 2},
    )
    assert [t.reward for group in groups for t in group.trajectories] == [1.0] * 3 + [-0.5] * 3
    assert sorted(load_attribute(f"{file}:closed", kind="list")) == [2, 2, 2, 40, 40, 40]


def test_a_broken_session_leaves_the_others_alone(file):
    def say(heard):
        return f"{'x' if 'bad' in heard else 7}{END}"

    groups = play(f"{file}:Guess", say, prompts=[problem("bad", uid="a"), problem("good", uid="b")])
    assert re.fullmatch(
        r"the environment's step raised ValueError: invalid literal for int\(\) with base 10: 'x' "
        r"\(games.py, line \d+, in step\)",
        groups[0].failures[0],
    )
    assert text(groups[0].sessions[0].trajectories[0].input_ids).endswith(f"x{END}")
    assert groups[1].trajectories[0].reward == 1.0


@pytest.mark.parametrize(
    ("options", "max_tokens", "ended_by", "reward"),
    [
        ({"limits": {"max_turns": 2}}, 900, "max_turns", -0.5),
        ({}, 29, "context", -0.25),
        ({"limits": {"max_turn_tokens": 1}}, 900, "length", -0.25),
    ],
)
def test_limits_end_a_session_with_what_it_earned(file, options, max_tokens, ended_by, reward):
    (group,) = play(f"{file}:Guess", lambda _: f"3{END}", sampling=SamplingParams(max_tokens=max_tokens), **options)
    (trajectory,) = group.trajectories
    assert (trajectory.extras["ended_by"], trajectory.reward) == (ended_by, reward)
    assert trajectory.finish_reason == "length"


def test_a_long_game_goes_on_in_new_trajectories(file):
    (group,) = play(
        f"{file}:Guess",
        lambda _: f"3{END}",
        arguments={"most": 9},
        limits={"max_turns": 20, "on_context_full": "new_trajectory", "max_trajectories": 20},
        sampling=SamplingParams(max_tokens=120),
    )
    assert len(group.trajectories) > 2
    assert sum(int(t.loss_mask.sum()) for t in group.trajectories) == 9 * 2
    assert {t.reward for t in group.trajectories} == {-2.25}
    assert [t.timings.reward_s > 0 for t in group.trajectories][-1]


def test_blocking_environments_run_beside_each_other(file, tmp_path):
    barrier = threading.Barrier(3)

    class Meet:
        def reset(self, _prompt):
            return None

        def step(self, _text):
            barrier.wait(30)
            return "", 1.0, True

    from rl_rollout.loops.environment import ENVIRONMENTS

    ENVIRONMENTS._builtin["meet"] = Meet
    try:
        (group,) = play("meet", lambda _: f"x{END}", num_sessions=3)
    finally:
        del ENVIRONMENTS._builtin["meet"]
    assert [t.reward for t in group.trajectories] == [1.0] * 3


def test_what_is_no_environment_is_refused(file):
    for name in ("number", "NoStep"):
        with pytest.raises(SettingsError, match="must be a class with `reset` and `step`"):
            resolve_loop("environment", {"environment": f"{file}:{name}"})
    with pytest.raises(SettingsError, match=r"has no 'Gues'.*Did you mean 'Guess'\?"):
        resolve_loop("environment", {"environment": f"{file}:Gues"})
    loop = resolve_loop("environment", {"environment": f"{file}:Guess"})
    with pytest.raises(SettingsError, match=r"needs a tokenizer\. Pass tokenizer="):
        asyncio.run(loop.start(None))
    with pytest.raises(SettingsError, match="the chat template cannot join turns"):
        run_loop(loop, Speaker(make_tokenizer("{{ messages[0].content }}"), lambda _: END), [problem()])


def test_plain_turns_need_no_chat_template(file):
    tokenizer = make_tokenizer(None)
    loop = resolve_loop(
        "environment", {"environment": f"{file}:Guess", "turns": {"kind": "plain", "prefix": "[", "suffix": "]"}}
    )
    ids = np.array(tokenizer.encode(["Play."], add_special_tokens=False)[0], np.int32)
    speaker = Speaker(tokenizer, lambda heard: f"7{END}" if "Higher" in heard else f"3{END}")
    (group,) = run_loop(loop, speaker, [Prompt(uid="p", input_ids=ids, ground_truth=7)], reward=quick(lambda _: 9.0))
    assert text(group.trajectories[0].input_ids) == f"Play.[Guess a number, 3 times.]3{END}[Higher.]7{END}"
    assert group.trajectories[0].reward == 0.75
