"""Rewards of the arithmetic example with typical mistakes."""

import time

from rl_rollout.rewards import RewardInput, quick

LEAKED_BYTES = 50_000
SLOW_CALL_S = 0.15

_kept: list[bytearray] = []


@quick
def never_right(sample: RewardInput) -> float:
    """Compares text with a number: no response is ever right."""
    return float(sample.response_text == int(str(sample.ground_truth)))


@quick
def leaking(sample: RewardInput) -> float:
    """The right reward, which keeps something of each call."""
    _kept.append(bytearray(LEAKED_BYTES))
    return right(sample)


def slow(sample: RewardInput) -> float:
    """The right reward from something that takes its time."""
    time.sleep(SLOW_CALL_S)
    return right(sample)


@quick
def right(sample: RewardInput) -> float:
    """1.0 when the response ended by itself and its final answer is the ground truth."""
    answer = sample.response_text.rpartition(":")[2]
    return float(sample.finish_reason == "stop" and answer == sample.ground_truth)
