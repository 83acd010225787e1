"""Metrics of distillation: comparison of student and teachers, and the teachers' cost."""

from rl_metrics.definitions.definition import Band, Metric
from rl_metrics.definitions.entries import BY_DESIGN, THUMB, mean, one, seconds


def _comparison(stem: str, *, of: str) -> tuple[Metric, ...]:
    """Return the metrics of trained tokens that teachers scored."""
    return (
        mean(
            f"{stem}/loss",
            "nats",
            f"Divergence of student and teacher{of}, 0 if they are equal; for stored texts without a teacher, their "
            "cross entropy.",
            over="token",
        ),
        mean(
            f"{stem}/abs_loss",
            "nats",
            f"Absolute value of that divergence{of}; estimates from single tokens can be negative.",
            over="token",
        ),
        one(f"{stem}/loss_min", "nats", f"Minimum divergence at a token{of}.", reduction="min"),
        one(f"{stem}/loss_max", "nats", f"Maximum divergence at a token{of}; bounded by max_loss.", reduction="max"),
        mean(
            f"{stem}/student_mass",
            "1",
            f"The student's total probability of the teacher's top tokens{of}; of the sampled token if the teacher "
            "returned only that.",
            over="token",
        ),
        mean(f"{stem}/teacher_mass", "1", f"The teacher's own probability of those tokens{of}.", over="token"),
        mean(
            f"{stem}/overlap_ratio",
            "1",
            f"Share of the teacher's top tokens that are among the student's equally many top tokens{of}.",
            over="token",
            healthy=Band(low=0.3, high=1.0, source=THUMB),
        ),
        mean(
            f"{stem}/tail_mass",
            "1",
            f"The teacher's probability outside those tokens{of}; large if top_k is small.",
            over="token",
        ),
        mean(
            f"{stem}/clamped_fraction",
            "1",
            f"Share of tokens whose loss, or a logprob in it, was clamped{of}.",
            over="token",
            healthy=Band(high=0.01, source=THUMB),
        ),
        mean(f"{stem}/agreement", "1", f"Share of tokens where both have the same top token{of}.", over="token"),
    )


DISTILLATION = (
    *_comparison("actor/distillation", of=""),
    mean(
        "actor/distillation/aligned_fraction",
        "1",
        "Share of trained tokens that a teacher scored; below 1 if its tokenizer differs.",
        over="token",
        healthy=Band(low=0.5, high=1.0, source=THUMB),
    ),
    *_comparison("actor/distillation/{teacher}", of=", on this teacher's tokens"),
    one(
        "teacher/{teacher}/score_s", "s", "Time that its replicas spent scoring, summed over replicas.", reduction="sum"
    ),
    mean("teacher/{teacher}/idle_share", "1", "Share of the step that its replicas did not score.", over="step"),
    one("teacher/{teacher}/trajectories", "trajectories", "Trajectories that it scored.", reduction="sum"),
    mean("teacher/{teacher}/tokens_per_s", "tokens/s", "Tokens scored per second and replica.", over="step"),
    one(
        "teacher/{teacher}/restarts",
        "times",
        "Restarts of its replicas after they died.",
        reduction="sum",
        healthy=Band(high=0.0, source=BY_DESIGN),
    ),
    one(
        "teacher/{teacher}/cache_hits",
        "trajectories",
        "Trajectories whose scores came from the store.",
        reduction="sum",
    ),
    seconds("teacher", "Waiting for teachers after the step's last rollout"),
)
