"""Metrics of time, speed and memory."""

from rl_metrics.definitions.definition import Metric
from rl_metrics.definitions.entries import at_least, highest, lowest, newest, seconds, total, trajectory_mean

TOKEN_PHASES = ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")
"""Phases that process all tokens of the batch; "gen" only those of the responses."""

ROLES = {"actor": "update_actor", "critic": "update_critic", "actor_infer": "old_log_prob", "ref": "ref"}
"""Phase of each role's computation."""

TIMING = (
    seconds("step", "One complete step"),
    seconds("gen", "Generation, with agent loops"),
    seconds("load_rollouts", "Loading rollouts from a skip cache, within the generation's time"),
    seconds("replayed_gen", "Original generation time of replayed rollouts"),
    trajectory_mean(
        "timing_s/reward", "Reward time of a session, including failed rewards, mean; many run concurrently.", "s"
    ),
    trajectory_mean("timing_s/reward_wait", "Time that a session waited for its busy reward function, mean.", "s"),
    seconds("old_log_prob", "The learner's logprobs before the update"),
    seconds("ref", "Logprobs of the frozen reference"),
    seconds("replay_mismatch", "A mixture's logprobs of a sample with and without the engine's experts"),
    seconds("values", "The critic's values"),
    seconds("adv", "Advantages, correction weights and loss weights"),
    seconds("update_actor", "Forward, backward and optimizer step of the policy"),
    seconds("update_critic", "Forward, backward and optimizer step of the critic"),
    seconds("update_weights", "Publishing weights to the engines, proof included"),
    seconds("testing", "Validation, from its issue to its last sample, even if concurrent with training"),
    seconds("save_checkpoint", "Writing a checkpoint"),
    seconds("dump_rollout_generations", "Writing the step's generations"),
    total("perf/total_num_tokens", "Prompt and response tokens of the batch.", "tokens"),
    total("perf/computed_tokens", "Tokens that the policy's updates computed.", "tokens"),
    total(
        "perf/saved_tokens",
        "Tokens that the policy's updates did not recompute because rows of a prompt share a prefix.",
        "tokens",
    ),
    newest("perf/saved_share", "Share of an update's tokens that were not recomputed."),
    highest("perf/time_per_step", "Time of one complete step.", "s"),
    newest("perf/throughput", "Prompt and response tokens per second and device.", "tokens/s"),
    newest("perf/samples_per_s", "Trajectories trained per second.", "trajectories/s"),
    newest("timing_per_token_ms/gen", "Generation time per response token of the batch.", "ms/token"),
    *(
        newest(f"timing_per_token_ms/{phase}", f"Time of the phase {phase} per token of the batch.", "ms/token")
        for phase in TOKEN_PHASES
    ),
    *(
        newest(
            f"perf/mfu/{role}",
            f"Model FLOPs of the phase {phase} over the devices' peak in its time; only with metrics.peak_tflops.",
            healthy=at_least(0.2),
        )
        for role, phase in ROLES.items()
    ),
)

GPU_OWNERS = {
    "perf": "the learner's ranks, which also hold the reference and the critic",
    "engine": "the engines",
    "teacher": "the teachers",
}
"""Prefixes of metrics about GPUs, and whose GPUs these are."""


def _gpu_metrics(owner: str, whose: str) -> tuple[Metric, ...]:
    """Return the metrics of an owner's GPUs: over all of them, and of each one if there are several."""
    figures = (
        ("max_memory_allocated_gb", "GiB", "Peak memory of torch's tensors in the step", "the largest", highest),
        ("max_memory_reserved_gb", "GiB", "Peak memory that torch reserved in the step", "the largest", highest),
        ("memory_total_gb", "GiB", "Memory of a card", "the smallest", lowest),
        (
            "gpu_utilization",
            "1",
            "Share of the step in which a card ran a kernel, of any process (needs nvidia-ml-py)",
            "mean",
            newest,
        ),
    )
    over_all = (
        reduced(f"{owner}/{name}", f"{meaning}, {how} over the GPUs of {whose}.", unit)
        for name, unit, meaning, how, reduced in figures
    )
    of_each = (
        newest(f"{owner}/gpu/{{n}}/{name}", f"{meaning}, on GPU {{n}} of {whose}; only if there are several.", unit)
        for name, unit, meaning, *_ in figures
    )
    return (*over_all, *of_each)


MEMORY = (
    highest("perf/cpu_memory_used_gb", "Memory in use on the host.", "GiB"),
    highest("perf/cpu_memory_total_gb", "Total memory of the host.", "GiB"),
    highest("perf/process_memory_gb", "Resident memory of the process.", "GiB"),
    *(metric for owner, whose in GPU_OWNERS.items() for metric in _gpu_metrics(owner, whose)),
    highest(
        "memory/{owner}_gb",
        "Memory of a role's process (trainer, controller, rollouter, learner) without mapped files; with _children, of "
        "the processes it started; or of a known part, such as the queue's rows.",
        "GiB",
    ),
    highest(
        "memory/{owner}_python_blocks",
        "Memory blocks of Python objects in a role's process. If it grows with the memory, Python objects accumulate; "
        "otherwise native code keeps the memory.",
        "blocks",
    ),
)
