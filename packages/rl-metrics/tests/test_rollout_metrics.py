import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import FLOAT64, rounding_bound

from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.data.records import Timings, Trajectory
from rl_metrics.definitions.table import DEFINITIONS
from rl_metrics.reductions.rollouts import (
    count_turns,
    spread,
    summarize_batch,
    summarize_components,
    summarize_rewards,
    summarize_speed,
    summarize_timings,
    summarize_tool_calls,
)


def trajectory(uid, session, *, num_prompt, num_response, reward, version=0, finish="stop"):
    length = num_prompt + num_response
    is_response = np.arange(length) >= num_prompt
    return Trajectory(
        prompt_uid=uid,
        session_index=session,
        input_ids=np.arange(length, dtype=np.int32),
        loss_mask=is_response,
        rollout_logprobs=np.where(is_response, -1.0, 0.0).astype(np.float32),
        policy_versions=np.where(is_response, version, -1).astype(np.int32),
        finish_reason=finish,
        reward=reward,
    )


def examples():
    return [
        trajectory("a", 0, num_prompt=2, num_response=3, reward=1.0, version=4),
        trajectory("a", 1, num_prompt=2, num_response=1, reward=0.0, version=5),
        trajectory("b", 0, num_prompt=4, num_response=5, reward=0.5, version=3, finish="length"),
        trajectory("b", 1, num_prompt=4, num_response=0, reward=0.5),
    ]


def example():
    return Batch.from_trajectories(examples())


def test_greedy_rewards_count_once_a_group():
    rows = [replace(one, reward_baseline=1.0 if one.prompt_uid == "a" else 0.5) for one in examples()[:3]]
    assert summarize_batch(Batch.from_trajectories(rows))["rollout/greedy_reward"] == 0.75
    assert "rollout/greedy_reward" not in summarize_batch(example())


def test_hand_computed_batch():
    assert summarize_batch(example(), policy_version=5, max_prompt_tokens=4) == {
        "rollout/num_groups": 2.0,
        "rollout/num_trajectories": 4.0,
        "rollout/unscored_trajectories": 0.0,
        "critic/score/mean": 0.5,
        "critic/score/max": 1.0,
        "critic/score/min": 0.0,
        "critic/rewards/mean": 0.5,
        "critic/rewards/max": 1.0,
        "critic/rewards/min": 0.0,
        "rollout/positive_reward_ratio": 0.75,
        "num_turns/mean": 1.75,
        "num_turns/max": 2.0,
        "num_turns/min": 1.0,
        "rollout/groups_without_spread_ratio": 0.5,
        "rollout/group_reward_std": 0.25,
        "prompt_length/mean": 3.0,
        "prompt_length/max": 4.0,
        "prompt_length/min": 2.0,
        "prompt_length/clip_ratio": 0.5,
        "response_length/mean": 2.25,
        "response_length/max": 5.0,
        "response_length/min": 0.0,
        "response_length/clip_ratio": 0.25,
        "response/aborted_ratio": 0.25,
        "training/staleness/mean": 1.0,
        "training/staleness/max": 2.0,
        "training/staleness/min": 0.0,
    }


def test_every_name_is_defined():
    batch = example()
    names = (
        summarize_batch(batch, policy_version=5, max_prompt_tokens=4)
        | summarize_timings(examples())
        | summarize_components([{"format": 1.0}])
        | summarize_speed(num_tokens=1, num_trajectories=1, step_s=1.0)
    )
    assert len(names) > 20
    assert [name for name in names if name not in DEFINITIONS] == []


def test_turns_hand_computed():
    masks = [[0, 0, 1, 1], [0, 1, 1, 0, 1], [1, 0, 1], [0, 0], [1]]
    assert count_turns(masked(masks)).tolist() == [2, 4, 3, 1, 1]


def masked(masks):
    return Batch.from_trajectories(
        [
            Trajectory(
                prompt_uid=f"p{row}",
                session_index=0,
                input_ids=np.zeros(len(mask), dtype=np.int32),
                loss_mask=np.asarray(mask, dtype=np.bool_),
                rollout_logprobs=np.zeros(len(mask), dtype=np.float32),
                policy_versions=np.zeros(len(mask), dtype=np.int32),
            )
            for row, mask in enumerate(masks)
        ]
    )


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.booleans(), max_size=8), min_size=1, max_size=8))
def test_turns_agree_with_a_loop(masks):
    expected = [len(list(itertools.groupby(mask))) for mask in masks]
    assert count_turns(masked(masks)).tolist() == expected


def test_advantages_count_trained_tokens_only():
    batch = example()
    mask = batch.ragged("loss_mask")
    advantages = np.where(mask.values, np.arange(len(mask.values)), 1e9).astype(np.float32)
    metrics = summarize_batch(batch.with_columns({"advantages": Ragged(advantages, mask.offsets)}))
    trained = [2, 3, 4, 7, 12, 13, 14, 15, 16]
    assert metrics["critic/advantages/max"] == 16.0
    assert metrics["critic/advantages/min"] == 2.0
    assert metrics["critic/advantages/mean"] == pytest.approx(
        sum(trained) / 9, rel=rounding_bound(1.0, roundings=10, epsilon=FLOAT64)
    )


def test_a_batch_without_rows():
    assert summarize_batch(Batch.from_trajectories([])) == {"rollout/num_groups": 0.0, "rollout/num_trajectories": 0.0}
    assert summarize_timings([]) == {}


def test_an_unscored_trajectory_is_no_zero():
    metrics = summarize_rewards(np.array([1.0, np.nan, 3.0]), group_index=np.array([0, 0, 1]))
    assert metrics["rollout/unscored_trajectories"] == 1.0
    assert metrics["critic/score/mean"] == 2.0
    assert metrics["critic/score/min"] == 1.0
    assert "rollout/groups_without_spread_ratio" not in metrics


def test_unscored_trajectories_are_counted():
    assert summarize_rewards(np.array([np.nan]), group_index=np.array([0])) == {"rollout/unscored_trajectories": 1.0}


def test_groups_of_one_have_no_spread_to_judge():
    metrics = summarize_rewards(np.array([1.0, 1.0, 0.0]), group_index=np.array([0, 1, 1]))
    assert metrics["rollout/groups_without_spread_ratio"] == 0.0
    assert metrics["rollout/group_reward_std"] == 0.5


def test_a_group_whose_rewards_differ_by_rounding_has_no_spread():
    rewards = np.array([1.0, 1.0 + 1.2e-7, 0.0, 1e-5])
    metrics = summarize_rewards(rewards, group_index=np.array([0, 0, 1, 1]))
    assert metrics["rollout/groups_without_spread_ratio"] == 0.5


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.1, 0.2, 0.7])), min_size=1, max_size=30))
def test_group_spread_agrees_with_a_loop(rows):
    groups = np.array([group for group, _ in rows])
    rewards = np.array([reward for _, reward in rows])
    metrics = summarize_rewards(rewards, group_index=groups)
    several = [rewards[groups == g] for g in set(groups.tolist()) if (groups == g).sum() > 1]
    if several:
        equal = sum(len(set(group.tolist())) == 1 for group in several) / len(several)
        assert metrics["rollout/groups_without_spread_ratio"] == pytest.approx(equal)
        expected = math.fsum(group.std() for group in several) / len(several)
        assert metrics["rollout/group_reward_std"] == pytest.approx(expected, abs=1e-12)
    else:
        assert "rollout/group_reward_std" not in metrics


def test_the_slowest_counts_the_reward_too():
    timings = [
        Timings(generate_s=5.0),
        Timings(generate_s=1.0, tools_s=1.0, reward_s=4.0, preemptions=2),
        Timings(generate_s=2.0),
        Timings(generate_s=2.0),
    ]
    pairs = zip(examples(), timings, strict=True)
    metrics = summarize_timings([replace(one, timings=cost) for one, cost in pairs])
    assert metrics["agent_loop/generate_sequences/mean"] == 2.5
    assert metrics["agent_loop/compute_score/max"] == 4.0
    assert metrics["agent_loop/tool_calls/min"] == 0.0
    assert metrics["agent_loop/num_preempted/max"] == 2.0
    assert {name: value for name, value in metrics.items() if "slowest" in name} == {
        "agent_loop/slowest/generate_sequences": 1.0,
        "agent_loop/slowest/tool_calls": 1.0,
        "agent_loop/slowest/compute_score": 4.0,
        "agent_loop/slowest/num_preempted": 2.0,
        "agent_loop/slowest/prompt_length": 2.0,
        "agent_loop/slowest/response_length": 1.0,
    }


def test_components_count_where_they_are():
    metrics = summarize_components([{"format": 1.0, "answer": 0.0}, {"format": 0.0}, {}])
    assert metrics["reward/format/mean"] == 0.5
    assert metrics["reward/answer/max"] == 0.0
    assert summarize_components([]) == {}


def test_speed_is_computed_per_device():
    assert summarize_speed(num_tokens=1000, num_trajectories=20, step_s=2.0, num_devices=4) == {
        "perf/total_num_tokens": 1000.0,
        "perf/time_per_step": 2.0,
        "perf/throughput": 125.0,
        "perf/samples_per_s": 10.0,
    }
    assert summarize_speed(num_tokens=1, num_trajectories=1, step_s=0.0) == {}


def test_spread_of_nothing_is_nothing():
    assert spread("x", np.empty(0)) == {}


def test_tool_calls_are_counted_by_outcome_with_zeros_for_the_curves():
    found = summarize_tool_calls([{"ok": 3, "truncated": 1}, {"malformed_call": 2, "timed_out": 2}, {}, None])
    counts = {"ok": 3, "truncated": 1, "malformed_call": 2, "timed_out": 2}
    assert found == {f"tools/calls/{name}": number for name, number in counts.items()} | {"tools/ok_share": 0.5}
    assert all(DEFINITIONS.find(name) is not None for name in found)
    assert summarize_tool_calls([{}]) == {"tools/calls/ok": 0, "tools/calls/malformed_call": 0}
    assert summarize_tool_calls([None, "ok"]) == {}
