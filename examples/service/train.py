"""Teach a policy to add one digit with the tinker client: supervised learning, then reinforcement learning.

Start `rl-service serve` first, and set TINKER_BASE_URL and TINKER_API_KEY as it prints.
"""

import argparse
import random
from collections.abc import Sequence

import numpy as np
import tinker
from tinker import types

PROBLEMS = [(f"{a}+{b}=", str(a + b)) for a in range(10) for b in range(10)]
GROUP = 8
"""Answers that are sampled for each problem; the mean of their rewards is the baseline."""


def datum(prompt: Sequence[int], answer: Sequence[int], **inputs: Sequence[float]) -> types.Datum:
    """Return a row that trains the answer; `inputs` have a value for each of its tokens, and 0 for the prompt's."""
    tokens, before = np.asarray([*prompt, *answer]), [0.0] * (len(prompt) - 1)
    columns = {name: np.asarray([*before, *values], np.float32) for name, values in inputs.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
        loss_fn_inputs={
            name: types.TensorData.from_numpy(one) for name, one in {"target_tokens": tokens[1:], **columns}.items()
        },
    )


def step(
    trainer: tinker.TrainingClient, rows: list[types.Datum], loss: types.LossFnType, learning_rate: float
) -> float:
    """Take a step, and return its loss by row."""
    passed = trainer.forward_backward(rows, loss)
    stepped = trainer.optim_step(types.AdamParams(learning_rate=learning_rate))
    stepped.result()
    return passed.result().metrics["loss:sum"] / len(rows)


def supervise(trainer: tinker.TrainingClient, problems: Sequence[tuple[str, str]], learning_rate: float) -> float:
    """Take a step on right answers, and return its loss by answer."""
    tokenizer, rows = trainer.get_tokenizer(), []
    for prompt, answer in problems:
        tokens = [*tokenizer.encode(answer), tokenizer.eos_token_id]
        rows.append(datum(tokenizer.encode(prompt), tokens, weights=[1.0] * len(tokens)))
    return step(trainer, rows, "cross_entropy", learning_rate)


def reinforce(trainer: tinker.TrainingClient, problems: Sequence[tuple[str, str]], learning_rate: float) -> float:
    """Take a step on answers of the policy, and return the share of right ones."""
    tokenizer, rows, rewards = trainer.get_tokenizer(), [], []
    sampler = trainer.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=4, temperature=1.0, stop=[tokenizer.eos_token_id])
    prompts = [tokenizer.encode(prompt) for prompt, _ in problems]
    futures = [sampler.sample(types.ModelInput.from_ints(prompt), GROUP, params) for prompt in prompts]
    for prompt, (_, answer), future in zip(prompts, problems, futures, strict=True):
        sampled = future.result().sequences
        right = [float(tokenizer.decode(one.tokens, skip_special_tokens=True) == answer) for one in sampled]
        for one, reward in zip(sampled, right, strict=True):
            advantages = [reward - sum(right) / GROUP] * len(one.tokens)
            rows.append(datum(prompt, one.tokens, logprobs=one.logprobs or [], advantages=advantages))
        rewards += right
    step(trainer, rows, "importance_sampling", learning_rate)
    return sum(rewards) / len(rewards)


def main(words: Sequence[str] | None = None) -> list[float]:
    """Train, and return the mean reward of each step of reinforcement learning."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="Qwen/Qwen3-8B", help="a name of the served policy")
    parser.add_argument("--supervised-steps", type=int, default=6)
    parser.add_argument("--rl-steps", type=int, default=40)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    given = parser.parse_args(words)
    draw, rewards = random.Random(0), []
    with tinker.ServiceClient() as service:
        trainer = service.create_lora_training_client(base_model=given.model, rank=given.rank, seed=0).result()
        for number in range(1, given.supervised_steps + 1):
            loss = supervise(trainer, draw.sample(PROBLEMS, 16), given.learning_rate)
            print(f"supervised step {number}: loss {loss:.3f}")
        for number in range(1, given.rl_steps + 1):
            rewards.append(reinforce(trainer, draw.sample(PROBLEMS, 8), given.learning_rate / 3))
            print(f"step {number} of RL: reward {rewards[-1]:.3f}")
        print("weights to sample from:", trainer.save_weights_for_sampler("final").result().path)
    return rewards


if __name__ == "__main__":
    main()
