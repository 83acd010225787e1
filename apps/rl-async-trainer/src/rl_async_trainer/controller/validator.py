"""Run validations: send prompts in batches and summarise the answers."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from rl_async_trainer.controller.links import LearnerLink, RollouterLink
from rl_async_trainer.controller.parts import ControllerParts
from rl_async_trainer.messages import ValidationBatch
from rl_async_trainer.record import AsyncState
from rl_core import Prompt
from rl_core.cluster import RoleRestartedError
from rl_core.data import NO_VERSION, IntArray
from rl_metrics.run_files import GenerationSample
from rl_metrics.targets import EXACT
from rl_rollout.rollouter import PolicyScores
from rl_trainer_parts.reporting.failed_sessions import FailedSessions
from rl_trainer_parts.rollouts.answers import Answer
from rl_trainer_parts.rollouts.evaluation import draw_samples, measure_splits, summarize_answers, with_results


class Validator:
    """Runs one validation after the other, while training continues or waits.

    Attributes:
        failed: Has the error of a background validation.
    """

    def __init__(self, parts: ControllerParts, answerer: RollouterLink | LearnerLink) -> None:
        """Set who answers: the engines or the learner's side."""
        self._settings = parts.settings
        self._inputs = parts.inputs
        self._parts = parts
        self._answerer = answerer
        self._tasks: list[asyncio.Task[None]] = []
        self._lock = asyncio.Lock()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def has_problems(self) -> bool:
        """False if there is nothing to validate on during training."""
        return self._inputs.validation is not None

    async def run(self, step: int, *, splits: Sequence[str]) -> dict[str, float]:
        """Evaluate the current policy and return its metrics.

        Args:
            step: Number of finished steps.
            splits: Which of "validation" and "test" to evaluate, if the run has them.

        Raises:
            RoleRestartedError: The learner's side answered and died.
        """
        lifecycle = self._parts.lifecycle

        async def measure(split: str, problems: Sequence[Prompt]) -> dict[str, float]:
            batches = split_batches(split, step, problems, size=self._settings.schedule.validation_batch)
            answers = await self._answers(batches)
            metrics, samples = await asyncio.to_thread(self._summarize, batches, answers)
            FailedSessions.among(answers).tell(lifecycle.say, step=step, during=split)
            if samples:
                lifecycle.trackers.log_generations(step, f"{split}/generations", samples)
            if split == "validation":
                metrics[EXACT] = float(self._is_exact(step, metrics))
                await lifecycle.probes.ask(partial(self._scores, step), answers, step=step)
            return metrics

        async with self._lock:
            return await measure_splits(self._settings, self._inputs, splits, measure)

    def begin(
        self,
        step: int,
        on_validated: Callable[[int, dict[str, float]], Awaitable[None]],
        *,
        until_ready: Callable[[], Awaitable[None]],
    ) -> None:
        """Evaluate in the background, as soon as the weights are there; `on_validated` receives the metrics.

        If the learner's side dies meanwhile, this validation is abandoned: the controller restarts it or trains the
        step again.
        """

        async def work() -> None:
            try:
                await until_ready()
                await on_validated(step, await self.run(step, splits=("validation",)))
            except RoleRestartedError:
                return
            except Exception as error:
                if not self.failed.done():
                    self.failed.set_exception(error)

        self._tasks = [task for task in self._tasks if not task.done()]
        self._tasks.append(asyncio.create_task(work()))

    async def wait(self) -> None:
        """Wait for running validations.

        Raises:
            Exception: The error that ended one.
        """
        await asyncio.gather(*self._tasks)
        if self.failed.done():
            self.failed.result()

    async def cancel(self) -> None:
        """Cancel running validations."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.failed.cancel()

    def noted(self, state: AsyncState, step: int, metrics: Mapping[str, float]) -> AsyncState:
        """A run's state with a validation's results."""
        results = with_results(self._settings, state.results, metrics)
        return replace(state, results=results, validated=max(step, state.validated))

    def can_be_exact(self, step: int) -> bool:
        """Whether this step's own weights can answer: the engines never serve those between two versions."""
        options = self._settings.schedule_options
        is_served = step % options.sync_every == 0 or step >= options.num_steps
        return is_served or self._settings.schedule.validate_on == "learner"

    def _is_exact(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Whether this step's own weights sampled every token."""
        version = self._settings.schedule_options.version_after(step)
        sampled = {metrics.get(f"validation/policy_version/{which}") for which in ("min", "max")}
        return sampled == {version} and self.can_be_exact(step)

    async def _answers(self, batches: list[ValidationBatch]) -> list[Answer]:
        """Answers to all prompts, in order."""
        answers: list[Answer] = []
        for batch in batches:
            answers += await self._answerer.validate(batch)
            which = f"batch {batch.number + 1} of {len(batches)}"
            self._parts.progress(f"{which} of the {batch.split} of step {batch.step}")
        return answers

    async def _scores(self, step: int, sequences: Sequence[IntArray], top_k: int) -> PolicyScores:
        """Probe the policy; empty if the process that can answer has died and will be asked at the next validation."""
        scores = await self._answerer.probe(step, sequences, top_k)
        return PolicyScores(version=NO_VERSION, scores=()) if scores is None else scores

    def _summarize(
        self, batches: list[ValidationBatch], answers: list[Answer]
    ) -> tuple[dict[str, float], list[GenerationSample]]:
        """Metrics of the answers, and samples for the trackers."""
        settings = self._settings
        metrics = summarize_answers(answers) | version_metrics(answers)
        if not settings.metrics.log_val_generations:
            return metrics, []
        number_of = {prompt.uid: batch.number for batch in batches for prompt in batch.prompts}
        return metrics, draw_samples(settings, answers, self._inputs.tokenizer, batches=number_of)


def split_batches(split: str, step: int, prompts: Sequence[Prompt], *, size: int | None) -> list[ValidationBatch]:
    """Prompts in batches of a fixed size; the last one has the rest."""
    size = size or max(len(prompts), 1)
    return [
        ValidationBatch(split=split, step=step, number=start // size, prompts=tuple(prompts[start : start + size]))
        for start in range(0, len(prompts), size)
    ]


def version_metrics(answers: Sequence[Answer]) -> dict[str, float]:
    """Policy versions that answered."""
    versions = [answer.trajectory.policy_versions for answer in answers]
    sampled = np.concatenate(versions) if versions else np.empty(0, dtype=np.int32)
    sampled = sampled[sampled != NO_VERSION]
    if not len(sampled):
        return {}
    return {
        "validation/policy_version/min": float(sampled.min()),
        "validation/policy_version/max": float(sampled.max()),
    }
