"""verl's rollout dump as a system of benchmarks/skip_cache.py; runs in its own environment (locks/verl.txt)."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from _skip_protocol import serve
from _skip_samples import LONGEST, PROMPT_TOKENS, Rows
from numpy.typing import NDArray
from tensordict import TensorDict
from torch.nn.functional import pad
from verl import DataProto


class VerlDump:
    """Stores a DataProto with the tensors of verl's agent loop, which its rollout skip dumps, in verl's dtypes."""

    def __init__(self, samples: Rows) -> None:
        """Pad prompts and responses to the lengths in a run's settings, as verl does: here 64 and 4,032."""
        lengths = torch.from_numpy(samples.lengths)
        is_token = torch.arange(LONGEST) < lengths[:, None]

        def padded(name: str, dtype: torch.dtype) -> torch.Tensor:
            values = torch.from_numpy(samples.columns[name]).to(dtype)
            return torch.zeros(is_token.shape, dtype=dtype).masked_scatter_(is_token, values)

        input_ids = padded("input_ids", torch.int64)
        tensors = {
            "prompts": input_ids[:, :PROMPT_TOKENS].contiguous(),
            "responses": input_ids[:, PROMPT_TOKENS:].contiguous(),
            "response_mask": padded("mask", torch.int64)[:, PROMPT_TOKENS:].contiguous(),
            "input_ids": input_ids,
            "attention_mask": is_token.to(torch.int64),
            "position_ids": padded("position_ids", torch.int64),
            "rollout_log_probs": padded("logprobs", torch.float32)[:, PROMPT_TOKENS:].contiguous(),
        }
        self._dump = DataProto(batch=TensorDict(tensors, batch_size=len(lengths)))

    def write(self, place: Path) -> None:
        """See `System.write`."""
        self._dump.save_to_disk(place)

    def read(self, place: Path) -> DataProto:
        """See `System.read`."""
        return DataProto.load_from_disk(place)

    def columns(self, found: DataProto) -> Mapping[str, NDArray[Any]]:
        """See `System.columns`."""
        is_token = found.batch["attention_mask"].bool()
        full = {
            "input_ids": found.batch["input_ids"],
            "position_ids": found.batch["position_ids"],
            "logprobs": pad(found.batch["rollout_log_probs"], (PROMPT_TOKENS, 0)),
            "mask": pad(found.batch["response_mask"], (PROMPT_TOKENS, 0)),
        }
        return {name: values[is_token].numpy() for name, values in full.items()}


if __name__ == "__main__":
    sys.exit(serve(VerlDump))
