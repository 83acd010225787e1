"""GRPO in a plain PyTorch loop: a transformers model, torch's AdamW, and our queue, objective and weight proof.

python examples/stacks/plain_pytorch.py MODEL_FOLDER    # needs rl-rollout[transformers] and rl-distill
"""

import argparse
import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rewards import digit_share
from transformers import AutoModelForCausalLM

from rl_core import Batch, InProcessQueue, Prompt, TaskSpec
from rl_core.weights import Canary, ProofTolerances, TensorTransport, publish_weights
from rl_distill.objectives import PolicyTokens, compute_policy_loss, grpo_advantages
from rl_rollout import PromptTokenizer, RewardScorer, Rollout, SamplingParams, SingleTurnLoop, require_some_success
from rl_rollout.engines.transformers import TransformersEngine
from rl_rollout.rollouter import settle

PROMPTS = ("1", "2", "3", "12")
GROUP_SIZE = 8
TIED = {"lm_head.weight": "model.embed_tokens.weight"}


class PlainLoop:
    """A transformers policy that trains on groups from the queue, and an engine whose weight updates are proven."""

    def __init__(self, folder: Path, *, learning_rate: float) -> None:
        """Load the policy twice: for training and in the engine."""
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
        self.adam = torch.optim.AdamW(self.model.parameters(), lr=learning_rate, weight_decay=0.0)
        self.tokenizer = PromptTokenizer.load(folder)
        self.engine = TransformersEngine(folder)
        self.queue = InProcessQueue([TaskSpec(name="train", needs=frozenset({"input_ids", "reward"}))])

    async def step(self, prompts: list[Prompt], *, version: int) -> float:
        """Roll out the prompts, train once on their groups, publish the new weights, and return the mean reward."""
        self.queue.issue(prompts, num_sessions=GROUP_SIZE)
        scorer = RewardScorer(digit_share)
        rollout = Rollout(self.engine, SingleTurnLoop(), scorer=scorer, decode=self.tokenizer.decode)
        sampling = SamplingParams(max_tokens=8, temperature=1.0)
        groups = await rollout.run(prompts, num_sessions=GROUP_SIZE, sampling=sampling, seed=version)
        require_some_success(groups)
        settle(self.queue, groups)
        lease = self.queue.lease("train", groups=len(prompts), deadline_s=60.0)
        batch, rewards = lease.batch, lease.batch.tensor("reward")
        loss_mask = padded(batch, "loss_mask").bool()
        tokens = PolicyTokens.from_padded(
            self.logprobs(batch), loss_mask, advantages=grpo_advantages(rewards, torch.from_numpy(batch.group_index()))
        )
        loss, _ = compute_policy_loss(tokens, "ppo_clip", aggregation="token-mean")
        self.adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.adam.step()
        self.queue.ack(lease)
        await self.publish(batch.select([0, 1]), version=version)
        return float(rewards.mean())

    def logprobs(self, batch: Batch) -> torch.Tensor:
        """Return the [B, T] logprobs of right-padded rows; each row's first token gets 0."""
        ids = padded(batch, "input_ids").long()
        logits = self.model(input_ids=ids).logits[:, :-1].float()  # causal: right padding has no effect
        chosen = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        return torch.nn.functional.pad(chosen, (1, 0))

    async def publish(self, rows: Batch, *, version: int) -> None:
        """Send the weights to the engine and prove that it serves them."""
        tensors = {name: tensor.detach() for name, tensor in self.model.named_parameters()}
        tied = TIED if self.model.config.tie_word_embeddings else {}
        sequences = list(rows.ragged("input_ids"))
        with torch.no_grad():
            scores = [row[: len(ids)].numpy() for row, ids in zip(self.logprobs(rows), sequences, strict=True)]
        update = TensorTransport().pack(tensors, version=version, tied=tied)
        canary = Canary(sequences=sequences, logprobs=scores)
        await publish_weights(update, [self.engine], canary=canary, tolerances=ProofTolerances())


def padded(batch: Batch, name: str) -> torch.Tensor:
    """Return a token column as [B, T], padded with zeros on the right."""
    rows = [torch.from_numpy(row.copy()) for row in batch.ragged(name)]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


async def train(folder: Path, *, steps: int, learning_rate: float = 1e-3) -> list[float]:
    """Train for some steps and return the mean reward of each."""
    loop = PlainLoop(folder, learning_rate=learning_rate)
    await loop.engine.start()
    rewards = []
    for step in range(1, steps + 1):
        ids = loop.tokenizer.encode(PROMPTS, add_special_tokens=False)
        prompts = [Prompt(uid=f"{step}-{index}", input_ids=np.array(row, np.int32)) for index, row in enumerate(ids)]
        rewards.append(await loop.step(prompts, version=step))
        print(f"step {step}  reward {rewards[-1]:.3f}")
    await loop.engine.close()
    return rewards


def main() -> None:
    """Train, and print the reward of each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="MODEL_FOLDER")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    arguments = parser.parse_args()
    asyncio.run(train(arguments.folder, steps=arguments.steps, learning_rate=arguments.learning_rate))


if __name__ == "__main__":
    main()
