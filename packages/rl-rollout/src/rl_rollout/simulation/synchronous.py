"""Synchronous trainer in simulated time: all GPUs generate until the longest response ends, then all GPUs train."""

from rl_rollout.simulation.engine import FOREVER, EnginePool, Response
from rl_rollout.simulation.lengths import GroupLengths
from rl_rollout.simulation.outcome import (
    Cluster,
    Outcome,
    generation_seconds,
    total_response_tokens,
)
from rl_rollout.simulation.workload import Workload


def simulate_sync(workload: Workload, *, gpus: int, num_steps: int, seed: int) -> Outcome:
    """Simulate steps of the synchronous trainer, with engines and learner on the same GPUs.

    Raises:
        SettingsError: The GPUs are not a multiple of an engine's GPUs.
    """
    cluster = Cluster(rollout_gpus=gpus, train_gpus=gpus, is_colocated=True)
    num_engines = cluster.num_engines(workload)
    lengths = GroupLengths(workload.lengths, group_size=workload.batch.group_size, seed=seed)
    gen_s = busy_s = logprobs_s = update_s = 0.0
    size = workload.batch.groups
    for step in range(num_steps):
        groups = range(step * size, (step + 1) * size)
        taken, busy = _generate(workload, lengths, groups, num_engines)
        tokens = sum(map(lengths.num_tokens, groups))
        gen_s += taken
        busy_s += busy
        logprobs_s += workload.learner.logprobs_seconds(tokens, gpus=gpus)
        update_s += workload.learner.colocated_slowdown * workload.learner.updates_seconds(
            tokens, num_updates=size // workload.batch.mini_batch_groups, gpus=gpus
        )
    weights_s = num_steps * (workload.weights.publish_s + workload.weights.swap_s)
    other_s = num_steps * workload.learner.sync_step_s
    wall_s = gen_s + logprobs_s + update_s + other_s + weights_s
    generated = total_response_tokens(lengths, range(num_steps * size))
    training_s = logprobs_s + update_s + other_s
    return Outcome(
        mode="sync",
        cluster=cluster,
        max_staleness=0,
        sync_every=1,
        step_s=wall_s / num_steps,
        gen_s=gen_s / num_steps,
        logprobs_s=logprobs_s / num_steps,
        update_s=update_s / num_steps,
        idle_learner=1 - training_s / wall_s,
        idle_engines=1 - busy_s / (wall_s * num_engines),
        mean_staleness=0.0,
        max_seen_staleness=0,
        partial_share=0.0,
        wall_s=wall_s,
        # The same GPUs do one kind of work at a time, so both times add up.
        bound_s=training_s + generation_seconds(workload, generated, num_engines=num_engines),
        num_versions=num_steps,
    )


def _generate(workload: Workload, lengths: GroupLengths, groups: range, num_engines: int) -> tuple[float, float]:
    """Return the seconds until the longest response ends, and the busy seconds of all engines."""
    engine = workload.engine
    pool = EnginePool(num_engines, engine.step_seconds(), prefill_s_per_token=engine.prefill_s_per_token)
    prompt = workload.lengths.prompt_tokens
    pool.add([Response(group, tokens, prompt) for group in groups for tokens in lengths[group]], now=0.0)
    end = 0.0
    while (time := pool.next_end()) != FOREVER:
        end = time
        pool.finish()
    return end, pool.busy_seconds(now=end)
