"""Roles of an asynchronous run without a model: responses follow a script, and the weights are a digest of the trained
rows, so a step that is skipped, repeated or trained on other rows shows in the last checkpoint.

Everything else is the trainer's own: its rollouter, its learner host, checkpoints, transports and queue.
"""

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_async_trainer.roles.learner import RunLearner
from rl_async_trainer.roles.rollouter import RunRollouter
from rl_async_trainer.roles.teachers import RunTeachers
from rl_core import Batch, Ragged
from rl_core.data.records import NO_VERSION, IntArray
from rl_core.errors import CheckpointError, EngineError
from rl_core.weights.update import InProcess, WeightReceipt, WeightUpdate
from rl_distill.learner import StepResult
from rl_distill.learners import Learners
from rl_rollout.engines.protocol import EngineTraits, GenerateRequest
from rl_rollout.engines.replicas.engine import ReplicatedEngine
from rl_rollout.engines.scripted import ScriptedEngine, honest_receipt
from rl_rollout.engines.weight_checks import update_tensors

FAULT_VARIABLE = "ASYNC_ROLES_FAULT"
"""Variable with a fault: "learner:3" raises in its third step, "engine:9" in all responses from the ninth on; "mortal
rollouter:1" and "mortal learner:1" kill themselves whenever they start."""
PIDS = "pids"
TRAITS = EngineTraits(name="scripted", max_model_len=1 << 20, vocab_size=32)
DIGEST_BYTES = 32
FIRST_TOKEN, NUM_TOKENS = 3, 12
"""The tiny tokenizer's tokens without the special ones."""


class ScriptedRollouter(RunRollouter):
    """The trainer's rollouter on a scripted engine in its own process."""

    def make_engine(self) -> ReplicatedEngine:
        """One engine whose responses depend only on prompt and seed; their durations vary."""
        begin_life(self._settings.run_folder, "rollouter")
        pace = random.Random()
        count = 0

        async def say(request: GenerateRequest, index: int) -> Sequence[int]:
            nonlocal count
            count += 1
            if faulty("engine", count):
                raise EngineError("the scripted engine failed.")
            sampling = request.samplings[index]
            response = response_of(request.input_ids, sampling.seed)[: sampling.max_tokens]
            await asyncio.sleep(0.002 * len(response) * pace.lognormvariate(0.0, 1.0))
            return response

        return ReplicatedEngine([ScriptedEngine(say, traits=TRAITS, receive=read_file)])


class ScriptedLearnerHost(RunLearner):
    """The trainer's learner host with a digest for a policy; it refuses rows that are older than the run allows."""

    def make_learners(self) -> Learners:
        """A policy that records its steps."""
        begin_life(self._settings.run_folder, "learner")
        policy = DigestPolicy(pace=random.Random())
        return Learners(policy=policy, reference=None, critic=None, close=policy.close)

    def rows(self, uids: Sequence[str], *, step: int, deadline_s: float) -> Batch:
        """Return the groups of a step; raise an error if one is older than the run allows."""
        rows = super().rows(uids, step=step, deadline_s=deadline_s)
        schedule = self._settings.schedule
        versions = rows.ragged("policy_versions").values
        oldest = versions[versions != NO_VERSION].min()
        version = (step - 1) // schedule.sync_every
        assert version - oldest <= schedule.max_staleness, f"step {step} got tokens of version {oldest} at {version}"
        return rows


class RaisingTeachers(RunTeachers):
    """Teachers that raise once a step's groups have arrived, so that the learner waits for their scores."""

    async def start(self) -> None:
        """Start nothing."""
        self._hears = asyncio.Event()

    async def serve(self) -> None:
        """Raise."""
        await self._hears.wait()
        groups = self._settings.rollout.prompts_per_step
        await asyncio.to_thread(self._queue.lease, "teacher", groups=groups)
        raise RuntimeError("the scripted teacher failed")

    async def issued(self) -> None:
        """Let `serve` lease the groups."""
        self._hears.set()


class DigestPolicy:
    """A `Learner` whose weights are the digest of all trained rows, in order."""

    tied: Mapping[str, str] = {}
    num_parameters = DIGEST_BYTES

    def __init__(self, *, pace: random.Random | None = None) -> None:
        """Start with an empty digest.

        Args:
            pace: Duration of steps and saves; None is 0.
        """
        self.step = 0
        self.digest = bytes(DIGEST_BYTES)
        self._pace = pace

    def train_step(self, batch: Batch, *_: Any, **__: Any) -> StepResult:
        """Add a step's rows to the digest."""
        self.step += 1
        if faulty("learner", self.step):
            raise RuntimeError("the scripted learner failed")
        rows = zip(batch.keys, batch.ragged("input_ids"), batch.ragged("loss_mask"), strict=True)
        self.learn(self.step, [(tuple(key), ids.tolist(), mask.tolist()) for key, ids, mask in rows])
        self._take_time()
        return StepResult(step=self.step, loss=0.0, grad_norm=1.0, learning_rate=1.0, metrics={})

    def learn(self, step: int, rows: Sequence[Any]) -> None:
        """Add rows, each (key, ids, mask), to the digest."""
        content = json.dumps([self.digest.hex(), step, rows]).encode()
        self.digest = blake2b(content, digest_size=DIGEST_BYTES).digest()
        self.step = step

    def logprobs(self, batch: Batch, *, temperature: float = 1.0) -> Ragged:
        """Return a scripted engine's logprobs of a sequence."""
        rows = [np.full(len(ids), -1.0, np.float32) for ids in batch.ragged("input_ids")]
        for row in rows:
            row[0] = 0.0
        return Ragged.from_rows(rows, dtype="float32")

    def export_weights(self) -> Mapping[str, torch.Tensor]:
        """The digest, as a matrix."""
        return {"digest.weight": torch.tensor(list(self.digest), dtype=torch.float32).reshape(1, -1)}

    def save(self, directory: Path, *, in_background: bool = False) -> "_Save":
        """Write the digest after a delay."""
        pending = _Save(directory / "digest.json", {"step": self.step, "digest": self.digest.hex()}, self._take_time)
        if not in_background:
            pending.wait()
        return pending

    def load(self, directory: Path) -> None:
        """Resume from `save`."""
        try:
            content = json.loads((directory / "digest.json").read_text())
            self.step, self.digest = int(content["step"]), bytes.fromhex(content["digest"])
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{directory} has no digest: {error!r}") from error

    def offload(self) -> int:
        """Nothing to free."""
        return 0

    def close(self) -> None:
        """Nothing to end."""

    def _take_time(self) -> None:
        if self._pace is not None:
            time.sleep(0.02 * self._pace.lognormvariate(0.0, 1.0))


class _Save:
    def __init__(self, file: Path, content: Mapping[str, Any], take_time: Callable[[], None]) -> None:
        self._file, self._content, self._take_time = file, dict(content), take_time

    def wait(self) -> None:
        """Write the file; later calls do nothing."""
        content, self._content = self._content, {}
        if content:
            self._take_time()
            self._file.write_text(json.dumps(content))


def response_of(prompt_ids: IntArray, seed: int | None) -> list[int]:
    """Return the scripted response to a prompt; lengths are long-tailed."""
    name = json.dumps([prompt_ids.tolist(), seed])
    draw = random.Random(name)
    length = max(1, min(64, int(2 * draw.lognormvariate(0.5, 1.0))))
    return [draw.randrange(FIRST_TOKEN, FIRST_TOKEN + NUM_TOKENS) for _ in range(length)]


def read_file(update: WeightUpdate) -> WeightReceipt:
    """Load an update from its file as a real engine does; the file must be complete."""
    return honest_receipt(replace(update, location=InProcess(tensors=update_tensors(update))))


def begin_life(run_folder: Path, role: str) -> None:
    """Record the process of a role, so that a test can kill it; kill a mortal role."""
    if faulty(f"mortal {role}", 1):
        print(f"the scripted {role} ends", flush=True)  # noqa: T201 - its last words
        os.kill(os.getpid(), signal.SIGKILL)
    folder = run_folder / PIDS
    folder.mkdir(exist_ok=True)
    part = folder / f".{role}"
    part.write_text(str(os.getpid()))
    part.replace(folder / role)


def faulty(who: str, count: int) -> bool:
    """Return True if the environment names this role, and the count has reached the one it names."""
    name, _, first = os.environ.get(FAULT_VARIABLE, "").partition(":")
    return name == who and count >= int(first)
