"""Prepare examples for tests: slow ones are kept below .nox, and this process is left unchanged."""

import hashlib
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEARNER = ROOT / "packages" / "rl-distill" / "src"


def prepared_folder(name: str) -> Path:
    """Return the folder for an example that our learner prepares, by the learner's code; it may not exist."""
    digest = hashlib.sha256()
    for file in sorted(LEARNER.rglob("*.py")):
        digest.update(file.read_bytes())
    folder = ROOT / ".nox" / "cache" / f"{name}-{digest.hexdigest()[:16]}" / "prepared"
    folder.parent.mkdir(parents=True, exist_ok=True)
    return folder


def prepare_here(prepare: Callable[[], None]) -> None:
    """Run an example's preparation, which uses two threads, and restore the number of threads."""
    import torch

    num_threads = torch.get_num_threads()
    try:
        prepare()
    finally:
        torch.set_num_threads(num_threads)
