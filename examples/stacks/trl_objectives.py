"""TRL 1.16 with a policy loss from rl-distill and a reward from rl-rollout; TRL does everything else.

python examples/stacks/trl_objectives.py MODEL_FOLDER    # in an environment with trl, rl-rollout and rl-distill
"""

import argparse
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rewards import digit_share

from rl_distill.objectives import PolicyTokens, compute_policy_loss
from rl_rollout import RewardInput, RewardScorer

Messages = Sequence[Mapping[str, Any]]
TrlReward = Callable[..., Awaitable[list[float | None]]]


def trl_reward(function: Callable[[RewardInput], Any]) -> TrlReward:
    """Wrap one of our rewards as a TRL reward function, with its time-out and checks; TRL leaves out failed rewards.

    Prompts and completions may be text or messages. The reward judges the last message of a completion, and finds the
    other columns of the data set in `given.columns`, `ground_truth` also in `given.ground_truth`.
    """
    scorer = RewardScorer(function)

    async def reward(
        prompts: Sequence[str | Messages],
        completions: Sequence[str | Messages],
        completion_ids: Sequence[Sequence[int]],
        **columns: Any,
    ) -> list[float | None]:
        by_name = {name: values for name, values in columns.items() if isinstance(values, list)}
        given = []
        for row, (prompt, completion, ids) in enumerate(zip(prompts, completions, completion_ids, strict=True)):
            own = {name: values[row] for name, values in by_name.items()} | {"prompt": prompt}
            given.append(
                RewardInput(
                    prompt_uid=str(row),
                    response_text=completion if isinstance(completion, str) else last_text(completion),
                    response_ids=np.array(ids, np.int32),
                    messages=() if isinstance(prompt, str) else tuple(prompt),
                    ground_truth=own.get("ground_truth"),
                    columns=own,
                )
            )
        return [None if one.result is None else one.result.reward for one in await scorer.score(given)]

    return reward


def last_text(messages: Messages) -> str:
    """Return the text of the last message; its content may be a list of parts, or missing beside tool calls."""
    content = messages[-1].get("content") if messages else None
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content or ())


def loss_in_trl(policy_loss: str, *, aggregation: str, **options: Any) -> Callable[..., torch.Tensor]:
    """Return a `_compute_loss` for a subclass of `GRPOTrainer`.

    Args:
        policy_loss: Name in `POLICY_LOSSES`.
        aggregation: Name in `AGGREGATIONS`, over TRL's micro-batch.
        options: Options of the policy loss.
    """

    def compute(trainer: Any, model: Any, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if trainer.beta:
            raise ValueError(
                f"this loss has no KL term, so beta must be 0; found {trainer.beta}. Set GRPOConfig(beta=0.0)."
            )
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        mask = inputs["completion_mask"]
        if "tool_mask" in inputs:
            mask = mask * inputs["tool_mask"]
        logprobs, entropy, _ = trainer._get_per_token_logps_and_entropies(
            model, ids, attention, mask.shape[1], compute_entropy=True
        )
        tokens = PolicyTokens.from_padded(
            logprobs, mask, advantages=inputs["advantages"], old_logprobs=inputs.get("old_per_token_logps")
        )
        loss, diagnostics = compute_policy_loss(tokens, policy_loss, aggregation=aggregation, **options)
        logged = {**diagnostics, "entropy": entropy[mask.bool()].mean()}
        for name, value in logged.items():
            trainer._metrics["train" if model.training else "eval"][name].append(float(value))
        return loss / (trainer.current_gradient_accumulation_steps if model.training else 1)

    return compute


def train(folder: Path, output: Path, *, steps: int, policy_loss: str = "gspo") -> list[dict[str, Any]]:
    """Train for some steps and return TRL's log."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    class ObjectiveTrainer(GRPOTrainer):  # type: ignore[misc]  # TRL has no types
        """TRL's trainer with our loss."""

        _compute_loss = loss_in_trl(policy_loss, aggregation="seq-mean-token-mean")

    config = GRPOConfig(
        output_dir=str(output),
        max_steps=steps,
        num_generations=8,
        per_device_train_batch_size=32,
        learning_rate=1e-3,
        max_completion_length=8,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
    )
    trainer = ObjectiveTrainer(
        model=str(folder),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["1", "2", "3", "12"] * 8}),
        reward_funcs=trl_reward(digit_share),
    )
    trainer.train()
    history: list[dict[str, Any]] = trainer.state.log_history
    return history


def main() -> None:
    """Train, and print the reward of each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="MODEL_FOLDER")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--policy-loss", default="gspo", help="a name in rl_distill.objectives.POLICY_LOSSES")
    parser.add_argument("--output", type=Path, default=Path("trl-output"))
    arguments = parser.parse_args()
    for entry in train(arguments.folder, arguments.output, steps=arguments.steps, policy_loss=arguments.policy_loss):
        if "reward" in entry:
            print(f"step {entry['step']}  reward {entry['reward']:.3f}  entropy {entry['entropy']:.3f}")


if __name__ == "__main__":
    main()
