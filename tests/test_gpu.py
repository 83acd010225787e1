"""The main path on a GPU: vLLM generates, Megatron trains, every update is proved. Run with `nox -s gpu`."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_run import make_tiny_run, train_here

from rl_core import Batch, Ragged, RowKey
from rl_distill.options import LearnerOptions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU; nox -s gpu needs its GPU build"),
]


def test_trains_and_proves_every_update(tmp_path: Path) -> None:
    run = make_tiny_run(tmp_path)
    words = {"rollout__engine": "vllm", "engine__enforce_eager": True, "engine__gpu_memory_utilization": 0.2}
    assert train_here(run, trainer__steps=2, learner__num_threads=None, engine__num_threads=None, **words) == 0
    rows = [json.loads(line) for line in (run.run_folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["weights/canary_max_diff"] < 1e-3 for row in rows[1:])


def test_learner_on_the_gpu_equals_transformers_on_the_cpu(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from rl_distill.megatron.learner import MegatronLearner

    run = make_tiny_run(tmp_path)
    draw = np.random.default_rng(0)
    rows = [draw.integers(2, 18, size=length).astype(np.int32) for length in (5, 9, 9, 14)]
    keys = [RowKey(f"row-{index}", 0, 0) for index in range(len(rows))]
    learner = MegatronLearner(run.folder / "policy", LearnerOptions())
    try:
        found = learner.logprobs(Batch(keys, {"input_ids": Ragged.from_rows(rows, dtype="int32")}))
    finally:
        learner.close()
    model = AutoModelForCausalLM.from_pretrained(run.folder / "policy", dtype=torch.float32)
    for row, logprobs in zip(rows, found, strict=True):
        ids = torch.from_numpy(row).long()[None]
        with torch.no_grad():
            expected = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        assert np.abs(logprobs[1:] - expected.numpy()).max() < 1e-3
