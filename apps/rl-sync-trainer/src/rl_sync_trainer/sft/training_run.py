"""One launch of supervised training: start the learner, train, and leave a folder that can be resumed."""

import time
from contextlib import AsyncExitStack
from dataclasses import replace
from zlib import crc32

import numpy as np

from rl_core.errors import SettingsError
from rl_distill.learners import Learners
from rl_distill.objectives import supervised_objective, with_loss_weights
from rl_distill.skipping import SkippedUpdates
from rl_metrics.reductions import memory_metrics, summarize_gpus, summarize_speed
from rl_sync_trainer.assemble import TrainerState
from rl_sync_trainer.loop import is_due
from rl_sync_trainer.sft.demonstrations import SftInputs
from rl_sync_trainer.sft.settings import VALIDATION_LOSS, SftSettings
from rl_sync_trainer.training_run import LearnerRun
from rl_trainer_parts.run.folder import read_run_state
from rl_trainer_parts.run.stopping import StopRequestedError, StopSignal


class SftRun(LearnerRun):
    """One launch of supervised training, in a folder that this process has locked."""

    _settings: SftSettings
    _inputs: SftInputs

    async def run(self) -> int:
        """Train until the last step or a signal; return the exit status. See `RunLifecycle.launch`."""
        return await self._lifecycle.launch(self._train, lambda: self._state)

    async def _train(self, stack: AsyncExitStack, stop: StopSignal) -> None:
        lifecycle, settings, train = self._lifecycle, self._settings.trainer, self._inputs.train
        mark = {"fingerprint": [crc32(train.ragged(name).values) for name in ("input_ids", "loss_mask")]}
        self._state = TrainerState(prompt_source=mark)
        if (checkpoint := lifecycle.find_checkpoint()) is not None:
            self._state = read_run_state(checkpoint, TrainerState)
            if self._state.prompt_source != mark:
                raise SettingsError("the run's demonstrations have changed. Restore them, or start another run.")
            lifecycle.resumes(checkpoint, self._state)
            if lifecycle.says_done(self._state):
                return
        learners = self._start_learners(stack, checkpoint)
        self._skipped = SkippedUpdates(most=settings.max_skipped_updates, directory=self._folder.path / "skipped")
        lifecycle.begins(self._state, title="SFT")
        try:
            self._run_steps(learners, stop)
            lifecycle.store.wait()
        except StopRequestedError:
            self._save_stopped(learners)
            raise

    def _run_steps(self, learners: Learners, stop: StopSignal) -> None:
        """Train until the last step, or until validation ends the run; a signal stops it between two steps."""
        settings, goal, log = self._settings.trainer, self._lifecycle.goal, self._lifecycle.trackers.log
        if settings.validate_first and not self._state.step and not self._state.results:
            log(0, self._validate(learners))
        while (step := self._state.step + 1) <= settings.steps and goal.stop_reason is None:
            stop.check()
            metrics = self._train_step(learners)
            if step == settings.steps or is_due(step, settings.validate_every):
                metrics |= self._validate(learners)
            log(step, metrics)
            is_last = step == settings.steps or goal.stop_reason is not None
            if is_last or is_due(step, settings.checkpoint_every) or goal.needs_checkpoint(step):
                self._save(self._state, learners)

    def _train_step(self, learners: Learners) -> dict[str, float]:
        """Take one optimizer step, and return its metrics."""
        started, state, train, chosen = time.perf_counter(), self._state, self._inputs.train, self._settings.sft
        epoch, place = divmod(state.step, -(-len(train) // chosen.batch_size))
        order = np.arange(len(train))
        if chosen.shuffle:  # as `rl_rollout.prompts.PromptSource` orders prompts
            order = np.random.Philox(key=[self._settings.run.seed, epoch]).random_raw(len(train)).argsort(kind="stable")
        rows = order[place * chosen.batch_size : (place + 1) * chosen.batch_size]
        batch = with_loss_weights(train.select(rows), aggregation="token-mean")
        result = learners.policy.train_step(batch, supervised_objective)
        self._skipped.check(result, batch, what="policy")
        step, num_samples, step_s = state.step + 1, state.num_samples + len(batch), time.perf_counter() - started
        wall_s, num_tokens = state.steps_wall_s + step_s, len(batch.ragged("input_ids").values)
        self._state = replace(state, step=step, policy_version=step, num_samples=num_samples, steps_wall_s=wall_s)
        metrics = summarize_speed(num_tokens=num_tokens, num_trajectories=len(batch), step_s=step_s) | memory_metrics()
        metrics |= summarize_gpus("perf", learners.gpu_use())
        metrics |= {"timing_s/step": step_s, "training/epoch": epoch, "actor/skipped_updates": not result.is_applied}
        if result.is_applied:
            metrics |= {"sft/loss": result.loss, "sft/grad_norm": result.grad_norm, "sft/lr": result.learning_rate}
        return metrics

    def _validate(self, learners: Learners) -> dict[str, float]:
        """Mean cross entropy over the trained tokens of the validation; empty without one."""
        if self._inputs.validation is None:
            return {}
        rows = np.arange(len(self._inputs.validation))[: self._settings.prompts.validation_limit]
        batch = self._inputs.validation.select(rows)
        logprobs = learners.policy.logprobs(batch).values[batch.ragged("loss_mask").values]
        loss = -float(logprobs.mean(dtype=np.float64))
        metrics = {VALIDATION_LOSS: loss, "sft/validation_perplexity": float(np.exp(loss))}
        self._lifecycle.goal.noted(self._state.step, metrics)
        results = {"validation_loss_first": loss, **self._state.results, "validation_loss_last": loss}
        self._state = replace(self._state, results=results)
        return metrics
