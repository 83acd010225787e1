"""The main path on a GPU: an engine generates, Megatron trains, every update is proven. Run with `nox -s gpu`."""

import asyncio
import gc
import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_run import example_module, make_tiny_policy, make_tiny_run, train_here

from rl_core import Batch, Ragged, RowKey
from rl_distill.options import LearnerOptions
from rl_rollout.engines.transformers import TransformersEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU; nox -s gpu needs its GPU build"),
]


def engine_words() -> dict[str, object]:
    """Return settings for vLLM, or for transformers if vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        return {"rollout__engine": "transformers"}
    return {"rollout__engine": "vllm", "vllm__enforce_eager": True, "vllm__gpu_memory_utilization": 0.2}


def test_trains_and_proves_every_update(tmp_path: Path) -> None:
    run = make_tiny_run(tmp_path)
    words = {"optimizer__num_threads": None, "vllm__num_threads": None, **engine_words()}
    assert train_here(run, trainer__steps=2, **words) == 0
    rows = [json.loads(line) for line in (run.run_folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[1:]
    assert all(row["weights/canary_max_diff"] < 1e-3 for row in rows[1:])


def test_the_transformers_engine_takes_the_gpu(tmp_path: Path) -> None:
    engine = TransformersEngine(make_tiny_run(tmp_path).folder / "policy")
    asyncio.run(engine.start())
    assert "cuda" in engine.traits.name
    asyncio.run(engine.close())


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
    model = AutoModelForCausalLM.from_pretrained(run.folder / "policy", dtype=torch.float32, trust_remote_code=False)
    for row, logprobs in zip(rows, found, strict=True):
        ids = torch.from_numpy(row).long()[None]
        with torch.no_grad():
            expected = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        assert np.abs(logprobs[1:] - expected.numpy()).max() < 1e-3


def gpu_batch(*, seed: int = 0) -> Batch:
    draw = np.random.default_rng(seed)
    rows = [draw.integers(2, 18, size=length).astype(np.int32) for length in (5, 9, 30, 14, 21)]
    ids = Ragged.from_rows(rows, dtype="int32")
    mask = Ragged(np.concatenate([np.arange(len(row)) > 1 for row in rows]), ids.offsets)
    weights = Ragged((mask.values / mask.values.sum()).astype(np.float32), ids.offsets)
    keys = [RowKey(f"row-{index}", 0, 0) for index in range(len(rows))]
    return Batch(keys, {"input_ids": ids, "loss_mask": mask, "loss_weights": weights})


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 3e-2)])
def test_steps_on_the_gpu_are_the_reference_learners(dtype: str, tolerance: float, tmp_path: Path) -> None:
    from torch_learner import TorchLearner

    from rl_distill.megatron.learner import MegatronLearner
    from rl_distill.objectives import supervised_objective

    run = make_tiny_run(tmp_path)
    options = LearnerOptions(learning_rate=1e-3, micro_batch_tokens=40, dtype=dtype)
    ours = MegatronLearner(run.folder / "policy", options)
    reference = TorchLearner(run.folder / "policy", options, device=torch.device("cuda"))
    for step in range(3):
        found, expected = (x.train_step(gpu_batch(seed=step), supervised_objective) for x in (ours, reference))
        assert found.loss == pytest.approx(expected.loss, rel=tolerance)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=10 * tolerance)
    ours.close()


def test_an_offloaded_learner_leaves_the_gpu_and_comes_back(tmp_path: Path) -> None:
    from rl_distill.megatron.learner import MegatronLearner
    from rl_distill.objectives import supervised_objective

    run = make_tiny_run(tmp_path)
    learner, other = (MegatronLearner(run.folder / "policy", LearnerOptions(learning_rate=1e-3)) for _ in range(2))
    for step in range(3):
        before = torch.cuda.memory_allocated()
        assert learner.offload() >= 4 * learner.num_parameters
        assert torch.cuda.memory_allocated() <= before - 4 * learner.num_parameters
        found, expected = (x.train_step(gpu_batch(seed=step), supervised_objective) for x in (learner, other))
        assert found.loss == pytest.approx(expected.loss, rel=1e-4)  # a GPU sums gradients in any order
    learner.close()
    other.close()


def forest_batch(*, seed: int = 0) -> Batch:
    """Return sessions of two prompts, with a second fork and turns of one token, and a row of a third prompt."""
    draw = np.random.default_rng(seed)
    first, second, alone = (draw.integers(2, 18, size=size) for size in (140, 33, 90))
    fork = np.concatenate([first, draw.integers(2, 18, size=30)])
    starts = [(0, first), (0, fork), (0, fork), (0, first), (1, second), (1, second), (2, alone)]
    tails = [draw.integers(2, 18, size=size) for size in (9, 1, 70, 130, 5, 1, 8)]
    rows = [np.concatenate([start, tail]) for (_, start), tail in zip(starts, tails, strict=True)]
    ids = Ragged.from_rows(rows, dtype="int32")
    mask = Ragged(np.concatenate([np.arange(len(row)) > 1 for row in rows]), ids.offsets)
    weights = Ragged((mask.values / mask.values.sum()).astype(np.float32), ids.offsets)
    keys = [RowKey(f"prompt-{prompt}", index, 0) for index, (prompt, _) in enumerate(starts)]
    return Batch(keys, {"input_ids": ids, "loss_mask": mask, "loss_weights": weights})


def test_flash_attention_over_a_forest_is_that_of_rows_in_buckets(tmp_path: Path) -> None:
    from rl_distill.megatron.learner import MegatronLearner
    from rl_distill.objectives import supervised_objective

    run = make_tiny_run(tmp_path)
    options = LearnerOptions(learning_rate=1e-3, micro_batch_tokens=400, dtype="bfloat16")
    flash = MegatronLearner(run.folder / "policy", options)
    buckets = MegatronLearner(run.folder / "policy", replace(options, kernels="plain"))
    for step in range(3):
        batch = forest_batch(seed=step)
        scores = [learner.logprobs(batch).values for learner in (flash, buckets)]
        assert np.abs(scores[0] - scores[1]).mean() < 1e-2
        found, expected = (x.train_step(batch, supervised_objective) for x in (flash, buckets))
        assert found.loss == pytest.approx(expected.loss, rel=3e-2)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=0.3)
        assert found.computed_tokens < expected.computed_tokens == len(batch.ragged("input_ids").values)
    flash.close()
    buckets.close()


def warm_up(policy: Path, options: LearnerOptions) -> None:
    """Take a step and free the learner, so that cuBLAS and compiled code already hold the memory that they keep."""
    from rl_distill.megatron.learner import MegatronLearner
    from rl_distill.objectives import supervised_objective

    learner = MegatronLearner(policy, options)
    learner.train_step(gpu_batch(), supervised_objective)
    learner.close()


@pytest.mark.parametrize(("dtype", "num_bytes", "tolerance"), [("float32", 8, 1e-5), ("bfloat16", 12, 1e-2)])
def test_an_optimizer_on_the_host_leaves_the_gpu_between_steps(
    dtype: str, num_bytes: int, tolerance: float, tmp_path: Path
) -> None:
    from rl_distill.megatron.learner import MegatronLearner
    from rl_distill.objectives import supervised_objective

    run = make_tiny_run(tmp_path)
    losses, allocated = [], []
    warm_up(run.folder / "policy", LearnerOptions(dtype=dtype))
    for offloads in (False, True):
        options = LearnerOptions(learning_rate=1e-3, dtype=dtype, offload_optimizer=offloads)
        gc.collect()  # frees the previous learner
        before = torch.cuda.memory_allocated()
        learner = MegatronLearner(run.folder / "policy", options)
        losses.append([learner.train_step(gpu_batch(seed=step), supervised_objective).loss for step in range(3)])
        allocated.append(torch.cuda.memory_allocated() - before)
        size = num_bytes * learner.num_parameters  # Adam's moments; for bfloat16 also float32 weights
        learner.save(tmp_path / f"saved-{offloads}")
        learner.load(tmp_path / f"saved-{offloads}")
        losses[-1].append(learner.train_step(gpu_batch(), supervised_objective).loss)
        learner.close()
        del learner  # otherwise it is freed while the next one is measured
    assert losses[1] == pytest.approx(losses[0], rel=tolerance)
    assert allocated[0] - allocated[1] >= size


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parts_that_are_computed_again_on_the_gpu_learn_the_same_and_keep_less(dtype: str, tmp_path: Path) -> None:
    from rl_distill.megatron.learner import MegatronLearner
    from rl_distill.objectives import supervised_objective

    run = make_tiny_run(tmp_path)
    losses, peaks = [], []
    warm_up(run.folder / "policy", LearnerOptions(dtype=dtype))
    for modules in ((), ("layernorm",), ("mlp",), ("core_attn", "layernorm", "mlp")):
        selective = {"recompute": "selective", "recompute_modules": modules} if modules else {}
        gc.collect()
        before = torch.cuda.memory_allocated()
        learner = MegatronLearner(run.folder / "policy", LearnerOptions(learning_rate=1e-3, dtype=dtype, **selective))
        losses.append([learner.train_step(gpu_batch(seed=step), supervised_objective).loss for step in range(3)])

        def objective(*args: Any) -> Any:
            peaks.append(torch.cuda.memory_allocated() - before)  # noqa: B023 - between the passes of this learner
            return supervised_objective(*args)

        learner.train_step(gpu_batch(), objective)
        learner.close()
        del learner  # otherwise it is freed while the next one is measured
    for found in losses[1:]:
        assert found == pytest.approx(losses[0], rel=1e-5 if dtype == "float32" else 1e-2)
    assert max(peaks[1:]) < peaks[0]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two ranks over NCCL need two GPUs")
def test_two_gpus_overlap_their_sums_and_gathers(tmp_path: Path) -> None:
    from rl_core.cluster import ClusterOptions, ResourcePool
    from rl_distill.megatron.learner import MegatronLearner
    from rl_distill.megatron.ranks import LearnerRanks
    from rl_distill.objectives import supervised_objective
    from rl_distill.options import ParallelOptions

    run = make_tiny_run(tmp_path)
    plain = LearnerOptions(learning_rate=1e-3, micro_batch_tokens=40, clip_grad=0.0)
    options = replace(plain, overlap_grad_reduce=True, overlap_param_gather=True)
    layout = ParallelOptions(ranks=2, distributed_optimizer=True)
    pool = ResourcePool(name="learner", size=2, gpus=1)
    ranks = LearnerRanks(layout, cluster=ClusterOptions(kind="process"), pool=pool)
    learner, other = (
        MegatronLearner(run.folder / "policy", of, ranks=ranks, name=name)
        for name, of in (("overlapping", options), ("plain", plain))
    )
    for step in range(3):
        found, expected = (x.train_step(gpu_batch(seed=step), supervised_objective) for x in (learner, other))
        assert found.loss == pytest.approx(expected.loss, rel=1e-5)
        weights, wanted = learner.export_weights(), other.export_weights()
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, wanted[name], rtol=1e-4, atol=1e-5)
    ranks.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two ranks over NCCL need two GPUs")
def test_two_gpus_are_one(tmp_path: Path) -> None:
    from rl_core.cluster import ClusterOptions, ResourcePool
    from rl_distill.megatron.learner import MegatronLearner
    from rl_distill.megatron.ranks import LearnerRanks
    from rl_distill.objectives import supervised_objective
    from rl_distill.options import ParallelOptions

    run = make_tiny_run(tmp_path)
    alone = MegatronLearner(run.folder / "policy", LearnerOptions(learning_rate=1e-3))
    pool = ResourcePool(name="learner", size=2, gpus=1)
    for layout in (
        ParallelOptions(ranks=2, tensor=2, sequence=True),
        ParallelOptions(ranks=2, pipeline=2),
        ParallelOptions(ranks=2, context=2, distributed_optimizer=True),
    ):
        ranks = LearnerRanks(layout, cluster=ClusterOptions(kind="process"), pool=pool)
        together = MegatronLearner(run.folder / "policy", LearnerOptions(learning_rate=1e-3), ranks=ranks)
        assert np.abs(together.logprobs(gpu_batch()).values - alone.logprobs(gpu_batch()).values).max() < 1e-3
        found = together.train_step(gpu_batch(), supervised_objective)
        ranks.close()
        assert np.isfinite(found.grad_norm)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 5e-2)])
@pytest.mark.parametrize("loss", ["forward_kl", "reverse_kl", "js"])
@pytest.mark.parametrize("distribution", ["top_k", "full"])
def test_distillation_on_the_gpu_is_the_reference_learners(
    loss: str, distribution: str, dtype: str, tolerance: float, tmp_path: Path
) -> None:
    from torch_learner import TorchLearner

    from rl_distill.megatron.learner import MegatronLearner, MegatronTeacherModel
    from rl_distill.objectives.distillation import DistillationObjective, DistillationObjectiveOptions

    run, teacher = make_tiny_run(tmp_path), tmp_path / "teacher"
    make_tiny_policy(teacher, example_module("prepare").make_tokenizer(), seed=1)
    options = LearnerOptions(learning_rate=1e-3, micro_batch_tokens=40, dtype=dtype)
    batch = gpu_batch()
    model = MegatronTeacherModel(teacher, options)
    logprobs, ids, hidden = model.score(batch, top_k=6, has_hidden=True)
    model.close()
    assert hidden is not None
    index = np.where(batch.ragged("loss_mask").values, 0, -1).astype(np.int16)
    taught = batch.with_columns(
        {
            "teacher_logprobs": logprobs,
            "teacher_ids": ids,
            "teacher_hidden": hidden,
            "teacher_index": Ragged(index, ids.offsets),
        }
    )
    objective = DistillationObjective(DistillationObjectiveOptions(loss=loss, distribution=distribution))
    ours = MegatronLearner(run.folder / "policy", options)
    reference = TorchLearner(run.folder / "policy", options, device=torch.device("cuda"))
    for learner in (ours, reference):
        learner.load_teacher_heads([teacher])
    found, expected = (learner.train_step(taught, objective) for learner in (ours, reference))
    assert found.loss == pytest.approx(expected.loss, rel=tolerance, abs=tolerance)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=10 * tolerance)
    ours.close()
