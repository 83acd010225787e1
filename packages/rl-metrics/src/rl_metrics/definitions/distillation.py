"""Metrics of distillation: comparison of student and teachers, and the teachers' cost."""

from rl_metrics.definitions.definition import Band, Metric
from rl_metrics.definitions.entries import BY_DESIGN, THUMB, mean, one, seconds


def _comparison(stem: str, *, of: str) -> tuple[Metric, ...]:
    """What is said of the trained tokens that teachers scored."""
    return (
        mean(f"{stem}/loss", "nats", f"Divergence of student and teacher{of}; 0 when they are equal.", over="token"),
        mean(
            f"{stem}/abs_loss",
            "nats",
            f"Absolute value of that divergence{of}; estimates from single tokens can be negative.",
            over="token",
        ),
        one(f"{stem}/loss_min", "nats", f"Smallest divergence at a token{of}.", reduction="min"),
        one(f"{stem}/loss_max", "nats", f"Largest divergence at a token{of}; what max_loss bounds.", reduction="max"),
        mean(
            f"{stem}/student_mass",
            "1",
            f"The student's probability of the teacher's likeliest tokens together{of}; of the sampled token where the "
            "teacher gave that alone.",
            over="token",
        ),
        mean(f"{stem}/teacher_mass", "1", f"The teacher's own probability of those tokens{of}.", over="token"),
        mean(
            f"{stem}/overlap_ratio",
            "1",
            f"Share of the teacher's likeliest tokens that are among as many of the student's{of}.",
            over="token",
            healthy=Band(low=0.3, high=1.0, source=THUMB),
        ),
        mean(
            f"{stem}/tail_mass",
            "1",
            f"The teacher's probability outside of those tokens{of}; large where top_k is small.",
            over="token",
        ),
        mean(
            f"{stem}/clamped_fraction",
            "1",
            f"Share of tokens whose loss, or a logprob in it, was clamped{of}.",
            over="token",
            healthy=Band(high=0.01, source=THUMB),
        ),
        mean(f"{stem}/agreement", "1", f"Share of tokens where both find the same token likeliest{of}.", over="token"),
        mean(
            f"{stem}/aligned_fraction",
            "1",
            f"Share of trained tokens that a teacher scored{of}; below 1 where its tokenizer is another.",
            over="token",
            healthy=Band(low=0.5, high=1.0, source=THUMB),
        ),
    )


DISTILLATION = (
    *_comparison("actor/distillation", of=""),
    *_comparison("actor/distillation/{teacher}", of=", of this teacher's tokens"),
    one("teacher/{teacher}/score_s", "s", "Time in which its replicas scored, summed over them.", reduction="sum"),
    mean("teacher/{teacher}/idle_share", "1", "Share of the step in which its replicas did not score.", over="step"),
    one("teacher/{teacher}/trajectories", "trajectories", "Trajectories that it scored.", reduction="sum"),
    mean("teacher/{teacher}/tokens_per_s", "tokens/s", "Tokens scored by the second of one replica.", over="step"),
    one(
        "teacher/{teacher}/restarts",
        "times",
        "Replicas of it that died and were started again.",
        reduction="sum",
        healthy=Band(high=0.0, source=BY_DESIGN),
    ),
    one(
        "teacher/{teacher}/cache_hits",
        "trajectories",
        "Trajectories whose scores were stored already.",
        reduction="sum",
    ),
    seconds("teacher", "Waiting for teachers after the step's last rollout"),
)
