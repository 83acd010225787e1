"""transformers on padded batches as one side of benchmarks/learner.py."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
import transformers
from _learner_protocol import Outcome, serve
from _learner_workload import OPTIMIZER, Preset, Rows, num_padded_tokens, padded_micro_batches
from torch import Tensor
from transformers.utils import is_flash_attn_2_available

IGNORED = -100


class Padded:
    """A transformers model with torch's fused AdamW, and micro-batches padded to their longest row.

    Attributes:
        budget: Maximum tokens of a micro-batch, including padding.
        attention: transformers' name of the implementation.
    """

    def __init__(self, policy: Path, preset: Preset, adapted: Callable[[Any], Any] = lambda model: model) -> None:
        """Load the model with its best attention.

        Args:
            policy: Folder of the weights.
            preset: Sizes of policy and batches.
            adapted: Returns the model to train, such as with an adapter; by default all weights train.
        """
        has_gpu = torch.cuda.is_available()
        self.attention = "flash_attention_2" if has_gpu and is_flash_attn_2_available() else "sdpa"
        self._device = torch.device("cuda" if has_gpu else "cpu")
        dtype = getattr(torch, preset.dtype)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            policy,
            dtype=dtype,
            attn_implementation=self.attention,
            trust_remote_code=False,
        )
        self._model = adapted(model.to(self._device)).train()
        self.budget = preset.budget
        self._parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        # As in ours, the optimizer updates float32 weights, which are rounded to bfloat16.
        is_mixed = dtype != torch.float32
        self._masters = [p.detach().float() for p in self._parameters] if is_mixed else self._parameters
        groups = [
            {"params": [m for m in self._masters if m.ndim > 1], "weight_decay": OPTIMIZER["weight_decay"]},
            {"params": [m for m in self._masters if m.ndim == 1], "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW(
            groups, lr=OPTIMIZER["learning_rate"], betas=OPTIMIZER["betas"], eps=OPTIMIZER["eps"], fused=True
        )

    def step(self, rows: Rows) -> Outcome:
        """One optimizer step."""
        parts = padded_micro_batches(rows.lengths, budget=self.budget)
        num_trained = int(rows.loss_mask.sum())
        losses = []
        for part in parts:
            loss = self._loss(rows, part) / num_trained
            torch.autograd.backward(loss)
            losses.append(loss.detach())
        if self._masters is not self._parameters:
            for master, parameter in zip(self._masters, self._parameters, strict=True):
                master.grad = parameter.grad.float()
        grad_norm = torch.nn.utils.clip_grad_norm_(self._masters, OPTIMIZER["clip_grad"], foreach=True)
        self._adam.step()
        self._adam.zero_grad()
        if self._masters is not self._parameters:
            with torch.no_grad():
                torch._foreach_copy_(self._parameters, self._masters)
            self._model.zero_grad()
        return Outcome(
            loss=float(torch.stack(losses).sum()),
            grad_norm=float(grad_norm),
            num_computed_tokens=num_padded_tokens(rows.lengths, parts),
        )

    def _loss(self, rows: Rows, part: np.ndarray[Any, Any]) -> Tensor:
        """Return the sum of the cross entropy of the part's response tokens.

        Common prompt positions get no logits, and rows of equal length no mask, because sdpa is faster without one.
        """
        ids, mask, labels = (torch.from_numpy(x).to(self._device) for x in padded(rows, part))
        first = int(rows.prompt_lengths[part].min())
        out = self._model(
            input_ids=ids,
            attention_mask=None if bool((rows.lengths[part] == ids.shape[1]).all()) else mask,
            logits_to_keep=ids.shape[1] - first + 1,
            use_cache=False,
        )
        logits = out.logits[:, :-1].float()
        return F.cross_entropy(logits.flatten(0, 1), labels[:, first:].flatten(), ignore_index=IGNORED, reduction="sum")


def padded(rows: Rows, part: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], ...]:
    """Return ids, attention mask and labels of a micro-batch, each [rows, longest] int64, padded on the right."""
    longest = int(rows.lengths[part].max())
    ids, mask = np.zeros((len(part), longest), dtype=np.int64), np.zeros((len(part), longest), dtype=np.int64)
    labels = np.full((len(part), longest), IGNORED, dtype=np.int64)
    offsets, loss_mask = rows.offsets, rows.loss_mask
    for place, row in enumerate(part):
        of_row = slice(offsets[row], offsets[row + 1])
        length = int(rows.lengths[row])
        ids[place, :length] = rows.input_ids[of_row]
        mask[place, :length] = 1
        labels[place, :length] = np.where(loss_mask[of_row], rows.input_ids[of_row], IGNORED)
    return ids, mask, labels


if __name__ == "__main__":
    sys.exit(serve(Padded, packages=("transformers", "torch")))
