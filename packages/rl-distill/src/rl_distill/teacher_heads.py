"""The teachers' output matrices beside a student, so that whole distributions never travel."""

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
    """A rank's slices of the teachers' output matrices [V of the slice, H].

    Rows of a teacher beyond the student's vocabulary, with which it is padded, are left out.

    Args:
        folders: Hugging Face folders of the teachers.
        student: What its config.json says.
        dtype: Of the matrices.
        device: Where to.
        rank: Which slice of the vocabulary.
        num_ranks: Slices, which are all equally long; the last is padded with zeros.

    Raises:
        SettingsError: A teacher knows fewer tokens than the student.
        DataError: A file or tensor is missing or torn.
    """
    width = -(-student.vocab_size // num_ranks)
    first = rank * width
    num_rows = max(0, min(width, student.vocab_size - first))
    heads = []
    for folder in folders:
        config = parse_policy_config(read_policy_config(folder))
        if config.vocab_size < student.vocab_size:
            raise SettingsError(
                f"teacher {folder} has {config.vocab_size} tokens, the student {student.vocab_size}; its whole "
                'distribution cannot be compared. Use distribution = "top_k".'
            )
        name = "model.embed_tokens.weight" if config.is_tied else "lm_head.weight"
        head = torch.zeros(width, config.hidden_size, dtype=dtype)
        rows = PolicyTensors(folder, config).read(name, (first, 0), (num_rows, config.hidden_size), dtype=dtype)
        head[:num_rows] = rows
        heads.append(head.to(device))
    return heads
