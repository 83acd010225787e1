"""One launch of supervised training: check, start the learner, train, and leave a folder that can be resumed."""

import time
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple
from zlib import crc32

import numpy as np

from rl_core import Batch
from rl_core.data import IntArray
from rl_core.errors import SettingsError
from rl_distill.learners import Learners
from rl_distill.objectives import supervised_objective, with_loss_weights
from rl_distill.skipping import SkippedUpdates
from rl_metrics.reductions import memory_metrics, summarize_gpus, summarize_speed
from rl_rollout.prompts import PromptTokenizer
from rl_sync_trainer.assemble import TrainerState
from rl_sync_trainer.loop import is_due
from rl_sync_trainer.sft.demonstrations import read_demonstrations
from rl_sync_trainer.sft.settings import VALIDATION_LOSS, SftSettings
from rl_sync_trainer.training_run import LearnerRun
from rl_trainer_parts.checks.all_checks import check_settings
from rl_trainer_parts.commands.train import Checked
from rl_trainer_parts.rollouts.inputs import check_vocabulary, read_tokenizer
from rl_trainer_parts.run.folder import read_run_state
from rl_trainer_parts.run.stopping import StopRequestedError, StopSignal


class SftInputs(NamedTuple):
    """Inputs of supervised training, checked.

    Attributes:
        tokenizer: The policy's tokenizer.
        train: Demonstrations to train on; see `read_demonstrations`.
        validation: Demonstrations whose loss is measured, if any.
    """

    tokenizer: PromptTokenizer
    train: Batch
    validation: Batch | None


def check_sft(settings: SftSettings, problems: Iterable[str]) -> Checked[SftSettings]:
    """Check supervised training, given problems that are known already, and read its demonstrations.

    Raises:
        SettingsError: A setting is impossible.
        DataError: A user's file cannot be used.
    """
    check_settings(settings, problems)
    tokenizer, held_out = read_tokenizer(settings), settings.prompts.validation
    check_vocabulary(settings, tokenizer)
    train = read_demonstrations(settings.prompts.train, tokenizer, settings)
    validation = None if held_out is None else read_demonstrations(held_out, tokenizer, settings)
    return settings.resolved(len(train)), SftInputs(tokenizer, train, validation), (), ()


def describe_sft(settings: SftSettings, inputs: SftInputs, _: object) -> str:
    """The plan as lines of text."""
    steps, epochs = settings.trainer.steps, settings.trainer.steps / settings.steps_per_epoch(len(inputs.train))
    lines = [
        f"{steps} steps of {settings.sft.batch_size} demonstrations, {epochs:.2f} epochs, in {settings.run_folder}"
    ]
    for name, batch in ((settings.prompts.train, inputs.train), (settings.prompts.validation, inputs.validation)):
        if batch is not None:
            mask = batch.ragged("loss_mask")
            lines += [f"{name}: {len(batch)} of at most {mask.lengths.max()} tokens, {mask.values.mean():.0%} trained"]
    return "\n".join([*lines, f"policy: {settings.policy.path}"])


class SftRun(LearnerRun):
    """One launch of supervised training, in a folder that this process has locked."""

    _settings: SftSettings
    _inputs: SftInputs

    async def _train(self, stack: AsyncExitStack, stop: StopSignal) -> None:
        lifecycle, checkpoint, train = self._lifecycle, self._lifecycle.find_checkpoint(), self._inputs.train
        mark = {"fingerprint": [crc32(train.ragged(name).values) for name in ("input_ids", "loss_mask")]}
        self._state = TrainerState(prompt_source=mark)
        if checkpoint is not None:
            self._state = read_run_state(checkpoint, TrainerState)
            if self._state.prompt_source != mark:
                raise SettingsError("the run's demonstrations have changed. Restore them, or start another run.")
            lifecycle.resumes(checkpoint, self._state)
            if lifecycle.says_done(self._state):
                return
        learners = self._start_learners(stack, checkpoint)
        most, directory = self._settings.trainer.max_skipped_updates, self._folder.path / "skipped"
        self._skipped = SkippedUpdates(most=most, directory=directory)
        lifecycle.begins(self._state, title="SFT")
        try:
            self._run_steps(learners, stop)
            lifecycle.store.wait()
        except StopRequestedError:
            self._save_stopped(learners)
            raise

    def _run_steps(self, learners: Learners, stop: StopSignal) -> None:
        """Train until the last step, or until validation ends the run; a signal stops it between two steps."""
        settings, goal, trackers = self._settings.trainer, self._lifecycle.goal, self._lifecycle.trackers
        if settings.validate_first and not self._state.step and not self._state.results:
            trackers.log(0, self._validate(learners))
        while self._state.step < settings.steps and goal.stop_reason is None:
            stop.check()
            metrics = self._train_step(learners)
            step = self._state.step
            if step == settings.steps or is_due(step, settings.validate_every):
                metrics |= self._validate(learners)
            trackers.log(step, metrics)
            is_last = step == settings.steps or goal.stop_reason is not None
            if is_last or is_due(step, settings.checkpoint_every) or goal.needs_checkpoint(step):
                self._save(self._state, learners)

    def _train_step(self, learners: Learners) -> dict[str, float]:
        """Take one optimizer step, and return its metrics."""
        started, state, train, chosen = time.perf_counter(), self._state, self._inputs.train, self._settings.sft
        epoch, place = divmod(state.step, self._settings.steps_per_epoch(len(train)))
        order = epoch_order(len(train), epoch, seed=self._settings.run.seed if chosen.shuffle else None)
        rows = order[place * chosen.batch_size : (place + 1) * chosen.batch_size]
        batch = with_loss_weights(train.select(rows), aggregation="token-mean")
        result = learners.policy.train_step(batch, supervised_objective)
        self._skipped.check(result, batch, what="policy")
        step, num_samples, step_s = state.step + 1, state.num_samples + len(batch), time.perf_counter() - started
        wall_s, num_tokens = state.steps_wall_s + step_s, len(batch.ragged("input_ids").values)
        self._state = replace(state, step=step, policy_version=step, num_samples=num_samples, steps_wall_s=wall_s)
        metrics = summarize_speed(num_tokens=num_tokens, num_trajectories=len(batch), step_s=step_s) | memory_metrics()
        metrics |= summarize_gpus("perf", learners.gpu_use())
        metrics |= {"timing_s/step": step_s, "training/epoch": float(epoch)}
        metrics |= {"sft/num_tokens": float(batch.ragged("loss_mask").values.sum())}
        metrics |= {"actor/skipped_updates": 0.0 if result.is_applied else 1.0}
        if result.is_applied:
            metrics |= {"sft/loss": result.loss, "sft/grad_norm": result.grad_norm, "sft/lr": result.learning_rate}
        return metrics

    def _validate(self, learners: Learners) -> dict[str, float]:
        """Mean cross entropy over the trained tokens of the validation; empty without one."""
        if self._inputs.validation is None:
            return {}
        batch, results = self._inputs.validation, self._state.results
        batch = batch.select(np.arange(min(len(batch), self._settings.prompts.validation_limit or len(batch))))
        logprobs = learners.policy.logprobs(batch).values[batch.ragged("loss_mask").values]
        loss = -float(logprobs.mean(dtype=np.float64))
        metrics = {VALIDATION_LOSS: loss, "sft/validation_perplexity": float(np.exp(loss))}
        self._lifecycle.goal.noted(self._state.step, metrics)
        results = {"validation_loss_first": results.get("validation_loss_first", loss), "validation_loss_last": loss}
        self._state = replace(self._state, results=results)
        return metrics


@lru_cache(maxsize=1)
def epoch_order(num_rows: int, epoch: int, *, seed: int | None) -> IntArray:
    """Order of the rows in an epoch, as of `rl_rollout.prompts.PromptSource`; without a seed that of the file."""
    words = np.arange(num_rows) if seed is None else np.random.Philox(key=[seed, epoch]).random_raw(num_rows)
    return np.argsort(words, kind="stable")
