"""vLLM's own `LLM.generate` as a system of benchmarks/rollout.py, with our engine's arguments."""

import sys
from pathlib import Path

import numpy as np
from _rollout_protocol import serve
from _rollout_workload import Preset
from numpy.typing import NDArray

from rl_rollout.engines.vllm.environment import prepare_environment

prepare_environment()

from vllm import LLM, SamplingParams, TokensPrompt  # noqa: E402 - reads the environment when it is imported


class VLLM:
    """vLLM in this process, without detokenization, with the sampled tokens' logprobs."""

    def __init__(self, policy: Path, preset: Preset) -> None:
        """Load the model."""
        self._preset = preset
        self._llm = LLM(
            model=str(policy),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=preset.prompt_tokens + preset.max_tokens + 1,
            max_num_seqs=512,
            max_num_batched_tokens=8192,
            kv_cache_memory_bytes=int(preset.kv_cache_gib * (1 << 30)),
            block_size=32,
            enable_prefix_caching=True,
            enforce_eager=True,
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
            async_scheduling=False,
            trust_remote_code=False,
        )

    def generate(self, prompts: NDArray[np.int32], *, seed: int) -> int:
        """See `System.generate`."""
        sampling = SamplingParams(
            n=self._preset.group_size, max_tokens=self._preset.max_tokens, logprobs=0, seed=seed, detokenize=False
        )
        requests = [TokensPrompt(prompt_token_ids=ids.tolist()) for ids in prompts]
        outputs = self._llm.generate(requests, sampling, use_tqdm=False)
        return sum(len(sample.token_ids) for output in outputs for sample in output.outputs)

    def update(self) -> dict[str, float]:
        """Not measured."""
        raise NotImplementedError("update is measured on our engine")


if __name__ == "__main__":
    sys.exit(serve(lambda policy, preset, _: VLLM(policy, preset)))
