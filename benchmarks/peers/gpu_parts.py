"""Measurements of benchmarks/gpu.py other than steps: proven weight updates, top-k divergence, the queue."""

import asyncio
import gc
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from _distillation_workload import PRESETS, make_matrix, make_step
from _gpu_plan import GIB, make_rows
from _learner_protocol import peak_bytes, wait_for_device
from _our_clients import GROUP_SIZE, NAMES, TASK, batch_of, declare, issue
from _payload import NUM_PRODUCERS, SAMPLES_PER_PRODUCER, producer_rows
from distillation_side import SIDES, timed_step
from gpu_side import Job, Values
from our_learner import batch_of as learner_batch

from rl_core.queue import SharedMemoryQueue
from rl_core.weights import (
    BFLOAT16_TOLERANCES,
    PublishReport,
    TensorTransport,
    WeightTransport,
    publish_weights,
)
from rl_core.weights.ipc import HostMemory, IpcTransport
from rl_distill.learner import LearnerOptions
from rl_distill.learners import Learners
from rl_distill.megatron.learner import MegatronLearner
from rl_distill.objectives import supervised_objective
from rl_rollout.engines import RolloutEngine
from rl_rollout.engines.process import EnginePlacement, ProcessEngine
from rl_rollout.engines.transformers import TransformersEngine, TransformersOptions

ROUNDS = 3
CANARY_TOKENS, NUM_CANARIES = 32, 4


class Published:
    """Weight updates from a learner to the transformers engine, with the whole proof."""

    def __init__(self, job: Job) -> None:
        """Load the learner and run a step, so that its weights differ from the folder's."""
        self._job = job
        # Full recomputation in the one step: learner and engine share the memory that transformers' training needs.
        options = LearnerOptions(
            dtype="bfloat16", learning_rate=1e-4, recompute="full", num_threads=torch.get_num_threads()
        )
        policy = MegatronLearner(Path(job.policy), options)
        self._learners = Learners(policy=policy, reference=None, critic=None, close=policy.close)
        rows = make_rows("4k", job.config, seed=0, is_short=job.is_short)
        policy.train_step(learner_batch(rows).select(np.arange(1)), supervised_objective)
        give_back_memory()

    def measure(self, row: str) -> Values:
        """Return the median seconds from the learner's weights to their proof, including the engine's canary.

        Args:
            row: "publish_and_prove", to an engine in this process, or "to_a_process", which opens the same memory.
        """
        give_back_memory()
        options, folder = TransformersOptions(dtype="bfloat16"), Path(self._job.policy)
        if row == "publish_and_prove":
            return asyncio.run(self._published(TransformersEngine(folder, options), TensorTransport()))
        engine = ProcessEngine("transformers", folder, options, host=EnginePlacement(deadline_s=120))
        memory = HostMemory() if self._job.device.type == "cpu" else None
        transport = IpcTransport(keeps=False, memory=memory)
        try:
            return asyncio.run(self._published(engine, transport))
        finally:
            transport.close()

    def close(self) -> None:
        """Close the learner."""
        self._learners.close()

    async def _published(self, engine: RolloutEngine, transport: WeightTransport) -> Values:
        await engine.start()
        try:
            rounds = [await self._publish(engine, transport, version) for version in range(1, ROUNDS + 2)][1:]
        finally:
            await engine.close()
        seconds = {name: median(of[name] for of in rounds) for name in ("pack_s", "update_s", "proof_s", "wall_s")}
        last: PublishReport = rounds[-1]["report"]
        return {
            **seconds,
            "gb": last.size_bytes / 1e9,
            "gb_per_s": last.size_bytes / 1e9 / seconds["wall_s"],
            "num_tensors": last.num_tensors,
            "probe_max_diff": last.probe_max_diff,
            "canary_max_diff": last.canary_max_diff,
            "peak_memory_gib": peak_bytes() / GIB,
        }

    async def _publish(self, engine: RolloutEngine, transport: WeightTransport, version: int) -> dict[str, Any]:
        draw = np.random.default_rng(version)
        vocab_size = self._job.config["vocab_size"]
        canaries = [draw.integers(0, vocab_size, CANARY_TOKENS, dtype=np.int32) for _ in range(NUM_CANARIES)]
        wait_for_device()
        started = time.perf_counter()
        canary = self._learners.canary(canaries)
        update = self._learners.pack(transport, version=version)
        packed = time.perf_counter()
        report = await publish_weights(update, [engine], canary=canary, tolerances=BFLOAT16_TOLERANCES)
        wait_for_device()
        return {
            "pack_s": packed - started,
            "update_s": report.update_s,
            "proof_s": report.proof_s,
            "wall_s": time.perf_counter() - started,
            "report": report,
        }


def give_back_memory() -> None:
    """Release torch's cached memory, so that another process can use it."""
    gc.collect()
    torch.cuda.empty_cache()


class Distilled:
    """Top-k divergence over a vocabulary of 151,936, in chunks and with the full softmax."""

    def __init__(self, job: Job) -> None:
        """Create the output matrix."""
        self._preset = PRESETS["tiny" if job.is_short else "gpu"]
        self._device = job.device
        self._matrix = make_matrix(self._preset, job.device).requires_grad_()

    def measure(self, row: str) -> Values:  # noqa: ARG002 - there is one
        """Return our tokens per second, and the ratios to the full softmax."""
        found = {}
        for side, loss_of in SIDES.items():
            steps = [
                timed_step(loss_of, make_step(self._preset, seed=seed, device=self._device), self._matrix)
                for seed in range(ROUNDS + 1)
            ]
            found[side] = {
                "tokens_per_s": self._preset.num_tokens / median(step["step_s"] for step in steps[1:]),
                "peak_memory_gib": max(step["peak_bytes"] for step in steps) / GIB,
                "loss": steps[-1]["loss"],
            }
        ours, full = found["ours"], found["full_softmax"]
        return {
            **ours,
            "vocab_size": self._preset.vocab_size,
            "num_tokens": self._preset.num_tokens,
            "top_k": self._preset.top_k,
            "times_as_fast_as_full_softmax": ours["tokens_per_s"] / full["tokens_per_s"],
            "memory_of_full_softmax": ours["peak_memory_gib"] / max(full["peak_memory_gib"], 1e-9),
            "difference": abs(ours["loss"] - full["loss"]) / abs(full["loss"]),
        }

    def close(self) -> None:
        """Free the matrix."""
        del self._matrix


class Queued:
    """The transfer queue in shared memory: rows from a producer to the device."""

    def __init__(self, job: Job) -> None:
        """Start the queue's server."""
        declare()
        self._job = job
        self._num_producers = 1 if job.is_short else NUM_PRODUCERS
        self._queue = SharedMemoryQueue([TASK])

    def measure(self, row: str) -> Values:  # noqa: ARG002 - there is one
        """Return the median GB/s of a put, and from the lease until all columns are on the device."""
        rounds = [self._round(number) for number in range(ROUNDS + 1)][1:]
        num_bytes = rounds[0]["num_bytes"]
        put_s, taken_s = (median(of[name] for of in rounds) for name in ("put_s", "taken_s"))
        return {
            "put_s": put_s,
            "wall_s": taken_s,
            "gb": num_bytes / 1e9,
            "put_gb_per_s": num_bytes / 1e9 / put_s,
            "gb_per_s": num_bytes / 1e9 / taken_s,
        }

    def close(self) -> None:
        """End the server."""
        self._queue.close()

    def _round(self, number: int) -> dict[str, float]:
        batches = []
        for producer in range(self._num_producers):
            topic = f"r{number}/{producer}"
            issue(self._queue, topic, SAMPLES_PER_PRODUCER // GROUP_SIZE, GROUP_SIZE)
            batches.append(batch_of(producer_rows(producer), topic=topic, group_size=GROUP_SIZE))
        started = time.perf_counter()
        for batch in batches:
            self._queue.put_batch(batch)
        put = time.perf_counter()
        lease = self._queue.lease(TASK.name, groups=len(batches) * SAMPLES_PER_PRODUCER // GROUP_SIZE)
        columns = [torch.from_numpy(lease.batch.ragged(name).values).to(self._job.device) for name in NAMES.values()]
        wait_for_device()
        taken = time.perf_counter()
        self._queue.ack(lease)
        self._queue.forget_finished()
        num_bytes = sum(column.nbytes for column in columns)
        return {"put_s": put - started, "taken_s": taken - put, "num_bytes": num_bytes}
