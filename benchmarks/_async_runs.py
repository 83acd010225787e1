"""Run one of the trainers on scripted parts, in its own folder, and summarize the run."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _async_parts import make_engines, make_learners
from _async_workload import Plan, Script, bound_of
from _digits import FIRST_DIGIT, write_tokenizer

from rl_async_trainer.settings import AsyncSettings
from rl_async_trainer.training_run import AsyncTrainingRun
from rl_core import InProcessQueue
from rl_core.weights import TensorTransport
from rl_distill.skipping import SkippedUpdates
from rl_metrics.run_files import read_json_lines
from rl_rollout.prompts import PromptSource
from rl_rollout.simulation import Workload
from rl_sync_trainer.assemble import Parts, TrainerState
from rl_sync_trainer.loop import train
from rl_trainer_parts.reporting.step_metrics import make_memory_watch
from rl_trainer_parts.reporting.trackers import make_console
from rl_trainer_parts.rollouts.inputs import Inputs, read_inputs
from rl_trainer_parts.rollouts.setup import open_rollout, queue_tasks
from rl_trainer_parts.rollouts.skip_cache import SkipCacheReplay
from rl_trainer_parts.run.folder import RunFolder, open_run
from rl_trainer_parts.run.lifecycle import RunLifecycle
from rl_trainer_parts.run.stopping import StopSignal
from rl_trainer_parts.settings.schema import Settings

SYNC, ASYNC = "sync", "async"
MODES = (SYNC, ASYNC)
FACTORIES = {"rollouter": "_async_parts:ScriptedRollouter", "learner": "_async_parts:ScriptedLearnerHost"}

WORK: dict[str, Callable[[Mapping[str, float]], float]] = {
    SYNC: lambda step: step["timing_s/adv"] + step["timing_s/update_actor"],
    ASYNC: lambda step: step["perf/total_num_tokens"] / step["perf/trainer_tokens_per_s"],
}
"""Metrics with the seconds in which the learner works on a step whose rows have all arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run.

    Attributes:
        mode: "sync" or "async".
        wall_s: Seconds from the first request to an engine until all engines have the last weights.
        steps: Number of trained steps.
        idle_learner: Share of wall_s in which the learner worked on no step, from the trainer's metrics.
        slept_learner: Share of wall_s in which the learner slept for a step; the rest is idle time and overhead.
        idle_engine: Share of wall_s in which an engine decoded nothing, averaged over the engines.
        slots_used: Mean share of slots in use.
        staleness_mean: Mean staleness of a trained trajectory's oldest token, in policy versions.
        longest_over_mean: Longest response divided by the mean.
        bound_s: Lower bound of wall_s for any schedule; None for sync, whose GPUs take turns.
    """

    mode: str
    wall_s: float
    steps: int
    idle_learner: float
    slept_learner: float
    idle_engine: float
    slots_used: float
    staleness_mean: float
    longest_over_mean: float
    bound_s: float | None


def run_mode(mode: str, file: Path, plan: Plan, workload: Workload, *, folder: Path, roles: str) -> Measured:
    """Train with one of the trainers.

    Args:
        mode: "sync" or "async".
        file: The benchmark's file.
        plan: How it runs.
        workload: Lengths and costs.
        folder: Empty folder for all files of the run.
        roles: Where rollouter and learner of the asynchronous trainer run.
    """
    is_async = mode == ASYNC
    script = Script(
        file=file,
        trace=folder / "trace",
        seed=plan.seed,
        num_engines=plan.rollout_gpus if is_async else plan.gpus,
        train_gpus=plan.gpus - plan.rollout_gpus if is_async else plan.gpus,
    )
    num_steps = plan.steps if is_async else plan.sync_steps
    settings = make_settings(plan, workload, num_steps=num_steps, folder=folder)
    write_inputs(script, num_prompts=num_steps * workload.batch.groups, folder=folder)
    if is_async:
        schedule = {"max_staleness": plan.max_staleness, "max_inflight_groups": max_inflight(plan, workload)}
        found = AsyncSettings.model_validate({**settings, "schedule": schedule, "roles": {"placement": roles}})
        inputs = read_inputs(found)
        with open_run(found, resume=False, say=_nothing) as run:
            asyncio.run(AsyncTrainingRun(found, inputs, run, make_console(found), factories=FACTORIES).run())
    else:
        chosen = Settings.model_validate(settings)
        inputs = read_inputs(chosen)
        with open_run(chosen, resume=False, say=_nothing) as run:
            asyncio.run(_train_sync(chosen, inputs, run, script))
    groups = issued_groups(inputs, num_steps * workload.batch.groups, seed=plan.seed)
    return measure(mode, script, plan, groups, metrics=folder / "run" / "metrics.jsonl")


def max_inflight(plan: Plan, workload: Workload) -> int | None:
    """Return the groups generated at once: the workload's number per engine, or as many as staleness allows."""
    each = workload.engine.inflight_groups
    return None if each is None else each * plan.rollout_gpus


def make_settings(plan: Plan, workload: Workload, *, num_steps: int, folder: Path) -> dict[str, Any]:
    """Return the settings of both trainers: no validation, and one checkpoint at the end."""
    return {
        "run": {"name": "run", "directory": folder, "seed": plan.seed},
        "policy": {"path": folder / "policy"},
        "prompts": {"train": folder / "train.jsonl", "max_tokens": workload.lengths.prompt_tokens},
        "reward": {"function": "exact_match"},
        "rollout": {
            "prompts_per_step": workload.batch.groups,
            "group_size": workload.batch.group_size,
            "max_response_tokens": workload.lengths.maximum,
            "deadline_s": 300.0,
        },
        "trainer": {"steps": num_steps, "validate_first": False, "validate_every": 0, "checkpoint_every": 0},
        "metrics": {"console": "off", "report": False, "log_rollouts": 0, "details_every": 0},
        "health": {"enabled": False},
    }


def write_inputs(script: Script, *, num_prompts: int, folder: Path) -> None:
    """Write a tokenizer of ten digits, prompts that are numbers, and the script."""
    policy = folder / "policy"
    policy.mkdir()
    script.trace.mkdir()
    script.write(policy)
    write_tokenizer(policy)
    width = script.workload.lengths.prompt_tokens
    rows = [{"data_source": "none", "prompt": f"{number:0{width}}", "answer": "none"} for number in range(num_prompts)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def issued_groups(inputs: Inputs, num_groups: int, *, seed: int) -> list[int]:
    """Return the numbers of the prompts in the order in which a run issues them."""
    prompts = PromptSource(inputs.train, seed=seed).next(num_groups)
    return [int("".join(str(token - FIRST_DIGIT) for token in prompt.input_ids.tolist())) for prompt in prompts]


async def _train_sync(settings: Settings, inputs: Inputs, run: RunFolder, script: Script) -> None:
    """Run the synchronous trainer's loop on the scripted parts, assembled as in its `TrainingRun`."""
    async with AsyncExitStack() as stack:
        learners, engine = make_learners(script), make_engines(script)
        stack.callback(learners.close)
        stack.push_async_callback(engine.close)
        await engine.start()
        lifecycle = RunLifecycle(settings, run, make_console(settings), inputs.tokenizer)
        stack.callback(lifecycle.events.close)
        stack.callback(lifecycle.trackers.close)
        queue = InProcessQueue(queue_tasks(settings, order="issue"))
        stack.callback(queue.close)
        source = PromptSource(inputs.train, seed=settings.run.seed)
        stack.callback(lifecycle.store.close)
        stack.callback(lifecycle.rollouts.close)

        def save(state: TrainerState) -> None:
            lifecycle.store.begin(state.step, {}, learners.save)

        parts = Parts(
            settings=settings,
            inputs=inputs,
            learners=learners,
            engine=engine,
            rollout=stack.enter_context(open_rollout(settings, inputs.tokenizer, engine)),
            replay=SkipCacheReplay(settings, inputs.tokenizer, say=lifecycle.say),
            source=source,
            queue=queue,
            teachers=None,
            transport=TensorTransport(),
            skipped=SkippedUpdates(most=settings.trainer.max_skipped_updates, directory=run.path / "skipped"),
            stop=stack.enter_context(StopSignal()),
            lifecycle=lifecycle,
            on_state=_nothing,
            save_checkpoint=save,
            memory=make_memory_watch(settings, "trainer", say=lifecycle.say),
        )
        await train(parts, TrainerState(prompt_source=source.state()))


def measure(mode: str, script: Script, plan: Plan, groups: Sequence[int], *, metrics: Path) -> Measured:
    """Summarize a run from its traces and metrics.

    Args:
        mode: Mode of the run.
        script: Script of the run.
        plan: Plan of the run.
        groups: Numbers of its prompts, in the order of issue.
        metrics: Path of its metrics.jsonl.
    """
    learner = json.loads((script.trace / "learner.json").read_text())
    engines = [json.loads((script.trace / f"engine-{n}.json").read_text()) for n in range(script.num_engines)]
    spans = [engine["responses"] for engine in engines]
    first = min(began_at for responses in spans for began_at, _ in responses)
    last = max(engine["updates"][-1] for engine in engines)
    wall_s = last - first
    work_s = sum(map(WORK[mode], read_json_lines(metrics)))
    slept_s = sum(ended_at - began_at for began_at, ended_at in learner["steps"])
    decoded_s = sum(ended_at - began_at for responses in spans for began_at, ended_at in responses)
    busy_s = sum(map(union_s, spans))
    num_slots = script.workload.engine.slots * script.num_engines
    lengths = [tokens for group in groups for tokens in script.lengths[group]]
    size = script.workload.batch.groups
    bound = bound_of(script, groups, groups_per_step=size, num_startable=(plan.max_staleness + 1) * size)
    return Measured(
        mode=mode,
        wall_s=wall_s,
        steps=len(learner["steps"]),
        idle_learner=1 - work_s / wall_s,
        slept_learner=slept_s / wall_s,
        idle_engine=1 - busy_s / (wall_s * script.num_engines),
        slots_used=decoded_s / (wall_s * num_slots),
        staleness_mean=sum(learner["staleness"]) / len(learner["staleness"]),
        longest_over_mean=max(lengths) * len(lengths) / sum(lengths),
        bound_s=bound.seconds if mode == ASYNC else None,
    )


def union_s(spans: Sequence[Sequence[float]]) -> float:
    """Return the seconds covered by at least one of the spans [began, ended]."""
    total, until = 0.0, float("-inf")
    for began_at, ended_at in sorted((span[0], span[1]) for span in spans):
        total += max(0.0, ended_at - max(began_at, until))
        until = max(until, ended_at)
    return total


def _nothing(_: object) -> None:
    """Nobody listens."""
