import asyncio

import numpy as np
import pytest

from rl_core.data.records import Prompt
from rl_core.errors import SettingsError
from rl_rollout.rewards import (
    FailurePolicy,
    RewardInput,
    RewardOptions,
    RewardPart,
    RewardScorer,
    WeightedReward,
    build_scorer,
    resolve_reward,
)

PART = RewardPart(function="exact_match", name="a", weight=2.0)


@pytest.fixture
def reward_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "def scaled(given, *, scale, shift=0.0): return scale * len(given.response_text) + shift\n"
        "async def later(given, scale=1.0): return scale\n"
        "def any_option(given, **options): return options['x']\n"
        "class Judge:\n"
        "    is_closed = False\n"
        "    def __init__(self, strict: bool = True):\n"
        "        if strict not in (True, False): raise ValueError('strict must be true or false')\n"
        "        self.strict = strict\n"
        "    def __call__(self, given): return {'reward': 2.0, 'strict': self.strict}\n"
        "    def close(self): Judge.is_closed = True\n"
        "def judged(given): return {'reward': 3.0, 'acc': 1.0}\n"
        "def fails(given): raise OSError('disk')\n"
        "def yields(given): yield 1.0\n"
    )
    return path


def given_text(text, ids=(1, 2, 3), **fields):
    return RewardInput(prompt_uid="p7", response_text=text, response_ids=np.array(ids, np.int32), **fields)


def score(scorer, text, **fields):
    (scored,) = asyncio.run(scorer.score([given_text(text, **fields)]))
    return scored


def test_a_function_gets_its_options_in_each_call(reward_file):
    function = resolve_reward(f"{reward_file}:scaled", {"scale": 2.0, "shift": 1.0})
    scorer = RewardScorer(function)
    assert score(scorer, "abc").result.reward == 7.0
    assert scorer.name == "mine.py:scaled"
    assert score(RewardScorer(resolve_reward(f"{reward_file}:later", {"scale": 0.5})), "").result.reward == 0.5
    assert score(RewardScorer(resolve_reward(f"{reward_file}:any_option", {"x": 3.0})), "").result.reward == 3.0


def test_a_class_is_made_with_its_options_and_closed(reward_file):
    function = resolve_reward(f"{reward_file}:Judge", {"strict": False})
    scorer = RewardScorer(function)
    assert score(scorer, "").result.components == {"strict": 0.0}
    scorer.close()
    assert function.is_closed


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("scaled", {"scael": 2.0}, r"scaled' has no option 'scael'. Did you mean 'scale'\? Known: scale, shift"),
        ("scaled", {"shift": 2.0}, "scaled' needs the option 'scale'"),
        ("Judge", {"x": 1}, "has no option 'x'. Known: strict"),
        ("Judge", {"strict": 3}, "refuses its options: strict must be true or false"),
        ("yields", {}, "uses `yield`; it must return a number"),
    ],
)
def test_impossible_options_of_a_function_are_refused_by_name(reward_file, name, options, message):
    with pytest.raises(SettingsError, match=message):
        resolve_reward(f"{reward_file}:{name}", options)


def test_built_in_functions_refuse_unknown_options():
    with pytest.raises(SettingsError, match=r"'exact_match' has no option 'tags'\. .*Known: ignore_case, tag"):
        resolve_reward("exact_match", {"tags": "answer"})
    with pytest.raises(SettingsError, match="'overlong' needs the option 'buffer_tokens'"):
        resolve_reward("overlong", {"max_tokens": 3})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "function must name a reward, or parts must list several; found neither"),
        (
            {"function": "x", "parts": (RewardPart(function="y"),)},
            'or parts must list several; found both. Set function = ""',
        ),
        ({"parts": (RewardPart(function="y"),), "options": {"a": 1}}, "give each part its own options"),
        (
            {"function": "x", "timeout_s": 0},
            "timeout_s of RewardOptions.* must be a finite number above 0 or None; found 0",
        ),
        ({"function": "x", "timeout_s": float("nan")}, "timeout_s of .* must be a finite number above 0"),
        (
            {"function": "x", "max_concurrency": 0},
            "max_concurrency of .* must be a whole number of at least 1; found 0",
        ),
        (
            {"function": "x", "max_calls_per_s": -1},
            "max_calls_per_s of .* must be a finite number above 0 or None; found -1",
        ),
        ({"function": "x", "on_failure": "ignore"}, "on_failure of .* must be one of 'drop', 'retry', 'zero'"),
        ({"function": "x", "retries": 2}, "retries = 2 needs on_failure"),
        ({"function": "x", "on_failure": "retry", "retries": 0}, "needs retries of at least 1"),
        ({"function": "x", "on_failure": "retry", "retries": -1}, "retries of .* must be a whole number"),
        ({"function": "x", "backoff_s": -1.0}, "backoff_s of .* must be a finite number of at least 0"),
        ({"function": "x", "retry_on": ("crashed",)}, "retry_on must name .*; found 'crashed'"),
        ({"parts": (RewardPart(function="y"),) * 2}, "different names; found 'y' 2 times"),
    ],
)
def test_impossible_reward_options_are_all_named(options, message):
    with pytest.raises(SettingsError, match=message):
        build_scorer(RewardOptions(**options))


@pytest.mark.parametrize("options", [{"function": ""}, {"weight": float("inf")}, {"on_failure": "drop"}])
def test_impossible_parts_are_refused_where_they_are_made(options):
    with pytest.raises(SettingsError, match=r"of RewardPart.* must be"):
        RewardPart(**{"function": "y", **options})


def test_retries_follow_from_the_policy():
    assert FailurePolicy(on_failure="retry").max_retries == 2
    assert FailurePolicy(on_failure="zero").max_retries == 0
    assert FailurePolicy(on_failure="zero", retries=5).max_retries == 5
    assert FailurePolicy().max_retries == 0
    policy = FailurePolicy(on_failure="retry", backoff_s=0.5)
    assert [policy.pause_s(retry) for retry in (0, 1, 2, 7, 10_000)] == [0.5, 1.0, 2.0, 60.0, 60.0]


def weighted(reward_file, **options):
    parts = (
        RewardPart(function="exact_match", weight=2.0),
        RewardPart(function=f"{reward_file}:Judge", weight=0.5, options={"strict": True}),
        RewardPart(function="overlong", weight=1.0, options={"max_tokens": 4, "buffer_tokens": 2}, name="length"),
    )
    return RewardOptions(parts=parts, **options)


def test_parts_are_added_with_their_weights_and_components_kept(reward_file):
    scorer = build_scorer(weighted(reward_file))
    scored = score(scorer, "18", ground_truth="18")
    assert scored.result.reward == 2.0 * 1.0 + 0.5 * 2.0 + 1.0 * -0.5
    assert scored.result.components == {"exact_match": 1.0, "Judge": 2.0, "Judge/strict": 1.0, "length": -0.5}
    scorer.close()


@pytest.mark.parametrize("own_acc", [False, True])
def test_the_first_part_with_acc_gives_it_to_the_whole_unless_a_part_has_that_name(reward_file, own_acc):
    last = RewardPart(function="exact_match", name="acc" if own_acc else "match")
    parts = (RewardPart(function="overlong", options={"max_tokens": 4, "buffer_tokens": 2}, name="length"),)
    parts += (RewardPart(function=f"{reward_file}:judged", name="judge"), last)
    scored = score(build_scorer(RewardOptions(parts=parts)), "18", ground_truth="19")
    assert scored.result.components["judge/acc"] == 1.0
    assert scored.result.components["acc"] == (0.0 if own_acc else 1.0)


def failing(reward_file, part_on_failure, **options):
    parts = (
        RewardPart(function="exact_match"),
        RewardPart(function=f"{reward_file}:fails", name="disk", on_failure=part_on_failure),
    )
    return build_scorer(RewardOptions(parts=parts, **options))


def test_a_part_that_fails_fails_the_session_with_its_name_and_reason(reward_file):
    scored = score(failing(reward_file, "fail"), "18", ground_truth="18")
    assert scored.result is None
    assert scored.failure.startswith(
        "part 'disk' of the reward: reward function 'mine.py:fails' on prompt p7 raised OSError: disk"
    )


def test_a_part_may_count_zero_with_a_mark(reward_file):
    scored = score(failing(reward_file, "zero"), "18", ground_truth="18")
    assert scored.result.reward == 1.0
    assert scored.result.components == {"exact_match": 1.0, "disk": 0.0, "disk/reward_failed": 1.0}
    assert "raised OSError: disk" in scored.result.extras["disk"]["reward_failure"]


def test_a_failed_part_may_make_the_whole_zero_with_a_mark(reward_file):
    scorer = failing(reward_file, "fail", on_failure="zero", retries=1, backoff_s=0.0)
    scored = score(scorer, "18", ground_truth="18")
    assert (scored.result.reward, scored.result.components) == (0.0, {"reward_failed": 1.0})
    assert "part 'disk'" in scored.result.extras["reward_failure"]
    assert "the last of 2 attempts" in scored.result.extras["reward_failure"]


def test_rehearsal_reaches_each_part(reward_file):
    prompt = Prompt(uid="p0", input_ids=np.array([1], dtype=np.int32), ground_truth="3")
    asyncio.run(build_scorer(weighted(reward_file)).rehearse(prompt))
    with pytest.raises(SettingsError, match=r"mine\.py:fails"):
        asyncio.run(failing(reward_file, "zero").rehearse(prompt))


def test_waiting_for_a_turn_is_no_part_of_the_time(reward_file):
    scorer = build_scorer(weighted(reward_file, max_calls_per_s=10.0))
    scored = asyncio.run(scorer.score([given_text("18", ground_truth="18")] * 3))
    assert all(one.result is not None for one in scored)
    last = max(scored, key=lambda one: one.wait_s)
    assert last.wait_s > 0.15  # calls start 0.1 s apart
    assert last.reward_s < last.wait_s  # excludes the wait


def test_a_weighted_reward_is_a_function_like_any_other(reward_file):
    reward = WeightedReward([(PART, RewardScorer(resolve_reward("exact_match")))])
    assert asyncio.run(reward(given_text("1", ground_truth="1"))).reward == 2.0
    broken = WeightedReward([(PART, RewardScorer(lambda _given: None))])
    with pytest.raises(RuntimeError, match=r"part 'a' of the reward: .*returned reward = None"):
        asyncio.run(broken(given_text("1")))


def test_a_weighted_reward_needs_different_parts():
    part = (PART, RewardScorer(resolve_reward("exact_match")))
    for parts in ((), (part, part)):
        with pytest.raises(SettingsError, match="at least one part, with different names"):
            WeightedReward(parts)
