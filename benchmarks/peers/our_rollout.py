"""This project's agent loop as one system of benchmarks/rollout.py, on its vLLM engine or on the reference engine."""

import asyncio
import sys
import time
from pathlib import Path

import numpy as np
from _rollout_protocol import serve
from _rollout_workload import Preset
from numpy.typing import NDArray
from safetensors.torch import load_file

from rl_core import Prompt
from rl_core.weights import Canary, ProofTolerances, TensorTransport, publish_weights
from rl_rollout import RewardInput, RewardScorer, Rollout, SamplingParams, SingleTurnLoop, quick
from rl_rollout.engines import RolloutEngine, VLLMOptions
from rl_rollout.engines.transformers import TransformersEngine
from rl_rollout.engines.vllm import VLLMEngine

TIED = {"lm_head.weight": "model.embed_tokens.weight"}


@quick
def no_reward(_: RewardInput) -> float:
    """Nothing to compute."""
    return 0.0


class Ours:
    """Runs prompts through `Rollout`, as the trainer does."""

    def __init__(self, policy: Path, preset: Preset, engine: str) -> None:
        """Load the model."""
        self._preset = preset
        self._weights = load_file(policy / "model.safetensors")
        longest = preset.prompt_tokens + preset.max_tokens
        options = VLLMOptions(max_model_len=longest, kv_cache_gib=preset.kv_cache_gib, capture_experts=engine == "vllm")
        is_vllm = engine != "transformers"
        self._engine: RolloutEngine = VLLMEngine(policy, options) if is_vllm else TransformersEngine(policy)
        self._version = 0
        self._canary = asyncio.run(self._start())

    async def _start(self) -> Canary:
        await self._engine.start()
        sequences = [np.arange(2, 10, dtype=np.int32)]
        scores = await self._engine.score(sequences)
        return Canary(sequences=sequences, logprobs=[one.token_logprobs for one in scores])

    def generate(self, prompts: NDArray[np.int32], *, seed: int) -> int:
        """See `System.generate`."""
        return asyncio.run(self._generate(prompts, seed))

    async def _generate(self, prompts: NDArray[np.int32], seed: int) -> int:
        scorer = RewardScorer(no_reward)
        rollout = Rollout(self._engine, SingleTurnLoop(), scorer=scorer, decode=lambda sequences: [""] * len(sequences))
        groups = await rollout.run(
            [Prompt(uid=str(index), input_ids=ids) for index, ids in enumerate(prompts)],
            num_sessions=self._preset.group_size,
            sampling=SamplingParams(max_tokens=self._preset.max_tokens),
            seed=seed,
        )
        scorer.close()
        return sum(trajectory.num_response_tokens for group in groups for trajectory in group.trajectories)

    def update(self) -> dict[str, float]:
        """Update as the trainer does after an optimizer step, and copy every tensor; see `System.update`."""
        started = time.perf_counter()
        copies = {name: tensor.clone() for name, tensor in self._weights.items()}
        copied = time.perf_counter()
        for name, tensor in self._weights.items():
            copies[name].copy_(tensor)
        copied_again = time.perf_counter()
        del copies
        self._version += 1
        began = time.perf_counter()
        asyncio.run(self._publish())
        return {
            "ours_s": time.perf_counter() - began,
            "copy_s": copied - started,
            "copy_in_place_s": copied_again - copied,
            "num_bytes": sum(tensor.nbytes for tensor in self._weights.values()),
        }

    async def _publish(self) -> None:
        update = TensorTransport().pack(self._weights, version=self._version, tied=TIED)
        await publish_weights(update, [self._engine], canary=self._canary, tolerances=ProofTolerances())


if __name__ == "__main__":
    sys.exit(serve(Ours))
