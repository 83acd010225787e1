"""Validation on the learner's side: an extra engine with exactly the validated step's weights."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from rl_async_trainer.messages import ValidationBatch
from rl_async_trainer.settings import AsyncSettings
from rl_core.data import NO_VERSION, IntArray
from rl_core.errors import NotReadyError
from rl_core.weights import TensorTransport, WeightUpdate, check_receipt
from rl_rollout import Rollout
from rl_rollout.engines import RolloutEngine, engine_class
from rl_rollout.rollouter import PolicyScores, policy_scores
from rl_trainer_parts.learning.parts import proof_tolerances
from rl_trainer_parts.rollouts.answers import Answer, answers_of
from rl_trainer_parts.rollouts.engines import engine_options
from rl_trainer_parts.rollouts.evaluation import answer_problems
from rl_trainer_parts.rollouts.inputs import read_tokenizer
from rl_trainer_parts.rollouts.setup import open_rollout

Export = Callable[[], Awaitable[tuple[Mapping[str, Any], Mapping[str, str]]]]
"""Returns the policy's tensors by name, and which names are tied to others."""


class LearnerValidation:
    """Answers validation prompts in the learner's process; its engine starts on first use.

    Attributes:
        doing: Work in progress; empty without any.
    """

    def __init__(self, settings: AsyncSettings) -> None:
        """Set the settings; the engine starts on first use."""
        self._settings = settings
        self._stack = ExitStack()
        self._engine: RolloutEngine | None = None
        self._rollout: Rollout | None = None
        self._held: dict[int, WeightUpdate] = {}
        self._step: int | None = None
        self._version = NO_VERSION
        self.doing = ""

    async def hold(self, step: int, *, version: int, export: Export) -> None:
        """Keep the current weights to answer a step's validation, while training continues."""
        tensors, tied = await export()
        self._held[step] = TensorTransport().pack(tensors, version=version, tied=tied)

    async def answer(self, batch: ValidationBatch) -> list[Answer]:
        """Answer prompts with the weights held for the batch's step.

        Raises:
            NotReadyError: No weights are held.
        """
        engine, rollout = await self._started()
        update = self._held.pop(batch.step, None)
        if update is not None:
            check_receipt(update, await engine.update_weights(update), tolerances=proof_tolerances(self._settings))
            self._step, self._version = batch.step, update.version
        elif batch.step != self._step:
            raise NotReadyError(f"no weights are held for the validation of step {batch.step}. Call `hold` first.")

        self.doing = f"answers validation batch {batch.number} of step {batch.step}"
        try:
            return answers_of(await answer_problems(self._settings, rollout, batch.prompts), source="learner")
        finally:
            self.doing = ""

    async def probe(self, step: int, sequences: Sequence[IntArray], top_k: int) -> PolicyScores:
        """Probe the policy that answered a step's validation.

        Args:
            step: Number of finished steps at that validation.
            sequences: [T] int32 each, tokens of a prompt and a response.
            top_k: Number of alternatives to return per token.

        Raises:
            NotReadyError: The engine has another step's weights, or was not started.
        """
        if self._engine is None or step != self._step:
            raise NotReadyError(f"the last validation here was not that of step {step}.")
        return await policy_scores(self._engine, sequences, top_k, version=self._version)

    async def close(self) -> None:
        """Stop the engine. Can be called twice."""
        self._stack.close()
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()

    async def _started(self) -> tuple[RolloutEngine, Rollout]:
        if self._engine is None or self._rollout is None:
            settings = self._settings
            options = engine_options(settings, serves_adapter=False)  # `hold` keeps merged weights
            self._engine = engine_class(settings.rollout.engine)(settings.policy.path, options)
            await self._engine.start()
            self._rollout = self._stack.enter_context(open_rollout(settings, read_tokenizer(settings), self._engine))
        return self._engine, self._rollout
