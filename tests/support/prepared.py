"""What takes long to prepare for a test, kept below .nox between runs."""

import hashlib
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
