"""The teachers' output matrices on a student's ranks, so that whole distributions never travel."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from rl_core.errors import SettingsError
from rl_distill.hf_folder import PolicyTensors
from rl_distill.megatron.convert import Shard, padded_vocab_size
from rl_distill.megatron.setup import ModelPlan
from rl_distill.policy_config import parse_policy_config, read_policy_config


def read_heads(folders: Sequence[Path], shard: Shard, plan: ModelPlan, *, device: torch.device) -> list[Tensor]:
    """A student's slices of its teachers' output matrices [V of the slice, H], in the student's dtype.

    Rows of a teacher beyond the student's vocabulary, with which it is padded, are left out.

    Args:
        folders: Hugging Face folders of the teachers.
        shard: Of the student's last chunk; without a head there is nothing to read.
        plan: Of the student.
        device: Where to.

    Raises:
        SettingsError: A teacher knows fewer tokens than the student.
        DataError: A file or tensor is missing or torn.
    """
    if not shard.has_head:
        return []
    student = plan.source.config
    width = padded_vocab_size(student, shard.tensor_size) // shard.tensor_size
    heads = []
    for folder in folders:
        config = parse_policy_config(read_policy_config(folder))
        if config.vocab_size < student.vocab_size:
            raise SettingsError(
                f"teacher {folder} has {config.vocab_size} tokens, the student {student.vocab_size}; its whole "
                'distribution cannot be compared. Use distribution = "top_k".'
            )
        first = shard.tensor_rank * width
        num_rows = max(0, min(width, student.vocab_size - first))
        name = "model.embed_tokens.weight" if config.is_tied else "lm_head.weight"
        head = torch.zeros(width, config.hidden_size, dtype=plan.dtype)
        tensors = PolicyTensors(folder, config)
        head[:num_rows] = tensors.read(name, (first, 0), (num_rows, config.hidden_size), dtype=plan.dtype)
        heads.append(head.to(device))
    return heads
