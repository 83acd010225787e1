"""Write docs/models.md from the family suite's table and recorded results: `nox -s docs -- --models`.

`RL_RECORD_FAMILIES=1 nox -s tests -- tests/test_families.py -m ""` records the results.
"""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "models.md"
TABLE = ROOT / "tests" / "support" / "families.py"
TEXT = ROOT / "tooling" / "models_page.md"
RESULTS = ROOT / "tests" / "golden" / "families.json"
MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
}


def capitalized(text: str) -> str:
    """Return a text as the beginning of a sentence; vLLM keeps its name."""
    return text if text.startswith("vLLM") else text[0].upper() + text[1:]


def page() -> str:
    """Return the page's text."""
    table, results = runpy.run_path(str(TABLE)), json.loads(RESULTS.read_text())
    names, unserved = table["FAMILIES"], table["UNSERVED"]
    notes = {reason: number for number, reason in enumerate(dict.fromkeys(unserved.values()), start=1)}
    parts = {
        "example": example(),
        "families": "\n".join(row(results[name], notes.get(unserved.get(name))) for name in names),
        "reasons": "\n".join(f"{number}. {capitalized(reason)}." for reason, number in notes.items()),
    }
    text = TEXT.read_text()
    for name, part in parts.items():
        text = text.replace(f"{{{name}}}", part)
    return text


def example() -> str:
    """Return what check-model prints about a model of 7B."""
    with tempfile.TemporaryDirectory() as here:
        folder = Path(here, "models", "Mistral-7B-v0.1")
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(MISTRAL))
        command = [sys.executable, "-m", "rl_sync_trainer.main", "check-model", str(folder.relative_to(here))]
        return subprocess.run(command, cwd=here, capture_output=True, text=True, check=True).stdout.rstrip()


def row(found: dict[str, Any], note: int | None) -> str:
    """Return a family's row.

    Args:
        found: Its recorded results.
        note: Number of the reason why vLLM does not serve it; None if it does.
    """
    cells = (
        f"`{found['architecture']}`",
        "packed" if found["packed"] else "padded",
        "shared" if found["prefixes"] else "",
        f"{found['logprobs']:.0e}",
        f"{found['served']:.0e}",
        "proven" if note is None else f"no ({note})",
        "yes" if found["adapters"] else "no",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page())
