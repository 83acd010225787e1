"""Checkpoints: format, atomic writing, and reading that never runs code."""

from rl_distill.background import PendingSave
from rl_distill.checkpoints.store import STATE_FILE, CheckpointStore, Saved, read_state, verify_checkpoint

__all__ = [
    "STATE_FILE",
    "CheckpointStore",
    "PendingSave",
    "Saved",
    "read_state",
    "verify_checkpoint",
]
