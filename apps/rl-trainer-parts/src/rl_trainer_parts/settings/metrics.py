"""Settings of metrics and health checks."""

from dataclasses import dataclass, field
from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from rl_metrics.health import Severity
from rl_metrics.trackers import ConsoleKind

LEVELS: tuple[Severity, ...] = ("critical", "warning")
"""Severities that `health.pause_on` accepts beside names of rules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSettings:
    """What the run records and displays.

    Attributes:
        console: "auto" (a live display in a terminal, plain lines elsewhere), "bar" (the live display), "lines",
            "quiet" (only findings and the result), "json" (one JSON object per line) or "off".
        strict: Fail, instead of warning, on a metric without a definition.
        log_val_generations: Validation responses to record and send to trackers at each validation, one per prompt. The
            console shows a few from the first and the last validation.
        log_rollouts: Trajectories to record token by token in rollouts.jsonl at each step: the worst, the slowest and
            the best of the worst one's group, then a random sample in pairs from the same group. 0 records none.
        log_rollout_tokens: Maximum number of response tokens recorded per step; at least one trajectory is always
            recorded.
        probes: Number of validation tokens to probe at each validation, chosen where the initial policy is least
            certain. The policy's preferred alternatives are written to probes.jsonl.
        probe_tokens: Further tokens to probe, such as [";", "<think>", 151643]: each a text that is one token of the
            policy's tokenizer, or an id. A token is probed in the first two responses of the first validation that have
            it, or else as the first token of a response.
        details_every: Steps between the more expensive measurements, starting at step 1: histograms of rewards,
            lengths, tokens and times, and the memory of each role. 0 disables them.
        replay_rows: Mixtures of experts: trajectories per detailed step whose logprobs the learner computes twice, with
            the engine's routing and with its own, for `router/k3_kl/*` and `router/logprobs_diff_mean/*`. Costs two
            forward passes over them; 0 disables it.
        report: Write report.html when the trainer ends.
        report_every: Also write it every N steps, in a separate process; 0 writes it only at the end.
        trace_memory: Also record which lines of code allocated the trainer's memory. Exact, but slow.
        peak_tflops: Peak throughput of one training device in TFLOP/s for its dtype (312 for an A100 in bfloat16), used
            for `perf/mfu/*`; none leaves these metrics out.
        trackers: Trackers beside the console and metrics.jsonl: "tensorboard" (in the run's folder), "wandb" (respects
            WANDB_MODE=offline) and "mlflow".
        wandb_project: Weights & Biases project.
        mlflow_uri: MLflow tracking server, or a database such as "sqlite:///runs/mlflow.db". A password can be "$NAME",
            an environment variable. none uses MLFLOW_TRACKING_URI, or else a database in the run's folder.
        mlflow_experiment: MLflow experiment.
    """

    console: ConsoleKind = "auto"
    strict: bool = False
    log_val_generations: NonNegativeInt = 20
    log_rollouts: NonNegativeInt = 8
    log_rollout_tokens: PositiveInt = 8192
    probes: NonNegativeInt = 8
    probe_tokens: tuple[int | str, ...] = ()
    details_every: NonNegativeInt = 5
    replay_rows: NonNegativeInt = 16
    report: bool = True
    report_every: NonNegativeInt = 50
    trace_memory: bool = False
    peak_tflops: PositiveFloat | None = None
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    wandb_project: str = "rl"
    mlflow_uri: str | None = None
    mlflow_experiment: str = "rl"

    def has_details(self, step: int) -> bool:
        """True if the more expensive measurements are due in a step; steps count from 1."""
        return bool(self.details_every) and (step - 1) % self.details_every == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSettings:
    """Health checks during training; `rl-metrics rules` lists the rules and their thresholds.

    Attributes:
        enabled: Check the run's health, write health.json and report findings.
        every: Steps between two checks.
        pause_on: Rules whose findings write a checkpoint and stop the run with exit status 3. "critical" or "warning"
            means every finding of at least that severity.
        thresholds: Overrides of thresholds by rule and name, such as `{ "kl_high.max" = 0.05 }`.
        off: Rules to disable.
    """

    enabled: bool = True
    every: PositiveInt = 10
    pause_on: tuple[str, ...] = ()
    thresholds: dict[str, float] = field(default_factory=dict)
    off: tuple[str, ...] = ()
