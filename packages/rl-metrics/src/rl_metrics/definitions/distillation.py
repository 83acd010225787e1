"""Metrics of distillation: comparison of student and teachers, and the teachers' cost."""

from rl_metrics.definitions.definition import Metric
from rl_metrics.definitions.entries import (
    ZERO,
    at_most,
    between,
    highest,
    lowest,
    seconds,
    step_mean,
    token_mean,
    total,
)


def _comparison(stem: str, *, of: str) -> tuple[Metric, ...]:
    """Return the metrics of trained tokens that teachers scored."""
    return (
        token_mean(
            f"{stem}/loss",
            f"Divergence of student and teacher{of}, 0 if they are equal; for stored texts without a teacher, their "
            "cross entropy.",
            "nats",
        ),
        token_mean(
            f"{stem}/abs_loss",
            f"Absolute value of that divergence{of}; estimates from single tokens can be negative.",
            "nats",
        ),
        lowest(f"{stem}/loss_min", f"Minimum divergence at a token{of}.", "nats"),
        highest(f"{stem}/loss_max", f"Maximum divergence at a token{of}; bounded by max_loss.", "nats"),
        token_mean(
            f"{stem}/student_mass",
            f"The student's total probability of the teacher's top tokens{of}; of the sampled token if the teacher "
            "returned only that.",
        ),
        token_mean(f"{stem}/teacher_mass", f"The teacher's own probability of those tokens{of}."),
        token_mean(
            f"{stem}/overlap_ratio",
            f"Share of the teacher's top tokens that are among the student's equally many top tokens{of}.",
            healthy=between(0.3, 1.0),
        ),
        token_mean(
            f"{stem}/tail_mass", f"The teacher's probability outside those tokens{of}; large if top_k is small."
        ),
        token_mean(
            f"{stem}/clamped_fraction",
            f"Share of tokens whose loss, or a logprob in it, was clamped{of}.",
            healthy=at_most(0.01),
        ),
        token_mean(f"{stem}/agreement", f"Share of tokens where both have the same top token{of}."),
    )


DISTILLATION = (
    *_comparison("actor/distillation", of=""),
    token_mean(
        "actor/distillation/aligned_fraction",
        "Share of trained tokens that a teacher scored; below 1 if its tokenizer differs, or if trajectories have no "
        "teacher's prompt.",
        healthy=between(0.5, 1.0),
    ),
    *_comparison("actor/distillation/{teacher}", of=", on this teacher's tokens"),
    total("teacher/{teacher}/score_s", "Time that its replicas spent scoring, summed over replicas.", "s"),
    step_mean("teacher/{teacher}/idle_share", "Share of the step that its replicas did not score."),
    total("teacher/{teacher}/trajectories", "Trajectories that it scored.", "trajectories"),
    step_mean("teacher/{teacher}/tokens_per_s", "Tokens scored per second and replica.", "tokens/s"),
    total("teacher/{teacher}/restarts", "Restarts of its replicas after they died.", "times", healthy=ZERO),
    total("teacher/{teacher}/cache_hits", "Trajectories whose scores came from the store.", "trajectories"),
    seconds("teacher", "Waiting for teachers after the step's last rollout, or scoring with the learner as its own"),
)
