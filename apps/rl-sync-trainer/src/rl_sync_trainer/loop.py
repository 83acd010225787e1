"""The synchronous loop: rollouts, advantages, a learner step and a proven weight update, one after the other."""

import time
from dataclasses import replace

from rl_metrics.reductions import Recorder
from rl_sync_trainer.assemble import Parts, TrainerState
from rl_sync_trainer.stages import collect_step, evaluate, gpu_metrics, publish, record_step, rest_engine
from rl_trainer_parts.learning.step import learn
from rl_trainer_parts.reporting.rollout_rows import draft_rollouts
from rl_trainer_parts.reporting.step_metrics import with_speeds
from rl_trainer_parts.rollouts.evaluation import TESTING
from rl_trainer_parts.rollouts.setup import TRAIN


async def train(parts: Parts, state: TrainerState) -> TrainerState:
    """Train until the last step, or until validation ends the run.

    The run can resume from every state passed to `parts.on_state`.
    """
    settings, goal = parts.settings.trainer, parts.lifecycle.goal
    with parts.lifecycle.console.phase("sending the policy to the engine", is_brief=True):
        await publish(parts, state.policy_version)
    if state.step == 0 and settings.validate_first and not state.results:
        state, metrics = await evaluate(parts, state, splits=("validation", "test"))
        goal.noted(0, metrics)
        parts.lifecycle.trackers.log(0, metrics)
        parts.on_state(state)
    state = await finish_step(parts, state)
    while state.step < settings.steps and goal.stop_reason is None:
        parts.stop.check()
        state = await train_step(parts, state)
        parts.on_state(state)
        state = await finish_step(parts, state)
    return state


async def finish_step(parts: Parts, state: TrainerState) -> TrainerState:
    """Validate, log and checkpoint a trained step, unless already done.

    A run that was stopped during validation continues here. The metrics line is written before the checkpoint: if the
    run is killed between the two, it trains the step again and replaces the line. In the opposite order the line would
    be lost.
    """
    if state.unlogged is None:
        return state
    settings, goal = parts.settings.trainer, parts.lifecycle.goal
    metrics = dict(state.unlogged)
    is_last = state.step == settings.steps
    if is_last or is_due(state.step, settings.validate_every):
        state, validation = await evaluate(parts, state, splits=("validation",))
        goal.noted(state.step, validation)
        metrics |= validation
        is_last = is_last or goal.stop_reason is not None
    if is_last:
        state, test = await evaluate(parts, state, splits=("test",))
        tested_s = metrics.get(TESTING, 0.0) + test.get(TESTING, 0.0)
        metrics |= test | ({TESTING: tested_s} if tested_s else {})
    state = replace(state, unlogged=None)
    parts.lifecycle.trackers.log(state.step, metrics)
    parts.on_state(state)
    if is_last or is_due(state.step, settings.checkpoint_every) or goal.needs_checkpoint(state.step):
        parts.save_checkpoint(state)
    return state


async def train_step(parts: Parts, state: TrainerState) -> TrainerState:
    """One step: a batch of rollouts, its optimizer updates, and the new weights in the engine."""
    started, step, phase = time.perf_counter(), state.step + 1, parts.lifecycle.console.phase
    recorder = Recorder(strict=parts.settings.metrics.strict)
    with phase(f"rollouts of step {step}", is_brief=True):
        num_groups = await collect_step(parts, recorder, step=step)
    await rest_engine(parts)
    lease = parts.queue.lease(TRAIN, groups=num_groups, deadline_s=parts.settings.rollout.deadline_s)
    with phase(f"training step {step}", is_brief=True):
        trained, kl_state = learn(parts, lease.batch, recorder, step=step, kl_state=state.kl)
    parts.queue.ack(lease)
    version = state.policy_version + 1
    with recorder.timer("update_weights"), phase(f"sending version {version} to the engine", is_brief=True):
        await publish(parts, version, recorder)
    parts.queue.forget_finished()
    with recorder.timer("dump_rollout_generations"):
        drafts = draft_rollouts(parts.settings, trained, step=step, version=state.policy_version)
        parts.lifecycle.rollouts.write(drafts)
    recorder.record_all(await gpu_metrics(parts))
    step_s = time.perf_counter() - started
    record_step(parts, recorder, trained, step=step, version=state.policy_version, step_s=step_s)
    parts.lifecycle.trackers.log_histograms(step, recorder.histograms())
    return replace(
        state,
        step=step,
        policy_version=version,
        prompt_source=parts.source.state(),
        num_samples=state.num_samples + len(trained),
        steps_wall_s=state.steps_wall_s + step_s,
        kl=kl_state,
        unlogged=with_speeds(parts.settings, recorder.reduce(), trained),
    )


def is_due(step: int, every: int) -> bool:
    """True at each multiple of `every`; never if it is 0."""
    return every > 0 and step % every == 0
