"""The rollout benchmark: its systems with vLLM, which quick runs skip, and refused arguments."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmark_modules import BENCHMARKS, load_benchmark

rollout = load_benchmark("rollout")
BOTH = """
import asyncio, json, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from _rollout_protocol import timed
from _rollout_workload import PRESETS, RAGGED, write_policy
from vllm_rollout import VLLM
from our_rollout import Ours
policy, tiny = Path(sys.argv[1]), PRESETS["tiny"]
write_policy(tiny, RAGGED, policy)
ours = Ours(policy, tiny, "vllm")
found = {"ours": timed(ours, tiny, seed=0), "update": ours.update()}
asyncio.run(ours._engine.close())  # vLLM keeps one engine's settings for its process
found["vllm"] = timed(VLLM(policy, tiny), tiny, seed=0)
(policy / "found.json").write_text(json.dumps(found))
"""


def test_both_systems_with_vllm_generate_and_ours_takes_weights(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    policy = tmp_path / "policy"
    command = [sys.executable, "-c", BOTH, str(policy), str(BENCHMARKS), str(BENCHMARKS / "peers")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((policy / "found.json").read_text())
    assert min(value for part in found.values() for value in part.values()) > 0
    speeds = {system: [(found[system]["wall_s"], found[system]["num_tokens"])] for system in ("ours", "vllm")}
    compared = rollout.compared("ragged", "vllm", speeds["ours"], speeds["vllm"], 0.95)
    assert (compared["workload"], compared["peer"]) == ("ragged", "vllm")
    assert compared["ratio"] > 0


def test_numbers_that_cannot_be_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert rollout.main(["--rounds", "0"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert "numbers must be at least 1" in err
