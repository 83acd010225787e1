"""GRPO in TRL 1.16 on sessions of an agent: the `rollout_func` returns exactly the tokens that the gateway sampled.

python examples/gateway/trl_grpo.py MODEL_FOLDER    # in an environment with trl and rl-rollout[gateway,transformers]
"""

import argparse
import asyncio
import threading
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from agent import run_agent

from rl_core import Trajectory
from rl_core.weights import TensorTransport
from rl_rollout import PromptTokenizer, SamplingParams
from rl_rollout.engines.transformers import TransformersEngine
from rl_rollout.gateway import Gateway

TIED = {"lm_head.weight": "model.embed_tokens.weight"}


class GatewayRollout:
    """A `rollout_func`: a gateway in its own thread, whose engine loads TRL's weights before each batch."""

    def __init__(self, folder: Path, *, sampling: SamplingParams) -> None:
        """Load a second copy of the policy for sampling."""
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._engine = TransformersEngine(folder)
        self._gateway = Gateway(self._engine, PromptTokenizer.load(folder), sampling=sampling)
        self._wait(self._engine.start())
        self._wait(self._gateway.start())

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Run the sessions of a batch, one per prompt: TRL repeats each prompt `num_generations` times."""
        rows = self._wait(self._roll_out(prompts, trainer))
        starts = [row.num_prompt_tokens for row in rows]

        def cut(name: str) -> list[list[Any]]:
            return [getattr(row, name)[start:].tolist() for row, start in zip(rows, starts, strict=True)]

        return {
            "prompt_ids": [row.input_ids[:start].tolist() for row, start in zip(rows, starts, strict=True)],
            "completion_ids": cut("input_ids"),
            "logprobs": cut("rollout_logprobs"),
            "env_mask": [[int(trains) for trains in mask] for mask in cut("loss_mask")],
            "session_reward": [row.reward for row in rows],
        }

    async def _roll_out(self, prompts: Sequence[Any], trainer: Any) -> list[Trajectory]:
        model = trainer.accelerator.unwrap_model(trainer.model)
        tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
        tied = TIED if model.config.tie_word_embeddings else {}
        update = TensorTransport().pack(tensors, version=trainer.state.global_step, tied=tied)
        await self._engine.update_weights(update)
        return await asyncio.gather(*(self._session(index, prompt) for index, prompt in enumerate(prompts)))

    async def _session(self, index: int, messages: list[Any]) -> Trajectory:
        session = self._gateway.open("batch", index)
        session.set_reward(await run_agent(f"{self._gateway.url}/v1", session.key, messages))
        result = await self._gateway.finish(session)
        if result.failure is not None:  # a failed session must not count as a reward of 0
            raise RuntimeError(f"session {session.session_id} failed: {result.failure}")
        return max(result.trajectories, key=lambda row: int(row.loss_mask.sum()))  # TRL expects one row per prompt

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def train(folder: Path, output: Path, *, steps: int) -> list[dict[str, Any]]:
    """Train for some steps and return TRL's log."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=str(output),
        max_steps=steps,
        num_generations=4,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        max_completion_length=64,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,  # float32, like the engine
    )
    prompts = [[{"role": "user", "content": f"Say {number}."}] for number in range(8)]
    trainer = GRPOTrainer(
        model=str(folder),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        reward_funcs=lambda session_reward, **_: session_reward,
        rollout_func=GatewayRollout(folder, sampling=SamplingParams(max_tokens=16, temperature=config.temperature)),
    )
    trainer.train()
    history: list[dict[str, Any]] = trainer.state.log_history
    return history


def main() -> None:
    """Train, and print the reward of each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="MODEL_FOLDER")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("trl-output"))
    arguments = parser.parse_args()
    for entry in train(arguments.folder, arguments.output, steps=arguments.steps):
        if "reward" in entry:
            print(f"reward {entry['reward']:.3f}  loss {entry['loss']:.4f}  length {entry['completions/mean_length']}")


if __name__ == "__main__":
    main()
