"""Engines and a learner that sleep for as long as real ones would work, and record what they did when.

They replace vLLM and Megatron in the trainers; everything else is the trainers' own.
"""

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.ma  # otherwise numpy imports it on first use, during the first step
import torch
from _async_workload import Script
from _digits import END_TOKEN, FIRST_DIGIT

from rl_async_trainer.roles.learner import RunLearner
from rl_async_trainer.roles.rollouter import RunRollouter
from rl_core import Batch, Ragged
from rl_core.data import NO_VERSION, IntArray
from rl_core.weights import WeightReceipt, WeightUpdate
from rl_distill.checkpoints import PendingSave
from rl_distill.learner import Objective, StepResult
from rl_distill.learners import Learners
from rl_rollout.engines import GenerateRequest, Generation, ReplicatedEngine, ScriptedEngine


class SleepingEngine(ScriptedEngine):
    """A GPU with slots: a response takes its slot for its tokens times the seconds of one."""

    def __init__(self, script: Script, *, index: int) -> None:
        """Start without responses.

        Args:
            script: Lengths and costs.
            index: Names its trace.
        """
        super().__init__(self._play, end_token_ids=[END_TOKEN])
        self._plan = script
        self._index = index
        self._slots = asyncio.Semaphore(script.workload.engine.slots)
        self._stalled_s = 0.0
        self._swaps: list[tuple[float, int]] = []
        self._spans: dict[tuple[int, int], tuple[float, float]] = {}
        self._trace: list[tuple[float, float]] = []

    async def generate(self, request: GenerateRequest) -> list[Generation]:
        """Return scripted tokens, each with the version of the weights at its time."""
        generations = await super().generate(request)
        number = _number(request.input_ids)
        return [
            replace(one, policy_versions=self._versions(self._spans.pop((number, index)), len(one.token_ids)))
            for index, one in enumerate(generations)
        ]

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        """Replace the weights; nothing is decoded meanwhile."""
        swap_s = self._plan.workload.weights.swap_s
        self._stalled_s += swap_s
        await asyncio.sleep(swap_s)
        receipt = await super().update_weights(update)
        self._swaps.append((time.perf_counter(), update.version))
        return receipt

    async def close(self) -> None:
        """Write the trace."""
        await super().close()
        found = {"responses": self._trace, "updates": [at for at, _ in self._swaps]}
        write_trace(self._plan, f"engine-{self._index}", found)

    async def _play(self, request: GenerateRequest, index: int) -> list[int]:
        number = _number(request.input_ids)
        num_tokens = self._plan.lengths[number][index]
        async with self._slots:
            began_at, stalled_s = time.perf_counter(), self._stalled_s
            ends_at = began_at + num_tokens * self._plan.token_s
            while (rest_s := ends_at + self._stalled_s - stalled_s - time.perf_counter()) > 0:
                await asyncio.sleep(rest_s)
            span = (began_at, time.perf_counter())
        self._spans[number, index] = span
        self._trace.append(span)
        return [FIRST_DIGIT] * (num_tokens - 1) + [END_TOKEN]

    def _versions(self, span: tuple[float, float], num_tokens: int) -> IntArray:
        """Return the [num_tokens] int32 versions, by when each token was drawn."""
        began_at, ended_at = span
        drawn_at = began_at + (ended_at - began_at) * np.arange(num_tokens) / num_tokens
        times = [at for at, _ in self._swaps]
        versions = np.asarray([0, *(version for _, version in self._swaps)], dtype=np.int32)
        return versions[np.searchsorted(times, drawn_at, side="right")]


class SleepingPolicy:
    """A `Learner` whose step sleeps for the tokens of its batch."""

    def __init__(self, script: Script) -> None:
        """Start at step 0."""
        self.step = 0
        self.num_parameters = 1
        self.tied: Mapping[str, str] = {}
        self._plan = script
        self._trace: list[tuple[float, float]] = []
        self._staleness: list[float] = []

    def logprobs(self, batch: Batch, *, temperature: float = 1.0) -> Ragged:
        """Return the same logprobs as the scripted engine."""
        del temperature
        rows = [np.where(np.arange(len(row)), -1.0, 0.0) for row in batch.ragged("input_ids")]
        return Ragged.from_rows(rows, dtype="float32")

    def train_step(
        self,
        batch: Batch,
        objective: Objective,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        with_tokens: bool = False,
    ) -> StepResult:
        """Sleep."""
        del objective, temperature, with_entropy, with_tokens
        began_at = time.perf_counter()
        versions = [row[row != NO_VERSION] for row in batch.ragged("policy_versions")]
        self._staleness += [float(self.step - row.min()) for row in versions]
        ends_at = began_at + self._plan.train_s(len(batch.ragged("input_ids").values))
        while (rest_s := ends_at - time.perf_counter()) > 0:
            time.sleep(rest_s)
        self._trace.append((began_at, time.perf_counter()))
        self.step += 1
        return StepResult(step=self.step, loss=0.0, grad_norm=1.0, learning_rate=1e-6, metrics={})

    def export_weights(self) -> Mapping[str, torch.Tensor]:
        """One number: the steps."""
        return {"steps": torch.tensor([[float(self.step)]])}

    def save(self, directory: Path, *, in_background: bool = False) -> PendingSave:
        """One number."""
        del in_background
        (directory / "step").write_text(str(self.step))
        return PendingSave()

    def load(self, directory: Path) -> None:
        """As it was saved."""
        self.step = int((directory / "step").read_text())

    def offload(self) -> int:
        """Do nothing."""
        return 0

    def close(self) -> None:
        """Write the trace."""
        write_trace(self._plan, "learner", {"steps": self._trace, "staleness": self._staleness})


class ScriptedRollouter(RunRollouter):
    """The trainer's rollouter on engines that sleep."""

    def make_engine(self) -> ReplicatedEngine:
        """Return as many engines as the script has."""
        return make_engines(Script.read(self._settings.policy.path))


class ScriptedLearnerHost(RunLearner):
    """The trainer's learner host with a learner that sleeps."""

    def make_learners(self) -> Learners:
        """One policy, nothing else."""
        return make_learners(Script.read(self._settings.policy.path))


def make_engines(script: Script) -> ReplicatedEngine:
    """Return the engines of a run, not started."""
    return ReplicatedEngine([SleepingEngine(script, index=index) for index in range(script.num_engines)])


def make_learners(script: Script) -> Learners:
    """Return the learner of a run."""
    policy = SleepingPolicy(script)
    return Learners(policy=policy, reference=None, critic=None, close=policy.close)


def write_trace(script: Script, name: str, found: Mapping[str, object]) -> None:
    """Write the trace for the benchmark."""
    (script.trace / f"{name}.json").write_text(json.dumps(found))


def _number(input_ids: IntArray) -> int:
    """Of a prompt, whose text is its number."""
    return int("".join(str(token - FIRST_DIGIT) for token in input_ids.tolist()))
