"""Metrics of time, speed and memory."""

from rl_metrics.definitions.definition import Band
from rl_metrics.definitions.entries import THUMB, mean, one, seconds

TOKEN_PHASES = ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")
"""Phases that process all tokens of the batch; "gen" only those of the responses."""

ROLES = {"actor": "update_actor", "critic": "update_critic", "actor_infer": "old_log_prob", "ref": "ref"}
"""Phase of each role's computation."""

TIMING = (
    seconds("step", "One complete step"),
    seconds("gen", "Generation, with agent loops"),
    seconds("load_rollouts", "Loading rollouts from a skip cache, within the generation's time"),
    seconds("replayed_gen", "Original generation time of replayed rollouts"),
    mean(
        "timing_s/reward",
        "s",
        "Reward time of a session, including failed rewards, mean; many run concurrently.",
        over="trajectory",
    ),
    mean(
        "timing_s/reward_wait",
        "s",
        "Time that a session waited for its busy reward function, mean.",
        over="trajectory",
    ),
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
    one("perf/total_num_tokens", "tokens", "Prompt and response tokens of the batch.", reduction="sum"),
    one("perf/computed_tokens", "tokens", "Tokens that the policy's updates computed.", reduction="sum"),
    one(
        "perf/saved_tokens",
        "tokens",
        "Tokens that the policy's updates did not recompute because rows of a prompt share a prefix.",
        reduction="sum",
    ),
    one("perf/saved_share", "1", "Share of an update's tokens that were not recomputed."),
    one("perf/time_per_step", "s", "Time of one complete step.", reduction="max"),
    one("perf/throughput", "tokens/s", "Prompt and response tokens per second and device."),
    one("perf/samples_per_s", "trajectories/s", "Trajectories trained per second."),
    one("timing_per_token_ms/gen", "ms/token", "Generation time per response token of the batch."),
    *(
        one(f"timing_per_token_ms/{phase}", "ms/token", f"Time of the phase {phase} per token of the batch.")
        for phase in TOKEN_PHASES
    ),
    *(
        one(
            f"perf/mfu/{role}",
            "1",
            f"Model FLOPs of the phase {phase} over the devices' peak in its time; only with metrics.peak_tflops.",
            healthy=Band(low=0.2, source=THUMB),
        )
        for role, phase in ROLES.items()
    ),
)
