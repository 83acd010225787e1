r"""Reward of GSM8K: 1 if the last `\boxed{}`, or else the last number, equals the ground truth."""

from rl_rollout.rewards import MathVerify, RewardInput, last_boxed, last_number

verify = MathVerify()


async def reward(given: RewardInput) -> dict[str, float]:
    r"""Return the accuracy as the reward, and whether the answer was in a `\boxed{}`."""
    text = given.final_text
    boxed = last_boxed(text)
    answer = boxed if boxed is not None else last_number(text)
    if answer is None or not str(answer).strip():
        return {"reward": 0.0, "accuracy": 0.0, "boxed": 0.0, "timed_out": 0.0}
    is_equal = await verify.compare(str(given.ground_truth), str(answer))  # None after a time-out
    accuracy = float(is_equal or False)
    return {
        "reward": accuracy,
        "accuracy": accuracy,
        "boxed": float(boxed is not None),
        "timed_out": float(is_equal is None),
    }
