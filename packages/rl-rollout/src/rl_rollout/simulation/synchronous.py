"""Synchronous trainer in simulated time: all GPUs generate until the longest response ends, then all GPUs train."""

from rl_rollout.simulation.engine import FOREVER, EnginePool, Response
from rl_rollout.simulation.outcome import GpuSplit, SimulatedRun
from rl_rollout.simulation.workload import GroupLengths, Workload


def simulate_sync(workload: Workload, *, gpus: int, num_steps: int, seed: int) -> SimulatedRun:
    """Simulate steps of the synchronous trainer, with engines and learner on the same GPUs.

    Raises:
        SettingsError: The GPUs are not a multiple of an engine's GPUs.
    """
    split = GpuSplit(rollout_gpus=gpus, train_gpus=gpus, is_colocated=True)
    num_engines = split.num_engines(workload)
    lengths = GroupLengths(workload.lengths, group_size=workload.batch.group_size, seed=seed)
    engine, learner, size = workload.engine, workload.learner, workload.batch.groups
    pool = EnginePool(num_engines, engine.step_seconds(), prefill_s_per_token=engine.prefill_s_per_token)
    gen_s = logprobs_s = update_s = 0.0
    num_generated = 0
    for step in range(num_steps):
        groups = range(step * size, (step + 1) * size)
        responses = [
            Response(group, tokens, workload.lengths.prompt_tokens) for group in groups for tokens in lengths[group]
        ]
        pool.add(responses, now=gen_s)  # the engines' clock stands still while the GPUs train
        while (end := pool.next_end()) != FOREVER:
            gen_s = end
            pool.finish()
        num_generated += sum(response.num_tokens for response in responses)
        num_tokens = sum(map(lengths.num_tokens, groups))
        logprobs_s += learner.logprobs_seconds(num_tokens, gpus=gpus)
        update_s += learner.colocated_slowdown * learner.updates_seconds(
            num_tokens, num_updates=size // workload.batch.mini_batch_groups, gpus=gpus
        )
    training_s = logprobs_s + update_s + num_steps * learner.sync_step_s
    wall_s = gen_s + training_s + num_steps * (workload.weights.publish_s + workload.weights.swap_s)
    return SimulatedRun(
        mode="sync",
        split=split,
        step_s=wall_s / num_steps,
        gen_s=gen_s / num_steps,
        logprobs_s=logprobs_s / num_steps,
        update_s=update_s / num_steps,
        idle_learner=1 - training_s / wall_s,
        idle_engine=1 - pool.busy_seconds(now=gen_s) / (wall_s * num_engines),
        wall_s=wall_s,
        # The same GPUs do one kind of work at a time, so both times add up.
        bound_s=training_s + engine.generation_seconds(num_generated, num_engines=num_engines),
        versions=num_steps,
    )
