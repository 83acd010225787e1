"""Refill replaces groups without reward spread, in a bounded number of rounds."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.data.records import Prompt, Trajectory
from rl_core.errors import DataError, SettingsError
from rl_rollout.loops.protocol import SessionResult
from rl_rollout.refill import Refilled, RefillOptions, refill, resolve_filter, reward_spread
from rl_rollout.rollout import GroupResult


def session(uid: str, index: int, reward: float | None) -> SessionResult:
    if reward is None:
        return SessionResult(failure="the tool hung")
    trajectory = Trajectory(
        prompt_uid=uid,
        session_index=index,
        input_ids=np.array([1, 2], np.int32),
        loss_mask=np.array([False, True]),
        rollout_logprobs=np.zeros(2, np.float32),
        policy_versions=np.array([-1, 0], np.int32),
        reward=reward,
    )
    return SessionResult(trajectories=(trajectory,))


def group(uid: str, *rewards: float | None) -> GroupResult:
    prompt = Prompt(uid=uid, input_ids=np.array([1], np.int32))
    return GroupResult(prompt=prompt, sessions=tuple(session(uid, i, reward) for i, reward in enumerate(rewards)))


def refilled(groups: Sequence[GroupResult], *, wanted: int, max_rounds: int) -> tuple[Refilled, list[int]]:
    """Refill from these groups in order; also return the number requested in each round."""
    by_uid = {one.prompt.uid: one for one in groups}
    prompts = [one.prompt for one in groups]
    asked: list[int] = []

    def take(count: int) -> list[Prompt]:
        asked.append(count)
        taken, prompts[:] = prompts[:count], prompts[count:]
        return taken

    async def run(taken: Sequence[Prompt]) -> list[GroupResult]:
        return [by_uid[prompt.uid] for prompt in taken]

    found = asyncio.run(refill(run, take, wanted=wanted, keep=reward_spread, max_rounds=max_rounds))
    return found, asked


def test_a_group_whose_rewards_differ_by_rounding_is_refused():
    assert reward_spread(group("p", 1.0, 1.0 + 1.2e-7, 1.0)) == "every session has the reward 1.0"
    assert reward_spread(group("p", 0.0, 1e-5)) is None


def test_a_group_is_compared_with_its_greedy_baseline_too():
    def with_baseline(one: GroupResult, baseline: float) -> GroupResult:
        rows = (replace(session.trajectories[0], reward_baseline=baseline) for session in one.sessions)
        return replace(one, sessions=tuple(SessionResult(trajectories=(row,)) for row in rows))

    assert reward_spread(with_baseline(group("p", 1.0, 1.0), 0.0)) is None
    assert reward_spread(with_baseline(group("p", 1.0), 0.5)) is None
    assert reward_spread(with_baseline(group("p", 1.0, 1.0), 1.0)) == "every session has the reward 1.0"


def uids(groups: Sequence[GroupResult]) -> list[str]:
    return [one.prompt.uid for one in groups]


def test_groups_without_spread_are_replaced() -> None:
    groups = [group("a", 0, 1), group("b", 1, 1), group("c", 0, 0), group("d", 0, 1), group("e", 1, 0)]
    found, asked = refilled(groups, wanted=3, max_rounds=4)
    assert uids(found.groups) == ["a", "d", "e"]
    assert asked == [3, 2]
    assert [(one.prompt.uid, reason) for one, reason in found.refused] == [
        ("b", "every session has the reward 1.0"),
        ("c", "every session has the reward 0.0"),
    ]
    assert (found.num_rounds, found.num_made_up) == (2, 0)


def test_after_the_last_round_refused_groups_make_up_for_the_missing() -> None:
    groups = [group("a", 1, 1), group("b", 0, 1), group("c", 0, 0), group("d", 0, 0)]
    found, asked = refilled(groups, wanted=3, max_rounds=1)
    assert uids(found.groups) == ["b", "a", "c"]
    assert asked == [3]
    assert (found.num_made_up, len(found.refused)) == (2, 0)


def test_a_group_whose_sessions_all_failed_is_replaced_too() -> None:
    found, asked = refilled([group("a", None, None), group("b", 0, 1)], wanted=1, max_rounds=3)
    assert uids(found.groups) == ["b"]
    assert uids(found.failed) == ["a"]
    assert asked == [1, 1]


def test_failed_sessions_do_not_count_for_the_spread() -> None:
    assert reward_spread(group("a", 1, None, 1)) == "every session has the reward 1.0"
    assert reward_spread(group("a", 1, None, 0)) is None
    assert reward_spread(group("a", None)) == "no session can train"


def test_a_reward_that_is_no_number_is_no_spread() -> None:
    nan, inf = float("nan"), float("inf")
    assert reward_spread(group("a", nan, nan)) == "no session can train"
    assert reward_spread(group("a", 1, nan, inf)) == "every session has the reward 1.0"


@given(st.lists(st.lists(st.sampled_from([0.0, 1.0, None]), min_size=1, max_size=3), max_size=30), st.data())
def test_never_more_groups_than_wanted_and_none_twice(rewards: list[list[float | None]], data: st.DataObject) -> None:
    wanted, max_rounds = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 5))
    groups = [group(f"g{index}", *of) for index, of in enumerate(rewards)]
    found, asked = refilled(groups, wanted=wanted, max_rounds=max_rounds)
    everything = uids([*found.groups, *(one for one, _ in found.refused), *found.failed])
    assert len(everything) == len(set(everything)) == min(sum(asked), len(groups))
    assert len(found.groups) <= wanted
    assert len(asked) == found.num_rounds <= max_rounds
    num_kept = len(found.groups) - found.num_made_up
    assert all(reward_spread(one) is None for one in found.groups[:num_kept])
    assert all(reward_spread(one) is not None for one in found.groups[num_kept:])


def test_filters_come_by_name_or_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def only_first(group):\n    return None if group.prompt.uid == 'a' else 'not a'\n"
    )
    assert resolve_filter("reward_spread") is reward_spread
    own = resolve_filter(f"{tmp_path}/own.py:only_first")
    assert (own(group("a", 1)), own(group("b", 1))) == (None, "not a")
    with pytest.raises(SettingsError, match="reward_spread"):
        resolve_filter("reward_spred")


def test_a_filter_that_raises_or_says_nothing_useful_is_named() -> None:
    async def run(taken: Sequence[Prompt]) -> list[GroupResult]:
        return [group("a", 1)]

    def broken(_: GroupResult) -> str | None:
        raise KeyError("truth")

    for keep, said in ((broken, "raised KeyError: 'truth' for prompt a"), (lambda _: True, "found True for prompt a")):
        with pytest.raises(DataError, match=said):
            asyncio.run(refill(run, lambda count: [], wanted=1, keep=keep, max_rounds=1))  # type: ignore[arg-type]


def test_a_refill_needs_a_round() -> None:
    with pytest.raises(
        SettingsError, match=r"max_rounds of RefillOptions.* must be a whole number of at least 1; found 0"
    ):
        RefillOptions(max_rounds=0)
