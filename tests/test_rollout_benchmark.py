"""The rollout benchmark: a run of the smallest preset that times nothing of note."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = [sys.executable, str(ROOT / "benchmarks" / "rollout.py")]


def test_every_system_generates_and_the_report_has_what_is_promised(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    file = tmp_path / "results.json"
    words = ["--quick", "--workload", "ragged,weight_update", "--json", str(file)]
    done = subprocess.run([*PROGRAM, *words], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    rows = {(row["system"], row["workload"]): row for row in report["results"]}
    generated = {(system, "ragged") for system in ("ours", "vllm", "transformers")}
    assert rows.keys() == generated | {("ours", "weight_update"), ("copy", "weight_update")}
    assert all(row["wall_s"] > 0 for row in rows.values())
    assert all(rows[key]["tokens_per_s"] > 0 for key in generated)
    assert {(of["workload"], of["peer"]) for of in report["comparisons"]} == {
        ("ragged", "vllm"),
        ("ragged", "transformers"),
        ("weight_update", "copy"),
    }
    assert "targets" in done.stdout


def test_numbers_that_cannot_be_are_refused() -> None:
    done = subprocess.run([*PROGRAM, "--rounds", "0"], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "numbers must be at least 1" in done.stderr
