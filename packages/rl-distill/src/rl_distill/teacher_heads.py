"""Teachers' output matrices on the student's ranks, so that full distributions are never transferred."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from rl_core.errors import SettingsError
from rl_distill.architecture.policy_config import PolicyConfig, parse_policy_config, read_policy_config
from rl_distill.checkpoints.hf_folder import PolicyTensors


def read_heads(
    folders: Sequence[Path],
    student: PolicyConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    rank: int = 0,
    num_ranks: int = 1,
) -> list[Tensor]:
    """Read a rank's vocabulary slice [V of the slice, H] of each teacher's output matrix.

    A teacher's padding rows beyond the student's vocabulary are dropped.

    Args:
        folders: Hugging Face folders of the teachers.
        student: The student's configuration.
        dtype: Dtype of the matrices.
        device: Device of the matrices.
        rank: Index of the vocabulary slice.
        num_ranks: Number of slices of equal length; the last is padded with zeros.

    Raises:
        SettingsError: A teacher has a smaller vocabulary than the student.
        DataError: A file or tensor is missing or incomplete.
    """
    width = -(-student.vocab_size // num_ranks)
    first = rank * width
    num_rows = max(0, min(width, student.vocab_size - first))
    heads = []
    for folder in folders:
        config = parse_policy_config(read_policy_config(folder))
        if config.vocab_size < student.vocab_size:
            raise SettingsError(
                f"teacher {folder} has {config.vocab_size} tokens, the student {student.vocab_size}; their full "
                'distributions cannot be compared. Use distribution = "top_k".'
            )
        name = "model.embed_tokens.weight" if config.is_tied else "lm_head.weight"
        head = torch.zeros(width, config.hidden_size, dtype=dtype)
        rows = PolicyTensors(folder, config).read(name, (first, 0), (num_rows, config.hidden_size), dtype=dtype)
        head[:num_rows] = rows
        heads.append(head.to(device))
    return heads
