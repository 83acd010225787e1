"""Metrics of time, speed and memory."""

from rl_metrics.definitions.definition import Band
from rl_metrics.definitions.entries import THUMB, mean, one, seconds

TOKEN_PHASES = ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")
"""Phases that go over all tokens of the batch; "gen" goes over those of the responses."""

ROLES = {"actor": "update_actor", "critic": "update_critic", "actor_infer": "old_log_prob", "ref": "ref"}
"""Phase in which each role computes."""

TIMING = (
    seconds("step", "One whole step"),
    seconds("gen", "Generation, with agent loops"),
    seconds("load_rollouts", "Loading rollouts from a skip cache, within the generation's time"),
    seconds("replayed_gen", "What the generation of replayed rollouts took when they were made"),
    mean("timing_s/reward", "s", "Time that the reward of a session took, mean; many run at once.", over="trajectory"),
    mean(
        "timing_s/reward_wait",
        "s",
        "Time that a session waited until its reward function, busy with others, had time for it, mean.",
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
    seconds("testing", "Validation, also one beside the training, from its issue to its last sample"),
    seconds("save_checkpoint", "Writing a checkpoint"),
    seconds("dump_rollout_generations", "Writing the step's generations"),
    one("perf/total_num_tokens", "tokens", "Prompt and response tokens of the batch.", reduction="sum"),
    one("perf/computed_tokens", "tokens", "Tokens that the policy's updates computed.", reduction="sum"),
    one(
        "perf/saved_tokens",
        "tokens",
        "Tokens that the policy's updates did not compute again, since rows of a prompt begin alike.",
        reduction="sum",
    ),
    one("perf/saved_share", "1", "Share of an update's tokens that it did not compute again."),
    one("perf/time_per_step", "s", "Time of one whole step.", reduction="max"),
    one("perf/throughput", "tokens/s", "Prompt and response tokens a second and device."),
    one("perf/samples_per_s", "trajectories/s", "Trajectories trained a second."),
    one("timing_per_token_ms/gen", "ms/token", "Time of the generation by the token of the batch's responses."),
    *(
        one(f"timing_per_token_ms/{phase}", "ms/token", f"Time of the phase {phase} by the token of the batch.")
        for phase in TOKEN_PHASES
    ),
    *(
        one(
            f"perf/mfu/{role}",
            "1",
            f"Operations that the model needs in the phase {phase}, over what the devices could do in its time; only "
            "with metrics.peak_tflops.",
            healthy=Band(low=0.2, source=THUMB),
        )
        for role, phase in ROLES.items()
    ),
)
