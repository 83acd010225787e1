"""transformers' `generate` as one system of benchmarks/rollout.py: one batch, until its longest response ends."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from _rollout_protocol import serve
from _rollout_workload import END_TOKEN, Preset
from numpy.typing import NDArray


class Transformers:
    """A transformers model with its best attention; it does not keep logprobs, which would cost time."""

    def __init__(self, policy: Path, preset: Preset) -> None:
        """Load the model."""
        self._preset = preset
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            policy, attn_implementation="sdpa", trust_remote_code=False
        )
        self._model = model.eval()

    @torch.inference_mode()
    def generate(self, prompts: NDArray[np.int32], *, seed: int) -> int:
        """See `System.generate`."""
        torch.manual_seed(seed)
        ids = torch.from_numpy(prompts.astype(np.int64)).repeat_interleave(self._preset.group_size, dim=0)
        out = self._model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=self._preset.max_tokens,
            pad_token_id=0,
        )
        responses = out[:, ids.shape[1] :]
        ends = responses == END_TOKEN
        if self._model.generation_config.eos_token_id is None:
            return int(responses.numel())
        before_end = ends.int().cumsum(-1) - ends.int() == 0
        return int(before_end.sum())

    def update(self) -> dict[str, float]:
        """Not measured."""
        raise NotImplementedError("update is measured on our engine")


if __name__ == "__main__":
    sys.exit(serve(lambda policy, preset, _: Transformers(policy, preset)))
