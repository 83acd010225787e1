"""An engine, learners and teachers without models, which record what they are given."""

import asyncio
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel

from rl_core import Batch, Prompt, Ragged, Trajectory
from rl_core.data import FloatArray, IntArray
from rl_distill.learner import PendingSave, StepResult
from rl_distill.packing import pack_batch, unpack_trained
from rl_rollout.engines import EngineTraits, GenerateRequest, ScriptedEngine
from rl_rollout.loops import SingleTurnLoop

VOCAB_SIZE = 32
SECTIONS = ("RolloutSettings", "TrainerSettings", "MetricSettings", "AlgorithmSettings", "PromptSettings")
"""Records of settings that are passed on whole, so that receiving them proves nothing."""


def plain(value: Any) -> Any:
    """Return a value in comparable form; whole settings are left out."""
    if isinstance(value, BaseModel) or type(value).__name__ in SECTIONS:
        return "settings"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {type(value).__name__: {one.name: plain(getattr(value, one.name)) for one in dataclasses.fields(value)}}
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, np.ndarray | torch.Tensor):
        return np.asarray(value, dtype=np.float64).round(5).tolist()
    if isinstance(value, str | int | float | Path | None):
        return str(value)
    return type(value).__name__


class Trace:
    """Everything that the parts of a run were given, as a multiset, since parts run concurrently."""

    def __init__(self) -> None:
        self.entries: list[str] = []

    def add(self, what: str, *values: Any, **named: Any) -> None:
        """Record one fact."""
        self.entries.append(
            " ".join([what, *(str(plain(value)) for value in values), str(plain(named)) if named else ""])
        )


def scores_of(ids: IntArray) -> FloatArray:
    """Return logprobs that depend only on the tokens, the same from the engine and the learner."""
    found = -1.0 - 0.05 * (np.asarray(ids) % 7)
    found[0] = 0.0
    return found.astype(np.float32)


def response_of(request: GenerateRequest, index: int) -> list[int]:
    """Return a response that depends on everything that a request says."""
    sampling = request.samplings[index]
    start = int(np.sum(request.input_ids)) + 3 * index + (sampling.seed or 0)
    return [3 + (start + 5 * place) % 20 for place in range(2 + index % 3)]


class FakeEngine(ScriptedEngine):
    """Answers by arithmetic, and records its options, requests and sleep."""

    trace: Trace
    name: str

    def __init__(self, policy: Path, options: Any) -> None:
        self.trace.add("engine", self.name, Path(policy).name, options)
        super().__init__(
            response_of,
            end_token_ids=(2,),
            traits=EngineTraits(
                name=f"fake {self.name}",
                max_model_len=options.max_model_len or 64,
                vocab_size=VOCAB_SIZE,
                can_sleep=True,
                max_top_k=VOCAB_SIZE,
                max_lora_rank=options.max_lora_rank,
            ),
            score=scores_of,
        )

    async def generate(self, request: GenerateRequest) -> Any:
        self.trace.add("request", request.input_ids, request.num_samples, request.samplings)
        prompt = request.input_ids
        return [
            dataclasses.replace(one, logprobs=scores_of(np.concatenate([prompt, one.token_ids]))[len(prompt) :])
            for one in await super().generate(request)
        ]

    async def score(self, sequences: Sequence[IntArray], *, top_k: int = 0, with_experts: bool = False) -> Any:
        if top_k:
            self.trace.add("scored the top", top_k, len(sequences))
        else:
            self.trace.add("scored", len(sequences), list(sequences))
        return await super().score(sequences, top_k=top_k, with_experts=with_experts)

    async def update_weights(self, update: Any) -> Any:
        self.trace.add("weights", update.version, sorted(update.digests))
        return await super().update_weights(update)

    async def sleep(self, level: Any = 1) -> None:
        self.trace.add("engine sleeps", level)
        await super().sleep(level)


class TwoParts(SingleTurnLoop):
    """Gives each session a second trajectory, with another reward."""

    async def run_group(self, prompt: Prompt, *, num_sessions: int, context: Any) -> Any:
        found = await super().run_group(prompt, num_sessions=num_sessions, context=context)
        return [dataclasses.replace(one, trajectories=tuple(_halves(one.trajectories[0]))) for one in found]


def _halves(whole: Trajectory) -> Iterator[Trajectory]:
    """Yield a trajectory of the first trained token, and one of the others."""
    first = np.arange(len(whole.input_ids)) == whole.num_prompt_tokens
    for part, mask in enumerate((first, whole.loss_mask & ~first)):
        yield dataclasses.replace(
            whole,
            output_index=part,
            loss_mask=mask,
            rollout_logprobs=np.where(mask, whole.rollout_logprobs, 0).astype(np.float32),
            policy_versions=np.where(mask, whole.policy_versions, -1).astype(np.int32),
            reward=whole.reward + part,
        )


class FakeModel:
    """A policy, reference or critic that scores by arithmetic."""

    trace: Trace
    kind = "policy"
    num_parameters = 1000
    tied: Mapping[str, str] = {}

    def __init__(
        self,
        folder: Any,
        options: Any,
        *,
        ranks: Any = None,
        backend: str = "auto",
        lora: Any = None,
        average_decay: float = 0.0,
    ) -> None:
        self.trace.add(self.kind, Path(folder).name, options, backend, lora=lora, average_decay=average_decay)
        self.step = 0

    def reference(self) -> "FakeModel":
        self.trace.add("reference without adapter")
        return self

    def logprobs(self, batch: Batch, *, temperature: float = 1.0) -> Ragged:
        self.trace.add(f"{self.kind} scores", len(batch), sorted(batch.names), temperature=temperature)
        ids = batch.ragged("input_ids")
        shift = 0.25 if self.kind == "reference" else 0.02 if "loss_mask" in batch else 0.0  # a canary must agree
        found = np.concatenate([scores_of(row) for row in ids])
        return Ragged((found - shift * (ids.values % 3)).astype(np.float32), ids.offsets)

    def score(self, batch: Batch, *, top_k: int, **wanted: Any) -> tuple[Ragged, Ragged, None]:
        """Score as a teacher; the most likely tokens are the first ones of the vocabulary."""
        ids = batch.ragged("input_ids")
        self.trace.add(f"{self.kind} teaches", list(ids.values), top_k=top_k, **wanted)
        named = np.concatenate([ids.values[:, None], np.tile(np.arange(top_k), (len(ids.values), 1))], 1)
        logprobs = np.full(named.shape, -2.5, np.float32)
        return Ragged(logprobs, ids.offsets), Ragged(named.astype(np.int32), ids.offsets), None

    def values(self, batch: Batch) -> Ragged:
        ids = batch.ragged("input_ids")
        return Ragged(np.full(len(ids.values), 0.25, np.float32), ids.offsets)

    def train_step(self, batch: Batch, objective: Any, **options: Any) -> StepResult:
        pack = pack_batch(batch, max_tokens=1 << 20, device=torch.device("cpu"))[0]
        columns = {name: pack.micro_batch.columns[name] for name in sorted(pack.micro_batch.columns)}
        ids = pack.micro_batch.input_ids
        scored = (-1.3 - 0.07 * (ids % 5)).float().requires_grad_()
        self.trace.add(f"{self.kind} trains", len(batch), ids, columns, options)
        loss, sums = self._loss(scored, objective, pack.micro_batch)
        self.trace.add(f"{self.kind} loss", loss.detach(), scored.grad, sorted(sums))
        self.step += 1
        tokens = {"policy_logprobs": scored.detach(), "entropy": torch.ones(len(ids))}
        return StepResult(
            step=self.step,
            loss=float(loss.detach()),
            grad_norm=0.5,
            learning_rate=0.001,
            metrics={"actor/made_up": 1.0},
            tokens=unpack_trained([pack], [tokens], batch),
            computed_tokens=len(ids),
        )

    def _loss(self, scored: torch.Tensor, objective: Any, micro: Any) -> tuple[torch.Tensor, Mapping[str, Any]]:
        self.trace.add(f"{self.kind} objective", objective)
        if type(objective).__name__ == "DistillationObjective":
            return scored.sum(), {}
        entropy = scored * -0.5
        found, sums = objective(scored, *(() if self.kind == "critic" else (entropy,)), micro)
        found.backward()
        return found, sums

    def load_teacher_heads(self, folders: Sequence[Path]) -> None:
        self.trace.add("teacher heads", len(folders))

    def export_weights(self) -> dict[str, torch.Tensor]:
        return {"w": torch.ones(2, 2)}

    def export_base(self) -> dict[str, torch.Tensor]:
        return self.export_weights()

    def export_adapter(self) -> dict[str, torch.Tensor]:
        return {"w.lora_A": torch.ones(1, 2), "w.lora_B": torch.ones(2, 1)}

    def save(self, directory: Path, *, in_background: bool = False) -> PendingSave:
        self.trace.add(f"{self.kind} saved", in_background=in_background)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "learner.json").write_text("{}")
        return PendingSave()

    def load(self, directory: Path) -> None:
        self.trace.add("loaded", directory.name)

    def offload(self) -> int:
        self.trace.add(f"{self.kind} offloaded")
        return 0

    def close(self) -> None:
        """Nothing to free."""


class FakeReference(FakeModel):
    """A frozen reference."""

    kind = "reference"


class FakeCritic(FakeModel):
    """A critic."""

    kind = "critic"


class FakeRanks:
    """Ranks that run nothing."""

    trace: Trace

    def __init__(self, parallel: Any, **options: Any) -> None:
        self.trace.add("ranks", parallel, options)

    def check_alive(self) -> None:
        """All ranks are alive."""

    def gpu_use(self) -> list[Any]:
        return []

    def stacks(self, **_: Any) -> list[str]:
        return []

    def close(self) -> None:
        """Nothing to end."""


class FakeTeacherReplica:
    """A teacher that scores on a learner's layers."""

    trace: Trace

    def __init__(self, model: Path, place: Any) -> None:
        self.trace.add("megatron teacher", Path(model).name, place)
        raise BuiltError

    async def close(self) -> None:
        """Nothing to end."""


class BuiltError(Exception):
    """Ends a run when the part in question has been built."""


def module_with(name: str, **members: Any) -> ModuleType:
    """Return a module with these members."""
    module = ModuleType(name)
    vars(module).update(members)
    return module


async def nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""
    await asyncio.sleep(0)
