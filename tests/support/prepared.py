"""What examples prepare for a test: kept below .nox where it takes long, and without a trace in this process."""

import hashlib
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEARNER = ROOT / "packages" / "rl-distill" / "src"


def prepared_folder(name: str) -> Path:
    """A folder for what our learner prepares; another one when the learner's code has changed. It may not be there."""
    digest = hashlib.sha256()
    for file in sorted(LEARNER.rglob("*.py")):
        digest.update(file.read_bytes())
    folder = ROOT / ".nox" / "cache" / f"{name}-{digest.hexdigest()[:16]}" / "prepared"
    folder.parent.mkdir(parents=True, exist_ok=True)
    return folder


def prepare_here(prepare: Callable[[], None]) -> None:
    """Run an example's preparation, which takes two threads, and give later tests the number that they had."""
    import torch

    num_threads = torch.get_num_threads()
    try:
        prepare()
    finally:
        torch.set_num_threads(num_threads)
