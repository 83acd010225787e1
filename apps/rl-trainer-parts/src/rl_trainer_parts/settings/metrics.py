"""Settings of what a run says of itself, and of how it is judged."""

from dataclasses import dataclass, field
from typing import Literal

from rl_metrics.health import Severity
from rl_metrics.trackers import ConsoleKind

LEVELS: tuple[Severity, ...] = ("critical", "warning")
"""Words that `health.pause_on` takes beside names of rules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSettings:
    """What the run says.

    Attributes:
        console: "auto" (a live display in a terminal, else plain lines), "bar" (the display), "lines", "quiet" (only
            findings and the end), "json" (an object a line, for programs) or "off".
        strict: Fail on a metric that is not defined, instead of a warning.
        log_val_generations: Validation responses that are written down and given to trackers each time, one to a
            problem; the console shows a few of the first and the last.
        log_rollouts: Trajectories of each step that are written to rollouts.jsonl, token by token: first the worst and
            the slowest, the best of the worst one's group, then a draw, two of a group at a time; 0 writes none.
        log_rollout_tokens: Most tokens of their responses together; at least one trajectory is written.
        probes: Tokens of validation responses, those of which the first policy is least sure, that the policy is asked
            about at each validation: what it would rather have had there goes to probes.jsonl.
        details_every: Steps between two looks at what costs more to see, the first of which is step 1: distributions of
            rewards, lengths, tokens and times, and each role's memory; 0 makes none.
        replay_rows: Trajectories of a mixture of experts whose logprobs the learner computes twice in such a step, with
            the engine's experts and with its own, for `router/k3_kl/*` and `router/logprobs_diff_mean/*`: two forward
            passes over so many. 0 computes none.
        report: Write report.html at the end of a launch.
        report_every: Also each so many steps, by a process beside the run; 0 writes it at the end alone.
        trace_memory: Also note which lines of code made what is in the trainer's memory; exact, and slow.
        peak_tflops: What a device that learns can do at most, in 10**12 operations a second of its dtype (312 of an
            A100 in bfloat16), for `perf/mfu/*`; none leaves these out.
        trackers: Beside the console and metrics.jsonl: "tensorboard" (in the run's folder), "wandb" (offline where
            WANDB_MODE says so) and "mlflow".
        wandb_project: wandb's project.
        mlflow_uri: A tracking server, whose password may be "$NAME", a variable of the environment, or a database such
            as "sqlite:///runs/mlflow.db"; none takes MLFLOW_TRACKING_URI, and without it a database in the run's
            folder.
        mlflow_experiment: What MLflow compares the run in.
    """

    console: ConsoleKind = "auto"
    strict: bool = False
    log_val_generations: int = 20
    log_rollouts: int = 8
    log_rollout_tokens: int = 8192
    probes: int = 8
    details_every: int = 5
    replay_rows: int = 16
    report: bool = True
    report_every: int = 50
    trace_memory: bool = False
    peak_tflops: float | None = None
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    wandb_project: str = "rl"
    mlflow_uri: str | None = None
    mlflow_experiment: str = "rl"


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSettings:
    """Judging the run while it trains; `rl-metrics rules` lists the rules and their thresholds.

    Attributes:
        enabled: Judge it, write health.json, and say what is wrong.
        every: Steps between two verdicts.
        pause_on: Rules whose findings write a checkpoint and stop the run, with exit status 3; "critical" or "warning"
            stands for every finding at least as bad.
        thresholds: Other thresholds, by rule and name, such as `{ "kl_high.max" = 0.05 }`.
        off: Rules to leave out.
    """

    enabled: bool = True
    every: int = 10
    pause_on: tuple[str, ...] = ()
    thresholds: dict[str, float] = field(default_factory=dict)
    off: tuple[str, ...] = ()
